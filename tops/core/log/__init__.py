"""The log of one durable event type as data: indexes, entries, digests, and the position of each follower.

Entries come in from `tops.core.coordinator` and `tops.core.commit`; deliveries to followers come out as effects. The
package imports only `tops.model` and `tops.protocol`.
"""
