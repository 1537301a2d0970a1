"""The library's WebSockets with a shorter path: a binary message is passed on at the moment of its arrival, and written
when it is ready, without a task, a queue or a future in between. That saves a third of the cost of a small message.

The library does everything else: handshake, heartbeats, closing, and messages that can't be processed at the moment,
which wait in its queue. This module uses parts of the library that are not public; `pyproject.toml` names the versions
that have them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Final, cast

import aiohttp
from aiohttp import web
from aiohttp._websocket.reader import WebSocketDataQueue
from aiohttp.http import WebSocketReader, WebSocketWriter

QUEUE_BYTES: Final = 2**16

Taker = Callable[[bytes], bool]


class DirectQueue(WebSocketDataQueue):
    """Offers binary messages to a taker; a message that it does not take, and all later ones, wait to be read."""

    def __init__(self, protocol: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(protocol, QUEUE_BYTES, loop=loop)
        self.taker: Taker | None = None
        self._waiting_messages = 0

    def feed_data(self, data: Any, size: int) -> None:
        taker = self.taker
        binary = data.type is aiohttp.WSMsgType.BINARY
        if binary and taker is not None and not self._waiting_messages and taker(data.data):
            return
        self._waiting_messages += 1
        super().feed_data(data, size)

    async def read(self) -> Any:
        message = await super().read()
        self._waiting_messages -= 1
        return message


class _LastReceived:
    """Reports to the library that the other end is alive, but not with every message: setting its timer is costly."""

    _heartbeat: float | None
    _received_at = 0.0

    def _on_data_received(self) -> None:
        now = monotonic()
        if now - self._received_at > (self._heartbeat or 0.0) / 8:
            self._received_at = now
            super()._on_data_received()  # type: ignore[misc]


class AcceptedSocket(_LastReceived, web.WebSocketResponse):
    """The accepting end: reads only small messages until the other end is authenticated."""

    address = ""  # the `host:port` that the other end addressed; checked to be one of this broker's
    _reader: Any

    def read_up_to(self, size: int, request: web.Request) -> None:
        """From here on messages may be this large. The other end must be silent now: a partly read message would be
        lost.

        The library fixes the size when the connection begins, in a reader that can't be changed; so another reader
        replaces it."""
        loop = asyncio.get_running_loop()
        self._max_msg_size = size
        self._reader = DirectQueue(request.protocol, loop)
        self._parser = WebSocketReader(self._reader, size, compress=False, decode_text=True)
        request.protocol._payload_parser = None
        request.protocol.set_parser(self._parser, data_received_cb=self._on_data_received)


class DialledSocket(_LastReceived, aiohttp.ClientWebSocketResponse):
    """The dialling end; used from the start of the connection, when the other end is still silent."""

    address = ""  # the `host:port` that was dialled, as in the `Host` header
    _reader: Any

    def read_up_to(self, size: int) -> None:
        """Read into a queue that passes messages on directly."""
        protocol = self._writer.protocol
        self._reader = DirectQueue(protocol, self._loop)
        self._parser = WebSocketReader(self._reader, size, compress=False, decode_text=True)
        protocol.set_parser(self._parser, self._reader, data_received_cb=self._on_data_received)  # type: ignore[attr-defined]


Socket = AcceptedSocket | DialledSocket


def hand_over(socket: Socket, taker: Taker | None) -> None:
    """Offer messages to `taker`, which returns whether it took one; `receive` gets the others."""
    socket._reader.taker = taker


def write(socket: Socket, data: bytes) -> bool:
    """Send a binary message; returns whether more can be written. Raises ConnectionError when it is closing."""
    writer: WebSocketWriter | None = socket._writer
    if writer is None or writer._closing:
        raise ConnectionResetError("the connection is closing")
    writer._write_websocket_frame(data, aiohttp.WSMsgType.BINARY, 0)
    return not writer.protocol.writing_paused


async def drained(socket: Socket) -> None:
    """Returns when more can be written; raises ConnectionError when the connection is lost."""
    writer: WebSocketWriter | None = socket._writer
    if writer is not None:
        await writer.protocol._drain_helper()


async def take_messages(
    socket: Socket, take: Callable[[bytes], None], busy: Callable[[], Awaitable[object] | None]
) -> None:
    """Hand every binary message to `take` until the connection ends; raises what `take` raises. While `busy` gives
    something to wait for, nothing more is taken from the other end."""
    failure: Exception | None = None

    def arrived(data: bytes) -> bool:
        nonlocal failure
        if failure is not None or busy() is not None:
            return False
        try:
            take(data)
        except Exception as error:
            failure = error
            return False
        return True

    hand_over(socket, arrived)
    try:
        while True:
            message = await socket.receive()
            if failure is not None:
                raise failure
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            while (waiting := busy()) is not None:
                await waiting
            take(cast(bytes, message.data))
    finally:
        hand_over(socket, None)


def abort(socket: Socket) -> None:
    """End the connection at once: the other end takes nothing any more, so it would take no farewell either."""
    writer = socket._writer
    transport = writer.transport if writer is not None else None
    if transport is not None:
        transport.abort()
