"""Drivers of the machines on asyncio: timers, effects in order, participants' callbacks, a broker's and a site's node.

`links` carries frames, `edge` checks what sites send. Drivers carry out effects and decide nothing of the protocol.
"""
