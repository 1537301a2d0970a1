"""The `tops` commands of the replication layer: thin, one module per group, named here and loaded when called."""

COMMANDS = {
    "divergence": ("replication.cli.divergence:app", "Find, explain and repair what differs between replicas."),
    "replica": ("replication.cli.replica:app", "One replica's agent, in the foreground."),
    "rs": ("replication.cli.rs:app", "Replica sets: check the file, see how they are, pause and resume."),
    "journal": ("replication.cli.journal:app", "A coordinator's journal that is older than its replicas: recover."),
    "up": ("replication.cli.up:up", "Run all brokers and replicas of the file; Ctrl-C stops them."),
    "write": ("replication.cli.data:write", "Write one statement as one transaction."),
    "read": ("replication.cli.data:read", "Read one query from a replica that has come far enough."),
    "doctor": ("replication.cli.doctor:doctor", "What would go wrong with a replica set, before it does."),
    "demo": ("replication.cli.demo:demo", "Every policy on real PostgreSQL servers, one of which is killed."),
}
