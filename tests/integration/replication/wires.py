"""A wire between a client and a broker that can be held, in either direction, without being cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Wire:
    """Passes bytes on; what comes while a direction is held arrives when it is let go."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.to_broker, self.to_client = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        self.let_go()

    def let_go(self) -> None:
        self.to_broker.set()
        self.to_client.set()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broker_reader, broker_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        for source, sink, gate in ((reader, broker_writer, self.to_broker), (broker_reader, writer, self.to_client)):
            task = asyncio.ensure_future(self._pass_on(source, sink, gate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        try:
            while data := await source.read(65536):
                await gate.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass  # an end went away: the other one is told below
        finally:
            sink.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[Wire]:
    """A wire whose own `url` leads to the broker at `url`."""
    wire = Wire(url)
    listener = await asyncio.start_server(wire.take, "127.0.0.1", 0)
    wire.url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        listener.close()
        await wire.close()
