"""HTTP for brokers and agents: who calls, what the caller may do, and a client for the command line.

It knows no broker: the routes of a broker are in `tops.server`, those of replica sets in `replication.http`.
"""
