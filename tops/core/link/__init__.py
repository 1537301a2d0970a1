"""The session of a link: frames are numbered and kept until the other end has acknowledged them.

The driver in `tops.runtime.links` passes frames in and out. The package imports only `tops.model` and `tops.protocol`.
"""
