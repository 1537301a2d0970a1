"""A TCP wire between a client and a broker: it can be held in either direction, lose what it carries, or be cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from urllib.parse import urlsplit

from tops.security.secret import secret_path


class Loss(Enum):
    NOTHING = "nothing"
    REQUESTS = "requests"  # what the client sends gets nowhere
    ANSWERS = "answers"  # what the broker sends gets nowhere


class Wire:
    """Passes bytes on; what comes while a direction is held arrives when it is let go, and what is lost never does."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._connections: set[asyncio.Task[None]] = set()
        self._loss = Loss.NOTHING
        self.to_broker, self.to_client = asyncio.Event(), asyncio.Event()
        self.lost = asyncio.Event()  # something was lost since the last `lose`
        self.url = ""
        self.let_go()

    def let_go(self) -> None:
        self.to_broker.set()
        self.to_client.set()

    def lose(self, loss: Loss) -> None:
        self._loss = loss
        self.lost.clear()

    def cut(self) -> None:
        """Break every connection; the next ones are relayed whole."""
        self._loss = Loss.NOTHING
        for connection in self._connections:
            connection.cancel()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            broker_reader, broker_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass_on(reader, broker_writer, self.to_broker, Loss.REQUESTS))
                    both.create_task(self._pass_on(broker_reader, writer, self.to_client, Loss.ANSWERS))
            finally:
                broker_writer.transport.abort()
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, gate: asyncio.Event, kind: Loss
    ) -> None:
        while data := await source.read(65536):
            await gate.wait()
            if self._loss is kind:
                self.lost.set()
                continue
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError  # an end went away: so does the other


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[Wire]:
    """A wire whose own `url` leads to the broker at `url`, as long as the block lasts."""
    wire = Wire(url)
    listener = await asyncio.start_server(wire.take, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    wire.url = f"ws://{address}"
    secret = secret_path(address)
    secret.symlink_to(secret_path(urlsplit(url).netloc))  # who dials the wire proves itself to the broker behind it
    try:
        yield wire
    finally:
        secret.unlink()
        listener.close()
        wire.cut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await listener.wait_closed()
