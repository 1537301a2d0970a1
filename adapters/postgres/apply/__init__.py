"""Writing through the one connection of a replica set: epochs, log entries, the outbox, keys, and reads beside them."""
