"""What a broker does for event types whose rendezvous it is: it numbers events, keeps logs, coordinates transactions.

`rendezvous` is the machine as a whole: messages and publications go in, effects come out. It imports `tops.core.commit`
(epochs, to which it submits transactions that are ready to be prepared), `tops.core.log`, `tops.model` and
`tops.protocol`. `tops.core.broker` calls it; it knows nothing of links, routes or participants.
"""
