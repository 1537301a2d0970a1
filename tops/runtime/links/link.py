"""One neighbour: a session that outlives connections, and what serves a connection while there is one.

What is posted is queued as bytes. At the end of the loop's turn all that is queued is put into one frame, so frames
grow with the load and nothing waits when there is none. At most `WINDOW_BYTES` are on their way unacknowledged; what is
beyond stays in the queue, whose size its owner watches. An owner under pressure holds acknowledgements back, which
stops the other end without ever stopping to read: answers to heartbeats, votes and decisions still come in.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import aiohttp
import msgspec

from tops.core.link.session import Frame, LinkSession
from tops.model.errors import ProtocolError, TopsError
from tops.model.ids import NodeId
from tops.model.sizes import TEXT_MAX
from tops.protocol.messages import LinkMessage
from tops.runtime.links.fault_points import fault_point
from tops.runtime.links.sockets import Socket, drained, hand_over, write
from tops.runtime.links.wire import (
    BATCH_BYTES,
    AcknowledgementWanted,
    AnyWord,
    Meet,
    Parting,
    decode,
    encode_frame,
    encode_word,
)

WINDOW_BYTES: Final = 4 * 2**20
UNTOLD_BYTES_MAX: Final = 4 * WINDOW_BYTES  # that arrive unacknowledged: a window, and a frame that began within it
ROOM_BYTES: Final = 2**20  # publishers wait while more than this is queued
ACKNOWLEDGE_FRAMES: Final = 16
ACKNOWLEDGE_BYTES: Final = 2**20
ACKNOWLEDGE_AFTER_S: Final = 0.2

_FAULT_POINT: Final = fault_point()


class LinkOwner(Protocol):
    """Who hears what arrives."""

    def take(self, link: "Link", messages: tuple[LinkMessage, ...], size: int) -> float:
        """Messages of a frame of `size` bytes; returns for how many seconds nothing more should be read from it."""

    def pause(self, link: "Link") -> float:
        """Asked when that time is over: for how many more seconds."""

    def hear(self, link: "Link", word: AnyWord) -> None: ...


class Link:
    """One end of a link to a neighbour."""

    def __init__(self, name: NodeId, incarnation: int, session_name: str) -> None:
        self.name, self.incarnation, self.session_name = name, incarnation, session_name
        self.session = LinkSession()
        self._loop = asyncio.get_running_loop()  # kept: to ask for it costs a system call each time
        self.queued_bytes = 0
        self.received_messages = self.sent_messages = self.received_bytes = self.sent_bytes = 0
        self.parted: str | None = None  # why the other end closed, if it said so
        self._queue: deque[bytes] = deque()
        self._words: deque[AnyWord] = deque()
        self._on_the_way: deque[tuple[int, int]] = deque()  # number and size of frames not acknowledged yet
        self._on_the_way_bytes = 0
        self._oldest_on_the_way = 0  # when it was last looked at, and for how long that has been so
        self._unacknowledged_s = 0.0
        self._told = 0  # the last acknowledgement that the other end got
        self._untold_bytes = 0
        self._acknowledge = self._holding = False
        self._acknowledge_later: asyncio.TimerHandle | None = None
        self._repeated: deque[Frame] = deque()  # what a new connection must carry first
        self._woken = False
        self._draining: asyncio.Task[None] | None = None  # the connection is full
        self._resting: asyncio.Future[None] | None = None  # until then nothing is taken from the other end
        self._failure: Exception | None = None  # of what arrived, for the reader
        self._room: list[asyncio.Future[None]] = []
        self._flushes: list[asyncio.Future[None]] = []
        self._flush_asked = 0  # up to which frame an acknowledgement was asked for
        self._socket: Socket | None = None
        self._closing: asyncio.Task[Any] | None = None
        self._released = asyncio.Event()
        self._released.set()

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def pending_bytes(self) -> int:
        """All that this end holds for the other: queued, and sent but not acknowledged."""
        return self.queued_bytes + self._on_the_way_bytes

    def unacknowledged_s(self, passed_s: float) -> float:
        """For how long the other end has acknowledged nothing of what is on its way; to be asked regularly, with the
        time since the last question."""
        oldest = self._on_the_way[0][0] if self._on_the_way else 0
        if oldest != self._oldest_on_the_way:
            self._oldest_on_the_way, self._unacknowledged_s = oldest, 0.0
        elif oldest:
            self._unacknowledged_s += passed_s
        return self._unacknowledged_s

    # ------------------------------------------------------------------------------------------------------- sending

    def post(self, encoded: bytes) -> None:
        """Queue one message, as `encode_message` gave it."""
        self._queue.append(encoded)
        self.queued_bytes += len(encoded)
        self._wake()

    def send_now(self) -> None:
        """Send what is queued without waiting for the end of the loop's turn: for what somebody waits for and what
        would rarely get company until then."""
        self._write()

    def say(self, word: AnyWord) -> None:
        """A word about the link; lost if there is no connection."""
        if self._socket is not None:
            self._words.append(word)
            self._wake()

    def hold(self, holding: bool) -> None:
        """Stop or go on telling the other end what was received, so that it stops or goes on sending."""
        if self._holding and not holding:
            self._acknowledge = True
            self._wake()
        self._holding = holding

    @property
    def is_crowded(self) -> bool:
        return self.queued_bytes > ROOM_BYTES

    async def room(self) -> None:
        """Returns when there is room for more; whoever may be slowed down waits here."""
        while self.is_crowded:
            waiting = self._loop.create_future()
            self._room.append(waiting)
            await waiting

    async def flushed(self) -> None:
        """Returns when everything posted so far has arrived at the other end."""
        target = self.session.sent + (1 if self._queue else 0)
        while self._queue or (self._on_the_way and self._on_the_way[0][0] <= target):
            arrived = self._loop.create_future()
            self._flushes.append(arrived)
            self._wake()
            await arrived

    def close(self, reason: str) -> None:
        """Say why, and close the connection; the session stays."""
        socket = self._socket
        if socket is not None and self._closing is None:
            self._closing = asyncio.ensure_future(_part(socket, reason))

    def fail(self, error: Exception) -> None:
        """What has arrived can't be taken: the connection ends with this error."""
        self._failure = error
        self.close(str(error))

    def abandon(self) -> None:
        """Another link takes over: whoever waits for room looks for it there."""
        self._queue.clear()
        self._on_the_way.clear()
        self.queued_bytes = self._on_the_way_bytes = 0
        _release(self._room)
        _release(self._flushes)

    def end(self, error: TopsError) -> None:
        """There is not going to be another connection: whoever waits for room hears why."""
        for waiting in (*self._room, *self._flushes):
            if not waiting.done():
                waiting.set_exception(error)
        self._room.clear()
        self._flushes.clear()

    # ---------------------------------------------------------------------------------------------------- connections

    async def serve(self, socket: Socket, received_by_peer: int, owner: LinkOwner) -> None:
        """Carry the session over this connection until it breaks; raises ProtocolError for what is not ours."""
        self._confirm(received_by_peer)  # before this connection counts: it ends here if that can't be true
        self._socket, self._closing, self.parted = socket, None, None
        self._released.clear()
        self._words.clear()
        self._acknowledge = False
        self._flush_asked = 0
        self._failure = self._resting = None
        self._repeated = deque(self.session.resume(received_by_peer))
        self._wake()
        try:
            await self._read(socket, owner)
        finally:
            self._socket = None
            hand_over(socket, None)
            if self._draining is not None:
                self._draining.cancel()
                self._draining = None
            if self._acknowledge_later is not None:
                self._acknowledge_later.cancel()
                self._acknowledge_later = None
            if self._closing is not None:
                with suppress(asyncio.CancelledError):
                    await self._closing
            self._released.set()

    async def released(self) -> None:
        """Returns when no connection is being served."""
        await self._released.wait()

    def _wake(self) -> None:
        """There is something to send: at the end of this turn of the loop, with all that comes until then."""
        if not self._woken and self._socket is not None:
            self._woken = True
            self._loop.call_soon(self._woken_up)

    def _woken_up(self) -> None:
        self._woken = False
        self._write()

    def _write(self) -> None:
        socket = self._socket
        if socket is None or self._draining is not None:
            return
        try:
            while (data := self._next_data()) is not None:
                if not write(socket, data):
                    self._draining = asyncio.ensure_future(self._go_on_when_drained(socket))
                    return
        except ConnectionError:
            return  # the reader hears of it as well, and what was not acknowledged is sent again

    async def _go_on_when_drained(self, socket: Socket) -> None:
        with suppress(ConnectionError):
            await drained(socket)
            self._draining = None
            self._write()

    def _next_data(self) -> bytes | None:
        """The next message for the connection, if there is one."""
        if self._repeated:
            return encode_frame(self._repeated.popleft())
        if self._words:
            return encode_word(self._words.popleft())
        if self._queue and self._on_the_way_bytes < WINDOW_BYTES:
            frame = self._next_frame()
            if _FAULT_POINT is not None:
                _FAULT_POINT.leaving(frame)
            return frame
        if self._flushes and self._flush_asked < self.session.sent:
            self._flush_asked = self.session.sent
            return encode_word(AcknowledgementWanted())
        if self._acknowledge:
            self._tell()
            return encode_frame(Frame(0, self._told))
        return None

    def _next_frame(self) -> bytes:
        queue = self._queue
        encoded = queue.popleft()
        messages: list[Any] = [msgspec.Raw(encoded)]
        size = len(encoded)
        while queue and size < BATCH_BYTES:
            encoded = queue.popleft()
            size += len(encoded)
            messages.append(msgspec.Raw(encoded))
        self.queued_bytes -= size
        if not self._holding:
            self._tell()
        frame = self.session.pack(tuple(messages))
        if self._holding:
            frame = msgspec.structs.replace(frame, received=self._told)
        data = encode_frame(frame)
        self._on_the_way.append((frame.number, size))
        self._on_the_way_bytes += size
        self.sent_messages += len(messages)
        self.sent_bytes += len(data)
        if self._room and self.queued_bytes <= ROOM_BYTES:
            _release(self._room)
        return data

    def _tell(self) -> None:
        self._told = self.session.received
        self._untold_bytes = 0
        self._acknowledge = False

    async def _read(self, socket: Socket, owner: LinkOwner) -> None:
        """What is not taken in the moment it arrives is taken here; so are the end and whatever went wrong."""

        def arrived_now(data: bytes) -> bool:
            if self._failure is not None or self._resting is not None:
                return False
            try:
                self._hear(data, owner)
            except Exception as failure:
                self._failure = failure
                return False
            return True

        hand_over(socket, arrived_now)
        while True:
            arrived = await socket.receive()
            if self._failure is not None:
                raise self._failure
            if arrived.type is not aiohttp.WSMsgType.BINARY:
                if arrived.type is aiohttp.WSMsgType.TEXT:
                    raise ProtocolError("the other end sent text where only binary messages are spoken")
                if arrived.type is aiohttp.WSMsgType.ERROR and isinstance(arrived.data, aiohttp.WebSocketError):
                    raise ProtocolError(f"the other end broke the WebSocket protocol: {arrived.data}")
                return
            if self._resting is not None:  # ended here only: what arrives meanwhile stays behind this message
                await self._resting
                while self._closing is None and not socket.closed and (pause_s := owner.pause(self)) > 0:
                    await self._rest(pause_s)
                if self._failure is not None:
                    raise self._failure
                if self._closing is not None or socket.closed:
                    return  # what was not taken is not acknowledged either
                self._resting = None
            self._hear(cast(bytes, arrived.data), owner)

    def _hear(self, data: bytes, owner: LinkOwner) -> None:
        self.received_bytes += len(data)
        item = decode(data)
        if isinstance(item, Frame):
            pause_s = self._take(item, len(data), owner)
            if pause_s > 0:
                self._resting = self._rest(pause_s)
        elif isinstance(item, Parting):
            self.parted = item.reason[:TEXT_MAX]
        elif isinstance(item, AcknowledgementWanted):
            self._acknowledge_now()
        elif isinstance(item, Meet):
            raise ProtocolError("the other end introduced its session twice")
        else:
            owner.hear(self, item)

    def _rest(self, pause_s: float) -> "asyncio.Future[None]":
        resting = self._loop.create_future()
        self._loop.call_later(pause_s, _release, [resting])
        return resting

    def _take(self, frame: Frame, size: int, owner: LinkOwner) -> float:
        self._confirm(frame.received)
        messages = self.session.unpack(frame)
        if not frame.number:
            return 0.0
        self.received_messages += len(messages)
        pause_s = owner.take(self, messages, size)
        self._untold_bytes += size
        if self._holding and self._untold_bytes > UNTOLD_BYTES_MAX:
            raise ProtocolError(f"the other end sends on without an acknowledgement: over {UNTOLD_BYTES_MAX} bytes")
        if self.session.received - self._told >= ACKNOWLEDGE_FRAMES or self._untold_bytes >= ACKNOWLEDGE_BYTES:
            self._acknowledge_now()
        elif self._acknowledge_later is None:
            self._acknowledge_later = self._loop.call_later(ACKNOWLEDGE_AFTER_S, self._later)
        return pause_s

    def _later(self) -> None:
        self._acknowledge_later = None
        if self.session.received > self._told:
            self._acknowledge_now()

    def _acknowledge_now(self) -> None:
        if not self._holding:
            self._acknowledge = True
            self._wake()

    def _confirm(self, received: int) -> None:
        """The other end has everything up to this frame."""
        if received > self.session.sent:
            raise ProtocolError("the other end acknowledges what was never sent")
        frames = self._on_the_way
        if not frames or frames[0][0] > received:
            return
        while frames and frames[0][0] <= received:
            self._on_the_way_bytes -= frames.popleft()[1]
        if self._queue:
            self._wake()  # there is room in the window
        if self._flushes:
            _release(self._flushes)


def _release(waiting: list[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()


async def _part(socket: Socket, reason: str) -> None:
    with suppress(ConnectionError, RuntimeError, asyncio.TimeoutError):
        async with asyncio.timeout(1):
            await socket.send_bytes(encode_word(Parting(reason)))
    with suppress(ConnectionError, RuntimeError):
        await socket.close(message=reason.encode()[:100])


async def exchange_meet(socket: Socket, own: Meet, timeout_s: float, *, accepting: bool = False) -> Meet:
    """Send our first word and take the other end's. The accepting end speaks first: before it has, the other is silent,
    and that is when the accepting end begins to read messages of any size."""
    if accepting:
        await socket.send_bytes(encode_word(own))
    data = await receive_bytes(socket, timeout_s)
    if not accepting:
        await socket.send_bytes(encode_word(own))
    met = decode(data)
    if isinstance(met, Parting):
        raise ProtocolError(met.reason)
    if not isinstance(met, Meet):
        raise ProtocolError("the other end did not say which session it has")
    if met.protocol != own.protocol:
        raise ProtocolError(f"the other end speaks version {met.protocol} of the messages, this one {own.protocol}")
    return met


async def receive_bytes(socket: Socket, timeout_s: float) -> bytes:
    """One binary message, or ProtocolError."""
    try:
        arrived = await socket.receive(timeout=timeout_s)
    except TimeoutError:
        raise ProtocolError(f"the other end said nothing for {timeout_s:g} s") from None
    if arrived.type is not aiohttp.WSMsgType.BINARY:
        reason = arrived.extra if isinstance(arrived.extra, str) and arrived.extra else "without a reason"
        raise ProtocolError(f"the connection was closed: {reason}")
    return cast(bytes, arrived.data)
