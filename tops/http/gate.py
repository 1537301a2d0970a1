"""Decides on every HTTP request, WebSocket upgrades included, before its handler runs.

In this order: was it meant for this listener (`Host`, `Origin`), which identity makes it, has that identity the right
that the route's row asks for. Rejections are reported, for the audit log, and answered with 421 (`Host`) or 403.
"""

import hmac
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from tops.errors import NotAuthenticated, PermissionDenied, TopsError
from tops.http.names import Names, WrongHost
from tops.http.rights import Access, Handler, Needs, Right, Routes, Table
from tops.security import Identity, Permissions, is_loopback

Authenticate = Callable[[web.Request], Identity | None]  # None: shows nothing; NotAuthenticated: shows something wrong
Report = Callable[[str, str, str], None]  # who, which request, why it was rejected

PRINCIPAL = web.RequestKey("principal", Identity)  # where a handler finds the identity that makes the request
_CLIENT_BYTES_MAX = 2**20
_BEARER = "Bearer "


class Gate:
    """The gate of one listener."""

    def __init__(
        self, names: Names, permissions: Permissions, authenticate: Sequence[Authenticate], report: Report
    ) -> None:
        self._names, self._permissions, self._report = names, permissions, report
        self._authenticate = list(authenticate)

    def authenticate_by(self, another: Authenticate) -> None:
        """Also take this proof of identity; asked before the others."""
        self._authenticate.insert(0, another)

    def routes(self, table: Table) -> Routes:
        """An application behind this gate, with the routes of this table to be added."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                self._names.check(request)
                right = routes.right_of(request)
                if right is not None and (principal := self._admitted(request, right)) is not None:
                    request[PRINCIPAL] = principal
                return await handler(request)
            except (NotAuthenticated, PermissionDenied) as error:
                return self._rejected(request, error)

        routes = Routes(web.Application(middlewares=[guarded], client_max_size=_CLIENT_BYTES_MAX), table)
        return routes

    def _admitted(self, request: web.Request, right: Right) -> Identity | None:
        if right in (Access.PUBLIC, Access.PROVES_ITSELF):
            return None
        if right is Access.LOCAL and is_loopback(request.remote or ""):
            return None
        principal = self._principal(request)
        if isinstance(right, Needs):
            self._permissions.check(principal, right.verb, right.on.format_map(request.match_info))
        return principal

    def _principal(self, request: web.Request) -> Identity:
        for authenticate in self._authenticate:
            if (found := authenticate(request)) is not None:
                return found
        raise NotAuthenticated(
            "this request shows no identity: use the command line, a client certificate, a bearer token, "
            "or in a browser the address that `tops console-url` prints"
        )

    def _rejected(self, request: web.Request, error: TopsError) -> web.Response:
        who = getattr(error, "who", "") or request.remote or ""
        self._report(who, f"{request.method} {request.path}", str(error))
        return json_response(
            {"error": str(error), "retry": error.retry.value}, 421 if isinstance(error, WrongHost) else 403
        )


def bearer_of(request: web.Request) -> str | None:
    """The bearer token that a request shows."""
    given = request.headers.get("Authorization", "")
    return given.removeprefix(_BEARER) if given.startswith(_BEARER) else None


def shows(request: web.Request, token: str) -> bool:
    """Whether the request shows this very bearer token."""
    shown = (bearer_of(request) or "").encode(errors="surrogateescape")  # a header may hold any bytes
    return hmac.compare_digest(shown, token.encode())


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")


_encoder = msgspec.json.Encoder(enc_hook=str)
