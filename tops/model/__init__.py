"""The vocabulary of publish/subscribe: event types, filters, constraints, transactions, ids, errors.

Plain values and pure functions. Imports no other package of the project and does no I/O; every other package may
import it.
"""
