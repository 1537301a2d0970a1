"""The `tops` commands of the replication layer: thin, one module per group, each an entry point of the distribution."""
