"""The connections of a broker's links: accepting sites and brokers, and dialling other brokers.

Of two neighbouring brokers the one whose name sorts first dials. A broken connection is dialled again, with a growing
and randomised pause.
"""

import asyncio
import logging
import random
import time
from contextlib import suppress
from datetime import datetime
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from tops.model.errors import (
    LimitExceeded,
    NotAuthenticated,
    PermissionDenied,
    ProtocolError,
    TopsError,
    Undecodable,
)
from tops.model.ids import NodeId
from tops.model.ordering import difference
from tops.model.sizes import FRAME_BYTES_MAX
from tops.runtime.broker_node import BrokerNode
from tops.runtime.config import Limits
from tops.runtime.edge.guard import Guard
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import HANDSHAKE_TIMEOUT_S, Self
from tops.runtime.links.link import Link, exchange_link_hello
from tops.runtime.links.sockets import AcceptedSocket, Socket
from tops.runtime.site_journal import INCARNATIONS_PER_S, new_incarnation
from tops.security import (
    HANDSHAKE_BYTES_MAX,
    ConnectionBudget,
    Kind,
    Peer,
    Permissions,
    Verb,
    peer_identity,
    utc_now,
)
from tops.server.listener import admit

REDIAL_FIRST_S, REDIAL_MAX_S = 0.05, 2.0

log = logging.getLogger("tops.broker")


class Connections:
    """All connections of one broker."""

    def __init__(self, node: BrokerNode, own: Self, permissions: Permissions) -> None:
        self.node, self.own, self.permissions = node, own, permissions
        self.budget = connection_budget(node.limits)
        self._enforced = own.trust.revocations if own.trust is not None else None
        self.sockets: dict[Socket, Link] = {}
        self._expiries: dict[Socket, datetime] = {}  # of the certificates at the other ends
        self._dialling: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    # ------------------------------------------------------------------------------------------------------ accepting

    async def accept(self, request: web.Request) -> web.StreamResponse:
        """The handler of the path that links use."""
        host = request.remote or ""
        socket = AcceptedSocket(
            timeout=1.0, heartbeat=self.node.limits.heartbeat_s, max_msg_size=HANDSHAKE_BYTES_MAX + 1, compress=False
        )
        socket.address = request.headers.get("Host", "").lower()
        try:
            await socket.prepare(request)
            peer = await self.own.accept(socket, host)
            self._admit(request, peer)
            socket.read_up_to(FRAME_BYTES_MAX, request)
            await self._serve_accepted(socket, peer)
        except (ProtocolError, NotAuthenticated) as error:
            await self._reject_connection(socket, host, "connect", error)
        except PermissionDenied as error:
            await self._reject_connection(socket, error.who, error.verb, error)
        except LimitExceeded as error:
            await self._reject_connection(socket, peer.node, "connect", error)
        except (ConnectionError, RuntimeError) as error:
            log.debug("connection lost", extra={"node": self.node.name, "host": host, "error": str(error)})
        return socket

    def _admit(self, request: web.Request, peer: Peer) -> None:
        """Count a connection against the quota of its identity. Brokers have no quota: the configuration names them."""
        accountable = peer.principal or peer.identity
        admit(request, "" if accountable.kind is Kind.BROKER else accountable.name)

    async def _serve_accepted(self, socket: Socket, peer: Peer) -> None:
        guard = None
        name = peer.node
        brokers = self.node.core.topology.brokers
        if peer.identity.kind is not Kind.BROKER:
            if name in brokers:
                raise NotAuthenticated(f"{name!r} is the name of a broker: give the site another name")
            self._check_incarnation(peer)
            self._check_represents(peer)
            guard = Guard(
                peer.identity,
                self.permissions,
                brokers,
                peer.instance,
                peer.principal,
                may_represent_all=self.own.trust is None,
            )
        elif name not in self.node.core.topology.neighbours[self.node.name]:
            raise NotAuthenticated(f"broker {name!r} has no link to {self.node.name!r} in the configuration")
        known = self.node.links.get(name)
        if known is not None and known.incarnation > peer.incarnation:
            raise NotAuthenticated(f"a newer incarnation of {name!r} is connected: this one has ended")
        stamped = self.node.core.edge.sites.get(name)
        if stamped is not None and stamped.incarnation == peer.incarnation and stamped.sender != peer.sender:
            # Messages of the session may be under way with the former stamp.
            raise NotAuthenticated(f"this incarnation of {name!r} began with another role, or for another identity")
        if known is not None and known.connected:
            known.close("a newer connection replaced this one")
            await known.released()
        await self._serve(socket, peer, guard, accepting=True)

    def _check_represents(self, peer: Peer) -> None:
        """Raise PermissionDenied unless the peer is a service, or names are trusted: without keys every peer that knows
        the secret may use any name."""
        principal = peer.principal
        if principal is None or self.own.trust is None or self.permissions.has_any(peer.identity, Verb.REPRESENT):
            return
        raise PermissionDenied(
            f"{peer.identity} may not act on behalf of {principal}: it needs a certificate with the role `service`, "
            f"or with another one that allows `{Verb.REPRESENT.value}`",
            who=peer.node,
            verb=Verb.REPRESENT.value,
        )

    def _check_incarnation(self, peer: Peer) -> None:
        """Incarnations come from the clock. One that is far ahead would make every later one of its owner look old."""
        ahead_s = (peer.incarnation - new_incarnation()) / INCARNATIONS_PER_S
        if ahead_s > self.node.limits.clock_ahead_s:
            raise NotAuthenticated(
                f"the incarnation of {peer.node!r} is {ahead_s:.0f} s ahead of the clock of this broker, which accepts "
                f"{self.node.limits.clock_ahead_s:g} s: correct the clocks, or increase clock_ahead_s"
            )

    async def _serve(self, socket: Socket, peer: Peer, guard: Guard | None, *, accepting: bool) -> None:
        node = self.node
        ours = node.own_link_hello(peer)
        theirs = await exchange_link_hello(socket, ours, HANDSHAKE_TIMEOUT_S, accepting=accepting)
        self._check_trusted(socket)  # a revocation that came during the handshake did not find this socket yet
        if peer.identity.kind is Kind.BROKER and (why := difference(node.core.topology.domains, theirs.domains)):
            raise ProtocolError(f"{peer.node} can't be linked: {why}")
        link = node.link_for(peer, guard, ours, theirs, ours.proposal if accepting else theirs.proposal)
        if link.connected:
            raise ProtocolError("a newer connection replaced this one")
        self.sockets[socket] = link
        if (expiry := self.own.peer_expiry(socket)) is not None:
            self._expiries[socket] = expiry
        try:
            received = theirs.received if ours.session and ours.session == theirs.session else 0
            await link.serve(socket, received, node)
        except Undecodable as error:
            if guard is None:
                node.reset(link, str(error))
            raise
        finally:
            del self.sockets[socket]
            self._expiries.pop(socket, None)
            node.disconnected(link)

    def rejected(self, who: str, act: str, reason: str) -> None:
        """Count and audit a rejected connection or request. The log contains only what the audit log's limit admits, so
        that neither can be flooded."""
        self.node.counters["rejected"] += 1
        audit = self.node.audit
        if audit is None or audit.denied(time.time(), who=who, act=act, detail=reason):
            log.warning("rejected", extra={"node": self.node.name, "who": who, "act": act, "reason": reason})

    async def _reject_connection(self, socket: Socket, who: str, act: str, error: TopsError) -> None:
        self.rejected(who, act, str(error))
        with suppress(ConnectionError, RuntimeError):
            await socket.close(code=1008, message=str(error).encode()[:120])

    # ------------------------------------------------------------------------------------------------------- dialling

    def dial(self, urls: dict[NodeId, str]) -> None:
        """Keep a connection to every neighbour that this broker has to dial."""
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
        """Use renewed keys and a newer revocation list, if any, and close connections whose certificates are revoked or
        have expired."""
        try:
            self.own.reload()
        finally:
            self._enforce()  # also if the certificate beside the list can't be used

    def _enforce(self) -> None:
        trust = self.own.trust
        if trust is None:
            return
        all_of_them, now = trust.revocations != self._enforced, utc_now()
        self._enforced = trust.revocations
        for socket, link in list(self.sockets.items()):
            if not all_of_them and now <= self._expiries[socket]:
                continue
            try:
                self._check_trusted(socket)
            except NotAuthenticated as error:
                fields = {"node": self.node.name, "peer": link.name, "reason": str(error)}
                log.warning("certificate revoked or expired", extra=fields)
                link.close(str(error))

    def _check_trusted(self, socket: Socket) -> None:
        tls = socket.get_extra_info("ssl_object")
        if self.own.trust is not None and tls is not None:
            peer_identity(tls, self.own.trust, utc_now())

    async def close(self, reason: str) -> None:
        for task in self._dialling:
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        for link in list(self.sockets.values()):
            link.close(reason)
        await asyncio.gather(*(link.released() for link in list(self.sockets.values())), return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def connection_budget(limits: Limits) -> ConnectionBudget:
    """How many connections of one listener may be unauthenticated, and for how long."""
    return ConnectionBudget(
        per_address=limits.waiting_per_address,
        total=max(1024, 4 * limits.waiting_per_address),
        per_second=limits.connections_per_s,
        wait_s=HANDSHAKE_TIMEOUT_S,
        per_identity=limits.sessions_max,
    )
