"""Accepts the connections of one listener. Each counts against the budget from the moment it is accepted, and gives its
place back when it has proved an identity or is closed; what takes longer than the budget allows is cut off.

The library's own listener has no such limits: a silent stranger keeps a connection for as long as it likes.
"""

import asyncio
import logging
import socket
import ssl
import time
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from tops.errors import LimitExceeded
from tops.http.gate import PRINCIPAL, Report
from tops.http.rights import Handler
from tops.security import ConnectionBudget, Ticket

BACKLOG = 1024
ACCEPT_AGAIN_S = 0.5  # after the system had no descriptor or memory left for one more

log = logging.getLogger("tops.broker")


class Connection(RequestHandler):
    """One accepted connection; a request finds it as its `protocol`."""

    __slots__ = ("_budget", "_deadline", "_ticket")

    def __init__(self, server: web.Server, budget: ConnectionBudget, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **server._kwargs)
        self._budget, self._ticket = budget, ticket
        self._deadline = loop.call_later(budget.wait_s, self._overdue)

    def admitted(self) -> None:
        """It has proved an identity, or is gone; the second time does nothing."""
        self._deadline.cancel()
        self._budget.release(self._ticket)

    def _overdue(self) -> None:
        if self.transport is not None:  # else the TLS handshake has the same limit
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.admitted()
        super().connection_lost(exc)


def admit(request: web.Request) -> None:
    """The connection of this request has proved an identity."""
    if isinstance(request.protocol, Connection):
        request.protocol.admitted()


@web.middleware
async def admit_identified(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Behind a gate: a request of a known identity admits its connection. Others are served, and do not keep it."""
    if PRINCIPAL in request:
        admit(request)
    return await handler(request)


class BoundedSite(web.BaseSite):
    """A listener at one address for a runner's application."""

    __slots__ = ("_address", "_arriving", "_budget", "_rejected", "_sockets", "_tasks")

    def __init__(
        self,
        runner: web.AppRunner,
        address: tuple[str, int | None],
        budget: ConnectionBudget,
        rejected: Report,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._address, self._budget, self._rejected = address, budget, rejected
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._arriving: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    async def start(self) -> None:
        """Raises OSError, with nothing left open, when it can't listen."""
        await super().start()
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
            listening.listen(BACKLOG)
        self._tasks = [asyncio.ensure_future(self._accept(listening)) for listening in self._sockets]

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._arriving]
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
                continue  # gone before it was accepted
            except OSError as error:
                log.error("no connection can be accepted", extra={"listen": self.name, "reason": str(error)})
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            self._arrived(accepted, address[0])
            await asyncio.sleep(0)  # a flood of connections leaves the loop to others

    def _arrived(self, accepted: socket.socket, host: str) -> None:
        try:
            ticket = self._budget.admit(host, time.monotonic())
        except LimitExceeded as error:
            accepted.close()
            self._rejected(host, "connect", str(error))
            return
        arriving = asyncio.ensure_future(self._open(accepted, ticket))
        self._arriving.add(arriving)
        arriving.add_done_callback(self._arriving.discard)

    async def _open(self, accepted: socket.socket, ticket: Ticket) -> None:
        server, tls = self._runner.server, self._ssl_context
        assert server is not None, "a site starts after its runner"
        connection = Connection(server, self._budget, ticket)
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": self._budget.wait_s}
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, **options)
        except (OSError, asyncio.CancelledError) as error:  # no TLS, or not in time; rejections were reported
            connection.admitted()
            accepted.close()
            if isinstance(error, asyncio.CancelledError):
                raise
