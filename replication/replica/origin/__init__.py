"""Statements that are executed once: the client's choice of an origin, and the agent that executes and submits.

`fallback` runs in a client, `executor` and `submission` in a replica's agent. A request goes from the fallback to the
executor, its write set from there through the policy of the set, and the response back. May import the adapters'
`Origin`, policies, requests and participants of `replication`, and `tops`.
"""
