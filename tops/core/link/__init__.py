"""The session of a link: what was sent is numbered and kept until the other end has acknowledged it."""
