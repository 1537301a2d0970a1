"""HTTP for brokers and agents: the identity of the caller, its rights, and a client for the command line.

It does not depend on brokers: the routes of a broker are in `tops.server`, those of replica sets in `replication.http`.
The package imports `tops.security` and `tops.model`.
"""
