"""One neighbour: drives a link's machine over the connection that there is at the moment.

What is posted is queued as bytes. At the end of the event-loop iteration all that is queued is put into one frame, so
frames grow with the load and nothing waits when there is none. What is sent when is decided by `LinkFlow`.
"""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import aiohttp
import msgspec

from tops.core.link.flow import Acknowledge, LinkFlow
from tops.core.link.session import Frame
from tops.model.errors import ProtocolError, TopsError
from tops.model.ids import NodeId
from tops.model.sizes import TEXT_MAX
from tops.protocol.messages import LinkMessage
from tops.runtime.links.fault_points import fault_point
from tops.runtime.links.sockets import Socket, drained, hand_over, write
from tops.runtime.links.wire import (
    AnyControl,
    Goodbye,
    LinkHello,
    RequestAcknowledgement,
    decode,
    encode_control,
    encode_frame,
)

QUEUE_BYTES_MAX: Final = 2**20  # publishers wait while more than this is queued
ACKNOWLEDGE_AFTER_S: Final = 0.2

_FAULT_POINT: Final = fault_point()


@dataclass(slots=True)
class Traffic:
    """What has passed a link."""

    received_messages: int = 0
    sent_messages: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    def add(self, other: "Traffic") -> None:
        self.received_messages += other.received_messages
        self.sent_messages += other.sent_messages
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes


class LinkOwner(Protocol):
    """Receives what arrives on a link."""

    def take(self, link: "Link", messages: tuple[LinkMessage, ...], size: int) -> float:
        """Process the messages of a frame of `size` bytes; returns for how many seconds nothing more should be read."""

    def pause(self, link: "Link") -> float:
        """Called when that time is over: returns for how many more seconds."""

    def on_control(self, link: "Link", control: AnyControl) -> None: ...


class Link:
    """One end of a link to a neighbour."""

    def __init__(self, name: NodeId, incarnation: int, session_name: str) -> None:
        self.name, self.incarnation, self.session_name = name, incarnation, session_name
        self.flow = LinkFlow()
        self.session = self.flow.session
        self._loop = asyncio.get_running_loop()  # cached: to look it up costs a system call each time
        self.traffic = Traffic()
        self.parted: str | None = None  # why the other end closed, if it sent a `Goodbye`
        self._controls: deque[AnyControl] = deque()
        self._acknowledge_later: asyncio.TimerHandle | None = None
        self._woken = False
        self._draining: asyncio.Task[None] | None = None  # the connection is full
        self._resting: asyncio.Future[None] | None = None  # nothing is read until it is done
        self._failure: Exception | None = None  # caused by a message, for the reader
        self._window_waiters: list[asyncio.Future[None]] = []
        self._flushes: list[asyncio.Future[None]] = []
        self._flush_requested = 0  # up to which frame an acknowledgement was requested
        self._socket: Socket | None = None
        self._closing: asyncio.Task[Any] | None = None
        self._released = asyncio.Event()
        self._released.set()

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def queued_bytes(self) -> int:
        return self.flow.queued_bytes

    @property
    def pending_bytes(self) -> int:
        """All that this end keeps for the other: queued, and sent but not acknowledged."""
        return self.flow.pending_bytes

    # ------------------------------------------------------------------------------------------------------- sending

    def enqueue(self, encoded: bytes) -> None:
        """Queue one message, encoded by `encode_message`."""
        self.flow.queue(msgspec.Raw(encoded), len(encoded))
        self._wake()

    def send_now(self) -> None:
        """Send what is queued without waiting for the end of the event-loop iteration: for a message that a client
        needs at once, and to which little would be added until then."""
        self._write()

    def send_control(self, control: AnyControl) -> None:
        """Send a control frame; it is dropped if there is no connection."""
        if self._socket is not None:
            self._controls.append(control)
            self._wake()

    def hold(self, holding: bool) -> None:
        """Withhold or continue acknowledgements, so that the other end stops or continues to send."""
        if self.flow.hold(holding):
            self._wake()

    @property
    def is_full(self) -> bool:
        return self.flow.queued_bytes > QUEUE_BYTES_MAX

    async def wait_writable(self) -> None:
        """Returns when the queue is within its window; publishers wait here."""
        while self.is_full:
            waiting = self._loop.create_future()
            self._window_waiters.append(waiting)
            await waiting

    async def flushed(self) -> None:
        """Returns when everything queued so far has arrived at the other end."""
        upto = self.session.sent + (1 if self.flow.has_queued else 0)
        while not self.flow.all_arrived(upto):
            arrived = self._loop.create_future()
            self._flushes.append(arrived)
            self._wake()
            await arrived

    def close(self, reason: str) -> None:
        """Send the reason, and close the connection; the session stays."""
        socket = self._socket
        if socket is not None and self._closing is None:
            self._closing = asyncio.ensure_future(_part(socket, reason))

    def fail(self, error: Exception) -> None:
        """What has arrived can't be processed: the connection ends with this error."""
        self._failure = error
        self.close(str(error))

    def abandon(self) -> None:
        """Another link replaces this one: publishers that wait for this one's window continue there."""
        self.flow.abandon()
        _release(self._window_waiters)
        _release(self._flushes)

    def end(self, error: TopsError) -> None:
        """There will be no other connection: end every wait with this error."""
        for waiting in (*self._window_waiters, *self._flushes):
            if not waiting.done():
                waiting.set_exception(error)
        self._window_waiters.clear()
        self._flushes.clear()

    # ---------------------------------------------------------------------------------------------------- connections

    async def serve(self, socket: Socket, received_by_peer: int, owner: LinkOwner) -> None:
        """Carry the session over this connection until it breaks; raises ProtocolError for undecodable data."""
        # Before any other state changes: this raises, and the connection ends, if so many frames were never sent.
        self.flow.connected(received_by_peer)
        self._socket, self._closing, self.parted = socket, None, None
        self._released.clear()
        self._controls.clear()
        self._flush_requested = 0
        self._failure = self._resting = None
        _release(self._flushes)
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
        """Send at the end of this event-loop iteration, with everything that is queued until then."""
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
            return  # the reader notices it as well, and what is not acknowledged is sent again

    async def _go_on_when_drained(self, socket: Socket) -> None:
        with suppress(ConnectionError):
            await drained(socket)
            self._draining = None
            self._write()

    def _next_data(self) -> bytes | None:
        """The next message for the connection, if there is one."""
        if self._controls:
            return encode_control(self._controls.popleft())
        if (frame := self.flow.next_frame()) is not None:
            return self._encoded(frame)
        if self._flushes and self._flush_requested < self.session.sent:
            self._flush_requested = self.session.sent
            return encode_control(RequestAcknowledgement())
        return None

    def _encoded(self, frame: Frame) -> bytes:
        data = encode_frame(frame)
        self.traffic.sent_messages += len(frame.messages)
        self.traffic.sent_bytes += len(data)
        if _FAULT_POINT is not None:
            _FAULT_POINT.leaving(data)
        if self._window_waiters and not self.is_full:
            _release(self._window_waiters)
        return data

    async def _read(self, socket: Socket, owner: LinkOwner) -> None:
        """Process what was not processed at its arrival, the end of the connection, and errors."""

        def arrived_now(data: bytes) -> bool:
            if self._failure is not None or self._resting is not None:
                return False
            try:
                self._receive(data, owner)
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
                    raise ProtocolError("the other end sent a text message where only binary messages are allowed")
                if arrived.type is aiohttp.WSMsgType.ERROR and isinstance(arrived.data, aiohttp.WebSocketError):
                    raise ProtocolError(f"the other end violated the WebSocket protocol: {arrived.data}")
                return
            if self._resting is not None:  # waits here alone: what arrives meanwhile stays behind this message
                await self._resting
                while self._closing is None and not socket.closed and (pause_s := owner.pause(self)) > 0:
                    await self._rest(pause_s)
                if self._failure is not None:
                    raise self._failure
                if self._closing is not None or socket.closed:
                    return  # what was not processed is not acknowledged either
                self._resting = None
            self._receive(cast(bytes, arrived.data), owner)

    def _receive(self, data: bytes, owner: LinkOwner) -> None:
        self.traffic.received_bytes += len(data)
        item = decode(data)
        if isinstance(item, Frame):
            pause_s = self._take(item, len(data), owner)
            if pause_s > 0:
                self._resting = self._rest(pause_s)
        elif isinstance(item, Goodbye):
            self.parted = item.reason[:TEXT_MAX]
        elif isinstance(item, RequestAcknowledgement):
            self._acknowledge_now()
        elif isinstance(item, LinkHello):
            raise ProtocolError("the other end sent a second LinkHello")
        else:
            owner.on_control(self, item)

    def _rest(self, pause_s: float) -> "asyncio.Future[None]":
        resting = self._loop.create_future()
        self._loop.call_later(pause_s, _release, [resting])
        return resting

    def _take(self, frame: Frame, size: int, owner: LinkOwner) -> float:
        if self.flow.confirm(frame.received):
            self._confirmed()
        messages = self.session.unpack(frame)
        if not frame.number:
            return 0.0
        self.traffic.received_messages += len(messages)
        pause_s = owner.take(self, messages, size)
        due = self.flow.received(size)
        if due is Acknowledge.NOW:
            self._acknowledge_now()
        elif due is Acknowledge.SOON and self._acknowledge_later is None:
            self._acknowledge_later = self._loop.call_later(ACKNOWLEDGE_AFTER_S, self._acknowledge_overdue)
        return pause_s

    def _acknowledge_overdue(self) -> None:
        self._acknowledge_later = None
        if self.flow.owes_acknowledgement:
            self._acknowledge_now()

    def _acknowledge_now(self) -> None:
        if self.flow.acknowledge():
            self._wake()

    def _confirmed(self) -> None:
        """The other end has received more: there is credit in the window, and a flush may be complete."""
        if self.flow.has_queued:
            self._wake()
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
            await socket.send_bytes(encode_control(Goodbye(reason)))
    with suppress(ConnectionError, RuntimeError):
        await socket.close(message=reason.encode()[:100])


async def exchange_link_hello(
    socket: Socket, own: LinkHello, timeout_s: float, *, accepting: bool = False
) -> LinkHello:
    """Exchange the first control frames. The accepting end sends first: until then the other end is silent, so that the
    accepting end can switch to reading messages of any size without losing one."""
    if accepting:
        await socket.send_bytes(encode_control(own))
    data = await receive_bytes(socket, timeout_s)
    if not accepting:
        await socket.send_bytes(encode_control(own))
    theirs = decode(data)
    if isinstance(theirs, Goodbye):
        raise ProtocolError(theirs.reason)
    if not isinstance(theirs, LinkHello):
        raise ProtocolError("the other end did not name its session")
    if theirs.protocol != own.protocol:
        raise ProtocolError(f"the other end has version {theirs.protocol} of the messages, this one {own.protocol}")
    return theirs


async def receive_bytes(socket: Socket, timeout_s: float) -> bytes:
    """One binary message, or ProtocolError."""
    try:
        arrived = await socket.receive(timeout=timeout_s)
    except TimeoutError:
        raise ProtocolError(f"the other end sent nothing for {timeout_s:g} s") from None
    if arrived.type is not aiohttp.WSMsgType.BINARY:
        reason = arrived.extra if isinstance(arrived.extra, str) and arrived.extra else "without a reason"
        raise ProtocolError(f"the connection was closed: {reason}")
    return cast(bytes, arrived.data)
