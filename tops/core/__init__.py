"""The protocol as machines without I/O: a message or a timer goes in, effects come out.

`client` and `participant` run in a site, `broker`, `coordinator`, `commit` and `log` in a broker, `link` in both. A
transaction passes through `client` -> `broker` -> `coordinator` -> `commit` -> `participant`. Machines import
`tops.model`, `tops.protocol` and each other; they do no I/O, read no clock, draw no random number and never await. The
drivers in `tops.runtime` and `tops.sim` carry out their effects, in order.
"""
