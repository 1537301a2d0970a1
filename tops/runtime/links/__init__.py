"""Links between nodes: connections, the handshake, WebSocket frames, and the session on top of them.

Messages of the node go in and come out as frames of a WebSocket; the package decides nothing about their content. It
imports `tops.core.link`, `tops.protocol` and `tops.security`.
"""
