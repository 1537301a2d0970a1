"""Accepts direct connections for one replica: the handshake of links, then requests that read.

Who connects proves its identity as at a broker, and rights are checked by it. The replica announces the address to
clients that ask through the brokers; without keys both sides know the secret of the replica's broker.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from replication.replica.direct.connection import DirectConnection, Receive
from replication.replica.direct.quick_desk import QuickDesk
from replication.rpc.direct import PATH, READY
from tops.http.gate import Gate
from tops.http.names import Names
from tops.http.rights import Access
from tops.model.errors import ConfigError, LimitExceeded, NotAuthenticated, PermissionDenied, ProtocolError, TopsError
from tops.model.sizes import FRAME_BYTES_MAX
from tops.runtime.config import Limits
from tops.runtime.links.identity import Self
from tops.runtime.links.sockets import AcceptedSocket
from tops.security import (
    HANDSHAKE_BYTES_MAX,
    KeyedBuckets,
    Kind,
    Peer,
    Permissions,
    Verb,
    check_listen,
    is_of_server,
    split_address,
)
from tops.server.connections import connection_budget
from tops.server.listener import BoundedSite, admit, bound_socket

LOOPBACK = "127.0.0.1:0"  # where the file says nothing: a port that the system chooses
OFF = "off"
REJECTIONS_PER_MINUTE = 30  # that are logged, of each address
DIRECT = {("GET", PATH): Access.PROVES_ITSELF}

log = logging.getLogger("tops.replication")


class DirectListener:
    """One replica's listener; `url` is empty while it has none."""

    def __init__(
        self,
        name: str,
        own: Callable[[], Self],
        permissions: Callable[[], Permissions],
        limits: Limits,
        receive: Receive,
        desk: QuickDesk | None,
    ) -> None:
        """`own` and `permissions` are asked for at every connection, since both may be renewed."""
        self.name, self.url = name, ""
        self._own, self._permissions, self._limits = own, permissions, limits
        self._receive, self._desk = receive, desk
        self._rejections = KeyedBuckets(REJECTIONS_PER_MINUTE / 60, REJECTIONS_PER_MINUTE, keys_max=1024)

    @asynccontextmanager
    async def serving(self, listen: str | None, plain_words: str | None) -> AsyncIterator[None]:
        """Listen at this address. Raises ConfigError if an address that the file names can't be used."""
        own = self._own()
        if listen == OFF or not _can_serve(own, listen, self.name):
            yield
            return
        with_tls = own.trust is not None
        host, _ = split_address(listen or LOOPBACK)
        check_listen(host, with_tls, plain_words)
        try:
            listening = bound_socket(listen or LOOPBACK)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"replica {self.name!r} can't listen for reads on {listen or LOOPBACK}: {error}"
            ) from None
        port = listening.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        gate = Gate(Names([address], setting="read_listen"), self._permissions(), (), self._rejected)
        routes = gate.routes(DIRECT)
        routes.add("GET", PATH, self._accept)
        runner = web.AppRunner(routes.app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            tls = own.server_tls(lambda reason: self._rejected("a stranger", "TLS", reason))
            budget = connection_budget(self._limits)
            await BoundedSite(runner, (host, port), budget, self._rejected, tls, bound=[listening]).start()
            self.url = f"{'wss' if with_tls else 'ws'}://{address}"
            yield
        finally:
            self.url = ""
            await runner.cleanup()

    def _rejected(self, who: str, act: str, reason: str) -> None:
        if self._rejections.take(who, 1, time.monotonic()):
            log.warning("rejected", extra={"replica": self.name, "who": who, "act": act, "reason": reason})

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        host = request.remote or ""
        socket = AcceptedSocket(
            timeout=1.0, heartbeat=self._limits.heartbeat_s, max_msg_size=HANDSHAKE_BYTES_MAX + 1, compress=False
        )
        socket.address = request.headers.get("Host", "").lower()
        who = host
        try:
            await socket.prepare(request)
            own = self._own()
            peer = await own.accept(socket, host)
            who = peer.node
            self._check(own, peer)
            admit(request, (peer.principal or peer.identity).name)
            socket.read_up_to(FRAME_BYTES_MAX, request)
            await socket.send_bytes(READY)
            async with own.watching(socket):
                await DirectConnection(peer.sender, socket, self._receive, self._desk).serve()
        except (ProtocolError, NotAuthenticated, PermissionDenied, LimitExceeded) as error:
            await self._turn_away(socket, who, error)
        except (ConnectionError, RuntimeError) as error:
            log.debug("connection lost", extra={"replica": self.name, "host": host, "error": str(error)})
        return socket

    def _check(self, own: Self, peer: Peer) -> None:
        """Sites and replicas read; a service may do so for others, as at a broker."""
        if peer.identity.kind is Kind.BROKER:
            raise NotAuthenticated(f"{peer.identity} is a broker: requests come from sites and replicas")
        if peer.principal is None or own.trust is None:
            return
        if not self._permissions().has_any(peer.identity, Verb.REPRESENT):
            raise PermissionDenied(
                f"{peer.identity} may not act on behalf of {peer.principal}: it needs a certificate with the role "
                f"`service`, or with another one that allows `{Verb.REPRESENT.value}`",
                who=peer.node,
                verb=Verb.REPRESENT.value,
            )

    async def _turn_away(self, socket: AcceptedSocket, who: str, error: TopsError) -> None:
        self._rejected(who, "connect", str(error))
        with suppress(ConnectionError, RuntimeError):
            await socket.close(code=1008, message=str(error).encode()[:120])


def _can_serve(own: Self, listen: str | None, name: str) -> bool:
    if own.keys is None or is_of_server(own.keys.credentials):
        return True
    problem = (
        f"the certificate of {name} is not one of a server, so clients read through brokers: issue it again with "
        "--host and the address at which they reach the replica"
    )
    if listen is not None:
        raise ConfigError(f"read_listen = {listen!r}: {problem}")
    log.warning("no direct connections", extra={"replica": name, "reason": problem})
    return False
