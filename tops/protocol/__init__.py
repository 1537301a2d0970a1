"""What crosses a border: messages between nodes, effects that a machine asks of its driver, records in a journal.

Declarations only; whoever receives one decides what it means. Imports `tops.model`.
"""
