"""What an application holds: `connect()`, a replica set, transactions, reads and writes."""
