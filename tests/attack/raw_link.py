"""A link to a broker without the library's good manners: every message is sent as it is, and the verdict is read."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from pathlib import Path

import aiohttp

from tops.core.link.session import Frame
from tops.model.errors import ProtocolError
from tops.model.ids import NodeId
from tops.protocol.messages import Address, ConfirmRoute, Envelope, LinkMessage, RouteConfirmed
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import exchange_link_hello, receive_bytes
from tops.runtime.links.sockets import DialledSocket
from tops.runtime.links.wire import Goodbye, MessageRejected, decode, encode_frame, make_link_hello
from tops.runtime.site_journal import new_incarnation

RESPONSE_S = 20.0


class Verdict(Enum):
    TAKEN = "taken"  # acted on, or silently without an effect
    REJECTED = "rejected"  # and the site is told why
    CLOSED = "closed"  # with the connection: no site sends this


class RawLink:
    """One connection of one identity; opened again after the broker has closed it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, broker: str, keys: Path, instance: str) -> None:
        self._session, self._url, self._broker, self._keys = session, url, NodeId(broker), keys
        self.instance = instance
        self._socket: DialledSocket | None = None
        self._probes = itertools.count(1_000_000)
        self.incarnation = new_incarnation()
        self.received: list[LinkMessage] = []
        self.closed_because = ""

    async def open(self) -> None:
        if self._socket is None:
            self.incarnation += 1
            own = Self.with_keys(self._keys, self.incarnation, None, self.instance)
            socket = await open_socket(self._session, self._url, own, RESPONSE_S)
            await own.introduce(socket, "127.0.0.1")
            await exchange_link_hello(socket, make_link_hello("", 0, "", (), ()), RESPONSE_S)
            self._socket, self._sent, self._taken = socket, 0, 0

    async def send(self, *messages: LinkMessage) -> Verdict:
        """Send messages in one frame and find out what the broker made of them: what was sent before a probe is done
        before it."""
        await self.open()
        return await self.send_encoded(encode_frame(self._frame(*messages)))

    async def send_encoded(self, data: bytes) -> Verdict:
        """The same with bytes that are perhaps no frame."""
        await self.open()
        assert self._socket is not None
        try:
            await self._socket.send_bytes(data)
            rejected = [await self._probed(), await self._probed()]  # words may overtake, or be overtaken by, messages
        except (ProtocolError, ConnectionError) as error:
            self.closed_because = str(error)
            await self.close()
            return Verdict.CLOSED
        return Verdict.REJECTED if any(rejected) else Verdict.TAKEN

    async def _probed(self) -> bool:
        probe, rejected = next(self._probes), False
        await self._enqueue(Envelope(to=Address(self._broker), body=ConfirmRoute(subscription=probe)))
        while True:
            control = await self._next()
            if isinstance(control, MessageRejected):
                rejected = True
            elif isinstance(control, Frame):
                self._taken = max(self._taken, control.number)
                self.received += control.messages
                if any(_answers(message, probe) for message in control.messages):
                    return rejected
                await self._acknowledge()  # the answer may be held back until the broker knows that this has arrived

    async def _enqueue(self, message: LinkMessage) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(encode_frame(self._frame(message)))

    async def _acknowledge(self) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(encode_frame(Frame(0, self._taken, ())))

    def _frame(self, *messages: LinkMessage) -> Frame:
        self._sent += 1
        return Frame(self._sent, self._taken, messages)

    def next_position(self) -> tuple[int, int]:
        """The number of a frame that the caller encodes itself, and of the last one that arrived."""
        self._sent += 1
        return self._sent, self._taken

    async def _next(self) -> object:
        assert self._socket is not None
        control = decode(await receive_bytes(self._socket, RESPONSE_S))
        if isinstance(control, Goodbye):
            raise ProtocolError(control.reason)
        return control

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
            self._socket = None


def _answers(message: LinkMessage, probe: int) -> bool:
    return isinstance(message, Envelope) and message.body == RouteConfirmed(subscription=probe)


@asynccontextmanager
async def raw_link(url: str, broker: str, keys: Path, instance: str) -> AsyncIterator[RawLink]:
    async with client_session() as session:
        link = RawLink(session, url, broker, keys, instance)
        try:
            await link.open()
            yield link
        finally:
            await link.close()
