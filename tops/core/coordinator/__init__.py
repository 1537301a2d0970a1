"""What a broker does for event types whose rendezvous it is: it numbers events, keeps logs, coordinates transactions.

`rendezvous` is the machine as a whole. Transactions that are ready to be prepared go on to `tops.core.commit`.
"""
