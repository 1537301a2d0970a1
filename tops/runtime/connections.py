"""How a broker's links get their connections: accepting sites and brokers, and dialling other brokers.

Of two neighbouring brokers the one whose name comes first dials. A connection that breaks is dialled again, with a
pause that grows and is never the same on two sides.
"""

import asyncio
import logging
import random
import time
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from tops.errors import LimitExceeded, NotAuthenticated, ProtocolError, TopsError
from tops.ids import NodeId
from tops.runtime.broker_node import BrokerNode
from tops.runtime.guard import Guard
from tops.runtime.identity import HANDSHAKE_TIMEOUT_S, Self
from tops.runtime.link import Link, exchange_meet
from tops.runtime.site_journal import INCARNATIONS_PER_S, new_incarnation
from tops.runtime.sockets import AcceptedSocket, DialledSocket, Socket
from tops.runtime.wire import FRAME_BYTES_MAX
from tops.security import HANDSHAKE_BYTES_MAX, ConnectionBudget, Kind, Peer, Permissions, peer_identity, utc_now

REDIAL_FIRST_S, REDIAL_MAX_S = 0.05, 2.0

log = logging.getLogger("tops.broker")


class Connections:
    """All connections of one broker."""

    def __init__(self, node: BrokerNode, own: Self, permissions: Permissions) -> None:
        self.node, self.own, self.permissions = node, own, permissions
        limits = node.limits
        self.budget = ConnectionBudget(
            per_address=limits.waiting_per_address,
            total=max(256, limits.waiting_per_address),
            per_second=limits.connections_per_s,
            wait_s=HANDSHAKE_TIMEOUT_S,
        )
        self.sockets: dict[Socket, Link] = {}
        self._dialling: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    # ------------------------------------------------------------------------------------------------------ accepting

    async def accept(self, request: web.Request) -> web.StreamResponse:
        """The handler of the path that links use."""
        host = request.remote or ""
        try:
            ticket = self.budget.admit(host, time.monotonic())
        except LimitExceeded as error:
            raise web.HTTPTooManyRequests(text=str(error), headers={"Retry-After": "1"}) from None
        socket = AcceptedSocket(
            timeout=1.0, heartbeat=self.node.limits.heartbeat_s, max_msg_size=HANDSHAKE_BYTES_MAX + 1, compress=False
        )
        try:
            await socket.prepare(request)
            try:
                peer = await self.own.accept(socket, host)
            finally:
                self.budget.release(ticket)
            socket.read_up_to(FRAME_BYTES_MAX, request)
            await self._serve_accepted(socket, peer)
        except (ProtocolError, NotAuthenticated) as error:
            await self._turn_away(socket, host, error)
        except (ConnectionError, RuntimeError) as error:
            log.debug("connection lost", extra={"node": self.node.name, "host": host, "error": str(error)})
        return socket

    async def _serve_accepted(self, socket: Socket, peer: Peer) -> None:
        guard = None
        name = peer.node
        brokers = self.node.core.topology.brokers
        if peer.identity.kind is not Kind.BROKER:
            if name in brokers:
                raise NotAuthenticated(f"{name!r} is the name of a broker: give the site another")
            self._check_incarnation(peer)
            guard = Guard(peer.identity, self.permissions, brokers, peer.instance)
        elif name not in self.node.core.topology.neighbours[self.node.name]:
            raise NotAuthenticated(f"broker {name!r} has no link to {self.node.name!r} in the configuration")
        known = self.node.links.get(name)
        if known is not None and known.incarnation > peer.incarnation:
            raise NotAuthenticated(f"a newer life of {name!r} is connected: this one is over")
        if known is not None and known.connected:
            known.close("another connection took over")
            await known.released()
        await self._serve(socket, peer, guard, accepting=True)

    def _check_incarnation(self, peer: Peer) -> None:
        """Incarnations come from the clock. One far ahead of ours would make every later one of its owner look old."""
        ahead_s = (peer.incarnation - new_incarnation()) / INCARNATIONS_PER_S
        if ahead_s > self.node.limits.clock_ahead_s:
            raise NotAuthenticated(
                f"the incarnation of {peer.node!r} is {ahead_s:.0f} s ahead of the clock of this broker, which accepts "
                f"{self.node.limits.clock_ahead_s:g} s: set the clocks right, or raise clock_ahead_s"
            )

    async def _serve(self, socket: Socket, peer: Peer, guard: Guard | None, *, accepting: bool) -> None:
        node = self.node
        ours = node.our_meet(peer)
        theirs = await exchange_meet(socket, ours, HANDSHAKE_TIMEOUT_S, accepting=accepting)
        link = node.link_for(peer, guard, ours, theirs, ours.proposal if accepting else theirs.proposal)
        if link.connected:
            raise ProtocolError("another connection took over")
        self.sockets[socket] = link
        try:
            received = theirs.received if ours.session and ours.session == theirs.session else 0
            await link.serve(socket, received, node)
        finally:
            del self.sockets[socket]
            node.disconnected(link)

    async def _turn_away(self, socket: Socket, host: str, error: TopsError) -> None:
        self.node.counters["refused"] += 1
        if self.node.audit is not None and isinstance(error, NotAuthenticated):
            self.node.audit.denied(time.time(), who=host, act="connect", detail=str(error))
        log.warning("connection refused", extra={"node": self.node.name, "host": host, "reason": str(error)})
        with suppress(ConnectionError, RuntimeError):
            await socket.close(code=1008, message=str(error).encode()[:120])

    # ------------------------------------------------------------------------------------------------------- dialling

    def dial(self, urls: dict[NodeId, str]) -> None:
        """Keep a connection to every neighbour that it is our part to dial."""
        self._session = client_session()
        for neighbour in self.node.core.topology.neighbours[self.node.name]:
            if self.node.name < neighbour:
                self._dialling.append(asyncio.ensure_future(self._keep_dialling(neighbour, urls[neighbour])))

    async def _keep_dialling(self, neighbour: NodeId, url: str) -> None:
        pause_s = REDIAL_FIRST_S
        while True:
            began = time.monotonic()
            try:
                await self._dial_once(neighbour, url)
            except (TopsError, aiohttp.ClientError, ConnectionError, OSError, RuntimeError, TimeoutError) as error:
                log.info("no link", extra={"node": self.node.name, "peer": neighbour, "reason": str(error)})
            if time.monotonic() - began > REDIAL_MAX_S:
                pause_s = REDIAL_FIRST_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, REDIAL_MAX_S)

    async def _dial_once(self, neighbour: NodeId, url: str) -> None:
        assert self._session is not None
        async with await open_socket(self._session, url, self.own, self.node.limits.heartbeat_s) as socket:
            peer = await self.own.introduce(socket, urlsplit(url).hostname or "", expected=neighbour)
            await self._serve(socket, peer, None, accepting=False)

    # ------------------------------------------------------------------------------------------------------ the rest

    def revoke(self) -> None:
        """Take a newer revocation list into force, if there is one, and close the connections that it ends."""
        trust = self.own.trust
        if trust is None or not trust.reload():
            return
        for socket, link in list(self.sockets.items()):
            try:
                peer_identity(socket.get_extra_info("ssl_object"), trust, utc_now())
            except NotAuthenticated as error:
                log.warning("revoked", extra={"node": self.node.name, "peer": link.name})
                link.close(str(error))

    async def close(self, reason: str) -> None:
        for task in self._dialling:
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        for link in list(self.sockets.values()):
            link.close(reason)
        await asyncio.gather(*(link.released() for link in list(self.sockets.values())), return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def client_session() -> aiohttp.ClientSession:
    """What `open_socket` needs."""
    return aiohttp.ClientSession(ws_response_class=DialledSocket)


async def open_socket(session: aiohttp.ClientSession, url: str, own: Self, heartbeat_s: float) -> DialledSocket:
    """A connection to a broker's link path, by its `ws://` or `wss://` address."""
    tls = own.client_tls() if url.startswith("wss:") else None
    socket = await session.ws_connect(
        f"{url.rstrip('/')}/link",
        heartbeat=heartbeat_s,
        max_msg_size=FRAME_BYTES_MAX,
        compress=0,
        ssl=tls if tls is not None else True,
        timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
    )
    assert isinstance(socket, DialledSocket), "the session is one of `client_session`"
    socket.read_up_to(FRAME_BYTES_MAX)
    return socket
