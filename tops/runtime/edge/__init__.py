"""What a broker checks of every message of a site: rights, bounds in bytes, and whether events fit their types.

A message goes in and passes, or a rejection comes out. The package imports `tops.model`, `tops.protocol` and
`tops.security`.
"""
