"""Drivers of the machines on asyncio: timers, effects in order, participants' callbacks, a broker's and a site's node.

`links` carries frames, `edge` checks what sites send. Drivers feed messages, timers and results to the machines of
`tops.core` and carry out their effects; they decide nothing of the protocol. The package imports `tops.core`,
`tops.journal`, `tops.security` and what is below; `tops.client` and `tops.server` use it.
"""
