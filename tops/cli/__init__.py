"""The `tops` command and the groups of this package; other packages add theirs as entry points.

Commands read options, call the layers below and print results; they decide nothing of the protocol.
"""
