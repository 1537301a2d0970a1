"""Two-phase commit at the coordinator: census, standing registrations, epochs, votes, decisions and their memory.

Transactions that are ready come in from `tops.core.coordinator`; prepares go out to participants, votes come back, and
decisions go out once they are persisted. The package imports `tops.core.log`, `tops.model` and `tops.protocol`.
"""
