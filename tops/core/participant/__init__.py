"""The subscriber's half of a site: subscriptions, sub-transactions, prepared epochs, doubt, reading a log.

Votes and acknowledgements go out; decisions and log entries come in.
"""
