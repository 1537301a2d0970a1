"""The publisher's half of a site: its event types, its events and its transactions, up to their outcome.

`site` is the machine as a whole: requests of the application and messages of the broker go in, effects come out. It
passes what concerns subscriptions to `tops.core.participant`. The package imports that, `tops.model`, `tops.protocol`
and the event coordinator of `tops.core.coordinator`, which runs here for private transactions.
"""
