"""Data that crosses a border: messages between nodes, effects of a machine for its driver, records in a journal.

Declarations only: the receiver defines the behaviour. Imports `tops.model`; machines and drivers import it.
"""
