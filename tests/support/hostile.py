"""A client that speaks the link protocol itself and says what the library never would, under a valid certificate."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tops.core.link.session import Frame, LinkSession
from tops.model.errors import TopsError
from tops.model.ids import NodeId
from tops.protocol.messages import Address, AddressedMessage, Dissemination, Envelope, LinkMessage, Message, Publication
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import exchange_link_hello, receive_bytes
from tops.runtime.links.sockets import DialledSocket
from tops.runtime.links.wire import MessageRejected, decode, encode_frame, make_link_hello
from tops.runtime.site_journal import new_incarnation

M = TypeVar("M", bound=Message)


class Hostile:
    """One connection to a broker, after the handshake."""

    def __init__(self, socket: DialledSocket, own: Self, broker: str) -> None:
        self._socket, self._own, self.broker = socket, own, NodeId(broker)
        self._session = LinkSession()
        self.received: list[LinkMessage] = []
        self.rejected: list[MessageRejected] = []
        self.closed = ""  # why the broker ended the connection

    @property
    def node(self) -> NodeId:
        return self._own.node

    @property
    def incarnation(self) -> int:
        return self._own.party.incarnation

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, keys: Path, broker: str = "b1", *, incarnation: int = 0, instance: str = ""
    ) -> AsyncIterator["Hostile"]:
        own = Self.with_keys(keys, incarnation or new_incarnation(), instance=instance)
        async with client_session() as session, await open_socket(session, url, own, 30.0) as socket:
            await own.introduce(socket, "127.0.0.1")
            await exchange_link_hello(socket, make_link_hello("", 0, "", (), ()), 10.0)
            hostile = cls(socket, own, broker)
            listening = asyncio.ensure_future(hostile._listen())
            try:
                yield hostile
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                item = decode(await receive_bytes(self._socket, 60.0))
                if isinstance(item, Frame):
                    self.received += self._session.unpack(item)
                elif isinstance(item, MessageRejected):
                    self.rejected.append(item)
        except (TopsError, ConnectionError, RuntimeError) as error:
            self.closed = str(error)

    async def send(self, *messages: LinkMessage) -> None:
        with suppress(ConnectionError, RuntimeError):
            await self._socket.send_bytes(encode_frame(self._session.pack(messages)))

    async def send_messages(self, *letters: AddressedMessage) -> None:
        """Letters to the coordinator."""
        await self.send(*(Envelope(to=Address(self.broker), body=message) for message in letters))

    async def spread(self, publication: Publication, *lineage: str) -> None:
        await self.send(
            Dissemination(rendezvous=self.broker, upward=True, early=False, publication=publication, lineage=lineage)
        )

    def received_of(self, kind: type[M]) -> list[M]:
        """What arrived of this kind."""
        inner = [m.body if isinstance(m, Envelope) else getattr(m, "publication", m) for m in self.received]
        return [m for m in inner if isinstance(m, kind)]
