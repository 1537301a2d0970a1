"""The subscriber's half of a site: subscriptions, sub-transactions, prepared epochs, doubt, reading a log.

Prepares, decisions, publications and log entries come in; votes and acknowledgements go out to the coordinators, and
calls to the application. The package imports `tops.model`, `tops.protocol` and small parts of `tops.core.commit` and
`tops.core.log`; `tops.core.client` uses it.
"""
