"""What a replica does with the log and with its own commits: vote, apply, certify, resolve, publish, compare."""
