"""The `tops` command; the groups of replication are in `replication.cli`."""
