"""Whole clusters of the real machines in one thread: seeded, reproducible, and with injected faults.

It drives the machines of `tops.core` through their normal entry points, on virtual time, with its own network, disks
and databases; checkers compare the results with the guarantees. The package imports `tops.core` and below.
"""
