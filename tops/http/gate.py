"""Decides on every HTTP request, WebSocket upgrades included, before its handler runs.

The checks, in this order: is the request for this listener (`Host`, `Origin`), which identity makes it, has that
identity the right of the route's row. Rejections are reported, for the audit log, with status 421 (`Host`) or 403. An
address may send one wrong token per second; its further requests with a token get status 429. A token that is made
from the secret is still accepted then: other programs of the same machine have the same address, and such a token
can't be guessed.
"""

import hmac
import math
import time
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web

from tops.http.names import Names, WrongHost
from tops.http.rights import Access, Handler, Needs, Right, Routes, Table
from tops.model.errors import NotAuthenticated, PermissionDenied, Retry, TopsError
from tops.security import Identity, KeyedBuckets, Permissions, is_loopback, network_of

Authenticate = Callable[[web.Request], Identity | None]  # None: no proof; NotAuthenticated: a wrong proof
Report = Callable[[str, str, str], None]  # the peer, the request, why it was rejected

PRINCIPAL = web.RequestKey("principal", Identity)  # the identity that makes the request, for handlers
_CLIENT_BYTES_MAX = 2**20
_BEARER = "Bearer "
_WRONG_TOKENS_PER_S = 1.0  # of one address
_WRONG_TOKENS_AT_ONCE = 20


class Gate:
    """The gate of one listener."""

    def __init__(
        self, names: Names, permissions: Permissions, authenticate: Sequence[Authenticate], report: Report
    ) -> None:
        self._names, self._permissions, self._report = names, permissions, report
        self._authenticate = list(authenticate)
        self._by_shown_secret: list[Authenticate] = []  # tried only within the rate limit: these can be guessed
        self._wrong_tokens = KeyedBuckets(_WRONG_TOKENS_PER_S, _WRONG_TOKENS_AT_ONCE)

    def authenticate_by_shown_secret(self, another: Authenticate) -> None:
        """Also accept a token that is the secret itself, not made from it; it is tried before the others."""
        self._by_shown_secret.append(another)

    def routes(self, table: Table) -> Routes:
        """An application behind this gate, with the routes of this table to be added."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            guesser = None if bearer_of(request) is None else network_of(request.remote or "")
            wait_s = 0.0 if guesser is None else self._wrong_tokens.wait_s(guesser, 1, time.monotonic())
            try:
                self._names.check(request)
                right = routes.right_of(request)
                if right is not None and (principal := self._admitted(request, right, guessed=wait_s > 0)) is not None:
                    request[PRINCIPAL] = principal
                elif wait_s > 0:
                    return _too_many(wait_s)
                return await handler(request)
            except (NotAuthenticated, PermissionDenied) as error:
                if wait_s > 0:
                    return _too_many(wait_s)
                if guesser is not None:
                    self._wrong_tokens.take(guesser, 1, time.monotonic())
                return self._rejected(request, error)

        routes = Routes(web.Application(middlewares=[guarded], client_max_size=_CLIENT_BYTES_MAX), table)
        return routes

    def _admitted(self, request: web.Request, right: Right, *, guessed: bool) -> Identity | None:
        if right in (Access.PUBLIC, Access.PROVES_ITSELF):
            return None
        if right is Access.LOCAL and is_loopback(request.remote or ""):
            return None
        principal = self._principal(request, guessed=guessed)
        if isinstance(right, Needs):
            self._permissions.check(principal, right.verb, right.on.format_map(request.match_info))
        return principal

    def _principal(self, request: web.Request, *, guessed: bool) -> Identity:
        for authenticate in [*([] if guessed else self._by_shown_secret), *self._authenticate]:
            if (found := authenticate(request)) is not None:
                return found
        raise NotAuthenticated(
            "this request proves no identity: use the command line, a client certificate, a bearer token, "
            "or in a browser the address that `tops console-url` prints"
        )

    def _rejected(self, request: web.Request, error: TopsError) -> web.Response:
        who = getattr(error, "who", "") or request.remote or ""
        self._report(who, f"{request.method} {request.path}", str(error))
        return json_response(
            {"error": str(error), "retry": error.retry.value}, 421 if isinstance(error, WrongHost) else 403
        )


def _too_many(wait_s: float) -> web.Response:
    text = f"too many requests with a wrong token from this address: wait {wait_s:.1f} s"
    response = json_response({"error": text, "code": "too-many", "retry": Retry.SAFE.value}, 429)
    response.headers["Retry-After"] = str(math.ceil(wait_s))
    return response


def bearer_of(request: web.Request) -> str | None:
    """The bearer token of a request."""
    given = request.headers.get("Authorization", "")
    return given.removeprefix(_BEARER) if given.startswith(_BEARER) else None


def shows(request: web.Request, token: str) -> bool:
    """Whether the request has exactly this bearer token; False for a missing or empty one."""
    shown = (bearer_of(request) or "").encode(errors="surrogateescape")  # a header may hold any bytes
    return shown != b"" and hmac.compare_digest(shown, token.encode())


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")


_encoder = msgspec.json.Encoder(enc_hook=str)
