"""Tokens for HTTP in clusters without keys, made from the shared secret by programs that can read it.

    request   one request of a program: `Authorization: Bearer TOKEN`; valid once, for one method, host and path
    browser   the query of a one-time address, which a browser exchanges for a session
    session   a browser's cookie

A token is `ISSUED.NONCE.MAC`. Its MAC covers its kind and its subject, so that it is valid for nothing else.
"""

import base64
import hmac
import math
import secrets
from enum import Enum

import msgspec

from tops.model.errors import NotAuthenticated
from tops.security.secret import Secret

CLOCK_SKEW_S = 60.0
_LABEL = "tops http token"


class TokenKind(Enum):
    REQUEST = "request"
    BROWSER = "browser"
    SESSION = "session"

    @property
    def lifetime_s(self) -> float:
        return {TokenKind.REQUEST: 60.0, TokenKind.BROWSER: 600.0, TokenKind.SESSION: 12 * 3600.0}[self]


def request_subject(host: str, method: str, path: str) -> str:
    """The subject of a request token; `host` as in the `Host` header, `path` with its query."""
    return f"{method} {host.lower()} {path}"


def make_token(secret: Secret, kind: TokenKind, subject: str, now: float) -> str:
    """`now` in seconds since 1970."""
    # Rounded up: rounded down, a token of a broker's first millisecond would count as older than the broker.
    issued, nonce = str(math.ceil(now * 1000)), secrets.token_urlsafe(16)
    return f"{issued}.{nonce}.{_mac(secret, kind, subject, issued, nonce)}"


class Tokens:
    """Checks the tokens of requests to one broker, and accepts one-time tokens only once."""

    def __init__(self, secret: Secret, now: float) -> None:
        self._secret, self._started = secret, now
        self._used: dict[str, float] = {}  # nonce -> when its token expires; only valid tokens are added

    def check(self, token: str, kind: TokenKind, subject: str, now: float) -> None:
        """Raise NotAuthenticated unless this token was made for this subject with the secret, and has not expired."""
        if not token.isascii():  # a header may hold any bytes; a token is ASCII
            raise NotAuthenticated(f"the {kind.value} token is invalid: it has other characters than ASCII")
        issued, _, rest = token.partition(".")
        nonce, _, mac = rest.partition(".")
        expected = _mac(self._secret, kind, subject, issued, nonce)
        if not hmac.compare_digest(mac.encode(), expected.encode()):
            raise NotAuthenticated(f"the {kind.value} token was not made with this broker's secret for this purpose")
        age_s = now - int(issued) / 1000
        if not -CLOCK_SKEW_S <= age_s <= kind.lifetime_s:
            raise NotAuthenticated(f"the {kind.value} token is {age_s:.0f} s old, its limit is {kind.lifetime_s:.0f} s")
        if kind is not TokenKind.SESSION:
            self._use(nonce, now + kind.lifetime_s - age_s, age_s, now)

    def _use(self, nonce: str, ends: float, age_s: float, now: float) -> None:
        # The tokens that an earlier incarnation of this broker accepted are not known: no token of its time is valid.
        if now - age_s < self._started or nonce in self._used:
            raise NotAuthenticated("the token was used before, or is older than this broker's start: make a new one")
        self._used = {used: until for used, until in self._used.items() if until > now}
        self._used[nonce] = ends


def _mac(secret: Secret, kind: TokenKind, subject: str, issued: str, nonce: str) -> str:
    covered = msgspec.msgpack.encode((_LABEL, kind, subject, issued, nonce))
    return base64.urlsafe_b64encode(secret.proof(covered)).decode().rstrip("=")
