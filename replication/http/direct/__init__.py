"""The listener of a replica's direct connections. What a connection carries belongs to `replication.replica.direct`."""
