"""One order for the events of several families: topic managers at brokers, ordering modules at sites.

Topic managers give each event an index and a timestamp; ordering modules deliver events by their timestamps. How they
work together is described in docs/ordering.md.
"""
