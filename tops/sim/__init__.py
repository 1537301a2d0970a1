"""Whole clusters of the real machines in one thread: seeded, replayable, and full of faults."""
