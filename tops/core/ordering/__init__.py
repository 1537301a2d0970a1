"""One order for the events of several families: topic managers at brokers, ordering modules at sites.

Topic managers give each event an index and a timestamp; ordering modules deliver events by their timestamps. How they
work together is described in docs/ordering.md.

The brokers' and the sites' machines (`tops.core.broker`, `tops.core.client`) pass messages, timers and records in, and
get effects back. This package reads no clock, socket or file.
"""
