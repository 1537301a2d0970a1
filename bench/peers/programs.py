"""Servers that come from the operating system's packages: found, started in the foreground, awaited, ended.

Nothing here outlives the benchmark, even when it is killed: a small shell holds the read end of a pipe whose write end
only we have; when the pipe closes, it ends the server and removes the server's directory.
"""

import asyncio
import os
import shutil
import signal
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.systems import SystemUnavailable

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
# $1: the directory to remove; the rest: the server's command line. A line on the pipe says that we have ended the
# server, or that it has ended by itself; the end of the pipe says that we are gone.
SUPERVISOR = """\
directory=$1; shift
"$@" </dev/null >&2 & server=$!
echo $server
exec >/dev/null
if read -r released; then wait $server; exit; fi
kill -TERM $server; wait $server; rm -rf "$directory"
"""


def program(name: str, package: str) -> str:
    """The path of an installed program, or a `SystemUnavailable` that says which package brings it."""
    # Servers are installed where only the administrator's search path looks.
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
    if found is None:
        raise SystemUnavailable(f"{name} is not installed: apt-get install {package}")
    return found


class Program:
    """One server process with a directory of its own, which the caller makes and removes; its output goes to `log`."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._command, self._directory = list(command), directory
        self._supervisor: Process | None = None
        self.pid = 0

    @property
    def log(self) -> Path:
        return self._directory / "server.log"

    async def start(self, answers: Callable[[], Awaitable[object]]) -> None:
        """Return once `answers()` ends without an error; a server that does not come up is a `SystemUnavailable`."""
        with self.log.open("ab") as log:
            self._supervisor = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", SUPERVISOR, "tops-bench-server", str(self._directory), *self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us; servers are stopped by us, in order
            )
        assert self._supervisor.stdout is not None
        self.pid = int(await self._supervisor.stdout.readline())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._until(answers)
        except TimeoutError as error:
            await self.stop()
            raise self._unavailable(f"did not answer within {START_TIMEOUT_S:.0f} s") from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ask, wait, then insist."""
        if self._supervisor is None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._released()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._supervisor.wait()
        self._supervisor = None

    async def _until(self, answers: Callable[[], Awaitable[object]]) -> None:
        while _alive(self.pid):
            try:
                await answers()
                return
            except Exception:  # drivers have no common family for "not yet"; the time-out bounds the wait
                await asyncio.sleep(POLL_S)
        raise self._unavailable(f"ended with code {await self._released()}")

    async def _released(self) -> int:
        """The code with which the server ends; the supervisor no longer minds us."""
        assert self._supervisor is not None
        await self._supervisor.communicate(b"released\n")
        return await self._supervisor.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if _alive(self.pid):
                os.kill(self.pid, number)

    def _unavailable(self, what: str) -> SystemUnavailable:
        ending = self.log.read_text(errors="replace")[-1500:]
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


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
