"""What an application holds: a site, its subscriptions, its transactions, its questions about logs.

Calls go down to `tops.runtime`; callbacks and results come back as awaited values.
"""
