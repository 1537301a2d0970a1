"""Links between nodes: connections, the handshake, WebSocket frames, and the session on top of them."""
