"""How an HTTP client proves its identity: by its certificate, or by a token made from the secret of a broker without
keys."""

import time
from dataclasses import dataclass

from aiohttp import web

from tops.http.gate import bearer_of
from tops.model.errors import NotAuthenticated
from tops.security import (
    Identity,
    Kind,
    Secret,
    TokenKind,
    Tokens,
    Trust,
    make_token,
    peer_identity,
    request_subject,
    utc_now,
)

HOLDER = "http"  # the name of a client that is only known to have the secret
HOME = "/v1/topology"  # the page to which a one-time address redirects a browser


class ByCertificate:
    """The identity in the client's certificate, by the current revocations."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust

    def __call__(self, request: web.Request) -> Identity | None:
        tls = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
        return None if tls is None else peer_identity(tls, self._trust, utc_now())


@dataclass(frozen=True, slots=True)
class BySecret:
    """Accepts clients that have the broker's secret; without keys all get the same role."""

    secret: Secret
    tokens: Tokens
    holder: Identity

    @classmethod
    def of(cls, secret: Secret, cluster: str, site_role: str) -> "BySecret":
        return cls(secret, Tokens(secret, time.time()), Identity(cluster, Kind.SITE, HOLDER, site_role))

    def __call__(self, request: web.Request) -> Identity | None:
        shown, kind, subject = bearer_of(request), TokenKind.REQUEST, _subject(request)
        if shown is None:
            shown, kind, subject = request.cookies.get(_cookie(request)), TokenKind.SESSION, request.host.lower()
        if shown is None:
            return None
        self.tokens.check(shown, kind, subject, time.time())
        return self.holder

    async def login(self, request: web.Request) -> web.StreamResponse:
        """Exchange the token of a one-time address for a session."""
        now, host = time.time(), request.host.lower()
        if (token := request.query.get("token")) is None:
            raise NotAuthenticated("this address needs the token that `tops console-url` makes")
        self.tokens.check(token, TokenKind.BROWSER, host, now)
        response = web.Response(status=303, headers={"Location": HOME, "Cache-Control": "no-store"})
        response.set_cookie(
            _cookie(request),
            make_token(self.secret, TokenKind.SESSION, host, now),
            max_age=int(TokenKind.SESSION.lifetime_s),
            httponly=True,
            samesite="Strict",
        )
        return response


def _subject(request: web.Request) -> str:
    return request_subject(request.host, request.method, request.path_qs)


def _cookie(request: web.Request) -> str:
    # Browsers send a host's cookies to all of its ports, so each broker uses a cookie name of its own.
    return f"tops-{request.host.rpartition(':')[2]}"
