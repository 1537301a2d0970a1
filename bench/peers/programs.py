"""Servers that come from the operating system's packages: found, started in the foreground, awaited, ended.

Nothing here outlives the benchmark: a server runs in a directory of its own, and the kernel ends it with us.
"""

import asyncio
import os
import random
import shutil
import socket
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from bench.systems import SystemUnavailable

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
PORTS = range(20_000, 32_000)  # below those that systems draw for outgoing connections


def program(name: str, package: str) -> str:
    """The path of an installed program, or a `SystemUnavailable` that says which package brings it."""
    # Servers are installed where only the administrator's search path looks.
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
    if found is None:
        raise SystemUnavailable(f"{name} is not installed: apt-get install {package}")
    return found


def free_ports(number: int) -> list[int]:
    """Different loopback ports that nobody listens on at this moment."""
    ports: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == number:
            return ports
    raise SystemUnavailable(f"fewer than {number} free ports between {PORTS.start} and {PORTS.stop} on 127.0.0.1")


class Program:
    """One server process, its output in `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = list(command), log
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, answers: Callable[[], Awaitable[object]]) -> None:
        """Return once `answers()` ends without an error; a server that does not come up is a `SystemUnavailable`."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *_dying_with_us(), *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._until(answers)
        except TimeoutError as error:
            await self.stop()
            raise self._unavailable(f"did not answer within {START_TIMEOUT_S:.0f} s") from error

    async def stop(self) -> None:
        """Ask, wait, then insist."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _until(self, answers: Callable[[], Awaitable[object]]) -> None:
        while True:
            if self._process is not None and self._process.returncode is not None:
                raise self._unavailable(f"ended with code {self._process.returncode}")
            try:
                await answers()
                return
            except Exception:  # drivers have no common family for "not yet"; the time-out bounds the wait
                await asyncio.sleep(POLL_S)

    def _unavailable(self, what: str) -> SystemUnavailable:
        ending = self._log.read_text(errors="replace")[-1500:] if self._log.exists() else ""
        return SystemUnavailable(f"{Path(self._command[0]).name} {what}; its log ends:\n{ending}")


async def run_to_end(command: Sequence[str]) -> str:
    """What a program says until it ends by itself; its failure is a `SystemUnavailable`."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    said = output.decode(errors="replace")
    if process.returncode != 0:
        raise SystemUnavailable(f"{Path(command[0]).name} ended with code {process.returncode}: {said[-1500:]}")
    return said


async def accepts_connections(port: int) -> None:
    """An error unless somebody accepts TCP connections on that loopback port."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()


def _dying_with_us() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv else []
