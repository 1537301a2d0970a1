"""Ports for servers that do not listen yet: nobody else may get the same one meanwhile."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from adapters.embedded.free_ports import PORTS, free_port

OTHER = "from adapters.embedded.free_ports import free_port; print(*(free_port() for _ in range(50)))"


def test_no_port_is_given_out_twice_nor_while_somebody_listens() -> None:
    with ThreadPoolExecutor(8) as pool:
        ports = list(pool.map(lambda _: free_port(), range(400)))
    assert len(set(ports)) == 400
    assert set(ports) <= set(PORTS)

    after = PORTS[(PORTS.index(free_port()) + 5) % len(PORTS)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", after))
        taken.listen()
        assert after not in [free_port() for _ in range(20)]


def test_processes_side_by_side_get_different_ports() -> None:
    started = [subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    given = [port for process in started for port in process.communicate(timeout=60)[0].split()]

    assert len(given) == len(set(given)) == 200
