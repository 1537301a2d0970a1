"""The broker as a process: it opens the journal, listens, dials other brokers, serves HTTP, and stops in order.

It connects `tops.runtime` (the broker's node), `tops.journal`, `tops.security` and `tops.http`; the command line starts
it.
"""
