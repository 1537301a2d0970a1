"""The broker as a process: it opens the journal, listens, dials other brokers, answers HTTP, and stops in order."""
