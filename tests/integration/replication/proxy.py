"""A TCP relay in front of a broker that loses what it is told to lose: requests, answers, or the whole connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum


class Loss(Enum):
    NOTHING = "nothing"
    REQUESTS = "requests"  # what the client sends gets nowhere
    ANSWERS = "answers"  # what the broker sends gets nowhere


class Proxy:
    """Bytes that are lost are lost for good: their connection is cut when the loss ends."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._connections: set[asyncio.Task[None]] = set()
        self._loss = Loss.NOTHING
        self.url = ""
        self.lost = asyncio.Event()  # something was lost since the last `lose`

    def lose(self, loss: Loss) -> None:
        self._loss = loss
        self.lost.clear()

    def cut(self) -> None:
        """Break every connection; the next ones are relayed whole."""
        self._loss = Loss.NOTHING
        for connection in self._connections:
            connection.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            behind_reader, behind_writer = await asyncio.open_connection(*self._target)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._relay(reader, behind_writer, Loss.REQUESTS))
                    group.create_task(self._relay(behind_reader, writer, Loss.ANSWERS))
            finally:
                behind_writer.transport.abort()
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Loss) -> None:
        while data := await reader.read(65536):
            if self._loss is kind:
                self.lost.set()
                continue
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@asynccontextmanager
async def proxy_to(url: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the broker at `url`, as long as the block lasts."""
    host, _, port = url.removeprefix("ws://").partition(":")
    proxy = Proxy((host, int(port)))
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await server.wait_closed()
