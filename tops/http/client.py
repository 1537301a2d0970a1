"""Asking a broker's HTTP side, as the command line does: with keys, or with the secret of a broker without."""

import ssl
import time
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from tops.model.errors import NotAuthenticated, NotReachable, PermissionDenied
from tops.runtime.links.identity import Self
from tops.runtime.site_journal import new_incarnation
from tops.security import TokenKind, find_secret, make_token, request_subject


async def get_json(session: aiohttp.ClientSession, url: str, path: str, keys: Path | None = None) -> tuple[int, Any]:
    """Status and content of a view, at the broker with this `ws://` or `wss://` address.

    NotReachable if nobody answers there, NotAuthenticated or PermissionDenied if the broker rejects us.
    """
    address = http_address(url, path)
    status, content = await _get_once(session, url, address, keys)
    if status == 403 and address.scheme == "http":
        # A token that was made before the broker's start does not count: one more is made, in case it has just started.
        status, content = await _get_once(session, url, address, keys)
    if status in (403, 421):
        raise PermissionDenied(f"{url}: {content['error']}")
    if status == 429:
        raise NotReachable(f"{url}: {content['error']}")
    return status, content


async def _get_once(session: aiohttp.ClientSession, url: str, address: URL, keys: Path | None) -> tuple[int, Any]:
    lacking: NotAuthenticated | None = None
    try:
        headers = bearer_for(address)
    except NotAuthenticated as error:
        lacking, headers = error, {}
    try:
        async with session.get(address, headers=headers, ssl=_tls_for(address, keys)) as response:
            if lacking is not None:
                raise lacking  # somebody listens there: it is the secret that is missing, not the broker
            return response.status, await response.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise NotReachable(f"{url} does not answer: {error}") from None


def http_address(url: str, path: str) -> URL:
    """The HTTP address of a path at the broker with this `ws://` or `wss://` address."""
    return URL(url.rstrip("/").replace("ws", "http", 1) + path)


def bearer_for(address: URL, method: str = "GET") -> dict[str, str]:
    """The header that a request to a broker without keys shows; none with keys, where the certificate is shown."""
    if address.scheme == "https":
        return {}
    host = address.host_port_subcomponent or ""
    subject = request_subject(host, method, address.raw_path_qs)
    return {"Authorization": f"Bearer {make_token(find_secret(host), TokenKind.REQUEST, subject, time.time())}"}


def console_address(url: str) -> URL:
    """An address that a browser can open once, at a broker without keys."""
    address = http_address(url, "/login")
    host = address.host_port_subcomponent or ""
    return address.with_query(token=make_token(find_secret(host), TokenKind.BROWSER, host, time.time()))


def _tls_for(address: URL, keys: Path | None) -> ssl.SSLContext | bool:
    if address.scheme == "https" and keys is not None:
        return Self.with_keys(keys, new_incarnation()).client_tls() or True
    return True
