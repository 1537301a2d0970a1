"""Ports on loopback for servers that are about to start.

Between the choice of a port and the moment when its server listens, nobody can see that it is taken. So a process
gives each port out once, and processes look in different places.
"""

import os
import socket
import threading
from contextlib import suppress

from tops.model.errors import ConfigError

# Below the range from which systems draw the ports of outgoing connections, so that a restart finds its port free.
PORTS = range(20_000, 32_000)
_STRIDE = 617  # between the places where neighbouring processes begin; shares no factor with the number of ports

_next = 0
_lock = threading.Lock()


def free_port() -> int:
    """A port that nobody listens at; not given out again before all others were."""
    global _next
    with _lock:
        for _ in PORTS:
            port = PORTS[(os.getpid() * _STRIDE + _next) % len(PORTS)]
            _next += 1
            if _is_free(port):
                return port
    raise ConfigError(f"no free port between {PORTS.start} and {PORTS.stop} on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False
