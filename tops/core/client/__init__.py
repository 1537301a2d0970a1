"""The publisher's half of a site: its event types, its events and its transactions, up to their outcome.

`site` is the machine as a whole; it hands what concerns subscriptions to `tops.core.participant`.
"""
