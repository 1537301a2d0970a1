"""The objects of an application: a site, its subscriptions, its transactions, its requests about logs.

Calls go down to `tops.runtime`; results come back as awaited values, events and outcomes as callbacks. The package
imports `tops.runtime` and below.
"""
