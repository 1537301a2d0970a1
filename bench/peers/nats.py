"""NATS, the messaging peer: one server, one publisher, three subscriber processes, all on loopback.

Functions that return numbers, so that a benchmark can alternate them with TOPS in one run. Optional: the server comes
from the Debian package nats-server, the client from nats-py. JetStream keeps events in files but does not promise
that they are on disk when it acknowledges: its figures are not those of a durable log.
"""

import asyncio
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from adapters.embedded.free_ports import free_port
from bench.peers.programs import Program, accepts_connections, program, run_to_end
from bench.statistics import percentile
from bench.systems import BenchmarkFailed, SystemUnavailable

SUBSCRIBERS = 3
PAYLOAD_BYTES = 100
BATCH = 256  # events between two flushes of core NATS
RECEIVE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """How fast events went through, and how long the publisher waited for each answer of the server."""

    events: int
    published_per_s: float
    received_per_s: float  # until the last of the subscribers had the last event
    p50_ms: float  # of a flush (core) or of an acknowledgement (JetStream)
    p95_ms: float


class NatsServer:
    """A server with JetStream in a temporary directory: `async with NatsServer() as server`."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._program: Program | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._program.pid if self._program else 0

    async def __aenter__(self) -> "NatsServer":
        binary = program("nats-server", "nats-server")
        _driver()
        self._directory = Path(tempfile.mkdtemp(prefix="tops-nats-"))
        self.port = free_port()
        command = [binary, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self._directory / "streams")]
        self._program = Program(command, self._directory)
        try:
            await self._program.start(partial(accepts_connections, self.port))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._program is not None:
            await self._program.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def version(self) -> str:
        return (await run_to_end([program("nats-server", "nats-server"), "--version"])).strip()


async def core_delivery(server: NatsServer, events: int, *, batch: int = BATCH) -> Delivery:
    """Core NATS, in memory, at most once: publish, and wait for the server after every `batch` events."""
    subject, payload = f"bench.{secrets.token_hex(4)}", b"x" * PAYLOAD_BYTES
    waits_s: list[float] = []
    async with _connected(server) as connection, _subscribers(server, subject, events, "core") as subscribers:
        began = time.monotonic()
        for first in range(0, events, batch):
            batch_began = time.monotonic()
            for _ in range(min(batch, events - first)):
                await connection.publish(subject, payload)
            await connection.flush()
            waits_s.append(time.monotonic() - batch_began)
        published = time.monotonic()
        received = await subscribers.last_event()
    return _delivery(events, began, published, received, waits_s)


async def jetstream_delivery(server: NatsServer, events: int, *, in_flight: int) -> Delivery:
    """JetStream with file storage: at most `in_flight` events wait for their acknowledgement at any time."""
    subject, payload = f"bench.{secrets.token_hex(4)}", b"x" * PAYLOAD_BYTES
    stream = subject.replace(".", "-")
    waits_s: list[float] = []
    async with _connected(server) as connection:
        jetstream = connection.jetstream()
        await jetstream.add_stream(name=stream, subjects=[subject], storage="file")
        try:
            async with _subscribers(server, subject, events, "jetstream") as subscribers:
                remaining = iter(range(events))
                began = time.monotonic()
                async with asyncio.TaskGroup() as group:
                    for _ in range(in_flight):
                        group.create_task(_publish_acknowledged(jetstream, subject, payload, remaining, waits_s))
                published = time.monotonic()
                received = await subscribers.last_event()
        finally:
            await jetstream.delete_stream(stream)
    return _delivery(events, began, published, received, waits_s)


async def _publish_acknowledged(
    jetstream: Any, subject: str, payload: bytes, remaining: Iterator[int], waits_s: list[float]
) -> None:
    for _ in remaining:  # shared by all publishers: each takes the next event that nobody has taken
        began = time.monotonic()
        await jetstream.publish(subject, payload)
        waits_s.append(time.monotonic() - began)


class _Subscribers:
    """Processes of their own, as subscribers are; their clock is the machine's, so their times compare with ours."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def ready(self) -> None:
        await asyncio.gather(*(self._line(process) for process in self._processes))

    async def last_event(self) -> float:
        """When the last of them had the last event; an error when one misses some."""
        return max([float(line) for line in await asyncio.gather(*(self._line(p) for p in self._processes))])

    async def end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _line(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                line = (await process.stdout.readline()).decode().strip()
        except TimeoutError as error:
            raise BenchmarkFailed(f"a NATS subscriber lacks events after {RECEIVE_TIMEOUT_S:.0f} s") from error
        if not line:
            raise BenchmarkFailed("a NATS subscriber ended before it had all events")
        return line


@asynccontextmanager
async def _subscribers(server: NatsServer, subject: str, events: int, kind: str) -> AsyncIterator[_Subscribers]:
    command = [sys.executable, "-m", "bench.peers.nats_subscriber", server.url, subject, str(events), kind]
    pipe = asyncio.subprocess.PIPE
    subscribers = _Subscribers(
        [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(SUBSCRIBERS)]
    )
    try:
        await subscribers.ready()
        yield subscribers
    finally:
        await subscribers.end()


@asynccontextmanager
async def _connected(server: NatsServer) -> AsyncIterator[Any]:
    connection = await _driver().connect(server.url)
    try:
        yield connection
    finally:
        await connection.close()


def _delivery(events: int, began: float, published: float, received: float, waits_s: list[float]) -> Delivery:
    ordered = sorted(waits_s)
    return Delivery(
        events=events,
        published_per_s=events / (published - began),
        received_per_s=events / (received - began),
        p50_ms=percentile(ordered, 50) * 1e3,
        p95_ms=percentile(ordered, 95) * 1e3,
    )


def _driver() -> Any:
    try:
        return import_module("nats")
    except ImportError as error:
        raise SystemUnavailable(
            "the NATS client is not installed: pip install nats-py, or 'tops-replication[bench]'"
        ) from error
