"""Accepts the connections of one listener. Each counts against the budget from the moment it is accepted, until it has
authenticated or is closed. One that takes longer than the budget allows is closed, and silent ones are displaced when
there are too many. After authentication it counts against the quota of its identity.

The library's own listener has no such limits: a silent client could keep a connection without end.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import web
from aiohttp.typedefs import Middleware
from aiohttp.web_protocol import RequestHandler

from tops.http.gate import PRINCIPAL, Report, json_response
from tops.http.rights import Handler
from tops.model.errors import LimitExceeded
from tops.security import ConnectionBudget, Ticket, split_address

BACKLOG = 1024
ACCEPT_AGAIN_S = 0.5  # after the system had no descriptor or memory for one more

log = logging.getLogger("tops.broker")


class Connection(RequestHandler):
    """One accepted connection; a request finds it as its `protocol`."""

    __slots__ = ("__weakref__", "_budget", "_deadline", "_identity", "ticket")

    def __init__(self, server: web.Server, budget: ConnectionBudget, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **server._kwargs)
        self._budget, self.ticket = budget, ticket
        self._identity = ""  # whose quota it counts against
        self._deadline = loop.call_later(budget.wait_s, self.cut_off)

    def identified(self, identity: str) -> None:
        """The connection is authenticated, and counts for its identity until it is closed. LimitExceeded if the
        identity has too many."""
        if identity and not self._identity:
            self._budget.identify(identity)
            self._identity = identity
        self.admitted()

    def admitted(self) -> None:
        """The connection no longer waits for authentication, whatever the result; a repeated call does nothing."""
        self._deadline.cancel()
        self._budget.release(self.ticket)

    def cut_off(self) -> None:
        """Close it: its time is over, or another connection displaces it."""
        if self.transport is not None:  # otherwise it is in the TLS handshake, which its listener ends
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.admitted()
        if self._identity:
            self._budget.leave(self._identity)
            self._identity = ""
        super().connection_lost(exc)


def admit(request: web.Request, identity: str) -> None:
    """The connection of this request is authenticated (empty: an identity without a quota), see `identified`."""
    if isinstance(request.protocol, Connection):
        request.protocol.identified(identity)


def admit_identified(rejected: Report) -> Middleware:
    """Behind a gate: a request of a known identity admits its connection. Other requests are served without that."""

    @web.middleware
    async def admitting(request: web.Request, handler: Handler) -> web.StreamResponse:
        if PRINCIPAL in request:
            name = request[PRINCIPAL].name
            try:
                admit(request, name)
            except LimitExceeded as error:
                rejected(name, f"{request.method} {request.path}", str(error))
                response = json_response({"error": str(error), "retry": error.retry.value}, 429)
                response.force_close()
                return response
        return await handler(request)

    return admitting


class BoundedSite(web.BaseSite):
    """A listener at one address for a runner's application."""

    __slots__ = ("_address", "_arriving", "_budget", "_rejected", "_sockets", "_tasks", "_waiting")

    def __init__(
        self,
        runner: web.AppRunner,
        address: tuple[str, int | None],
        budget: ConnectionBudget,
        rejected: Report,
        tls: ssl.SSLContext | None = None,
        bound: Sequence[socket.socket] = (),
    ) -> None:
        """`bound` are sockets that are bound already, where the address does not say all, such as the port."""
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._address, self._budget, self._rejected = address, budget, rejected
        self._sockets: list[socket.socket] = list(bound)
        self._tasks: list[asyncio.Task[None]] = []
        self._arriving: dict[int, asyncio.Task[None]] = {}  # by ticket number, during the TLS handshake
        self._waiting: WeakValueDictionary[int, Connection] = WeakValueDictionary()  # by ticket number

    @property
    def name(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    async def start(self) -> None:
        """Raises OSError, with nothing left open, if it can't listen."""
        await super().start()
        if not self._sockets:
            await self._bind()
        for listening in self._sockets:
            listening.listen(BACKLOG)
        self._tasks = [asyncio.ensure_future(self._accept(listening)) for listening in self._sockets]

    async def _bind(self) -> None:
        host, port = self._address
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            self._sockets.append(listening := socket.socket(family, socket.SOCK_STREAM))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.setblocking(False)
            listening.bind(address)

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._arriving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        await super().stop()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue  # closed before it was accepted
            except OSError as error:
                log.error("no connection can be accepted", extra={"listen": self.name, "reason": str(error)})
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            self._arrived(accepted, address[0])
            await asyncio.sleep(0)  # many connections at once must not block the event loop

    def _arrived(self, accepted: socket.socket, host: str) -> None:
        try:
            ticket = self._budget.admit(host, time.monotonic())
        except LimitExceeded as error:
            accepted.close()
            self._rejected(host, "connect", str(error))
            return
        if ticket.displaced is not None:
            self._cut_off(ticket.displaced)
        arriving = self._arriving[ticket.number] = asyncio.ensure_future(self._open(accepted, ticket))
        arriving.add_done_callback(lambda _: self._arriving.pop(ticket.number))

    def _cut_off(self, number: int) -> None:
        """Close a silent connection, which another one displaces."""
        if (arriving := self._arriving.get(number)) is not None:
            arriving.cancel()
        if (connection := self._waiting.get(number)) is not None:
            connection.cut_off()
            reason = "it did not authenticate, and another connection needed its slot"
            self._rejected(connection.ticket.network, "connect", reason)

    async def _open(self, accepted: socket.socket, ticket: Ticket) -> None:
        server, tls = self._runner.server, self._ssl_context
        assert server is not None, "a site starts after its runner"
        connection = self._waiting[ticket.number] = Connection(server, self._budget, ticket)
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": self._budget.wait_s}
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, **options)
        except (OSError, asyncio.CancelledError) as error:  # no TLS, or too late; rejections were reported
            connection.admitted()
            accepted.close()
            if isinstance(error, asyncio.CancelledError):
                raise


def bound_socket(listen: str) -> socket.socket:
    """A socket that is bound to this `host:port`; port 0 is one that the system chooses. Raises OSError, ValueError."""
    host, port = split_address(listen)
    family, _, _, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening
