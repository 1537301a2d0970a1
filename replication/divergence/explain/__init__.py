"""Why rows differ: what the log, the row versions and the replicas know about them."""
