"""When a node may work without TLS: on loopback, or when its configuration accepts the risk in plain words."""

import hmac
import ipaddress
from urllib.parse import urlsplit

from tops.model.errors import ConfigError

PLAIN_WORDS = "I accept that anyone on the network can read and write"


def is_loopback(host: str) -> bool:
    """Whether only this machine can be the other side; an unknown name or "every address" is not loopback."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def split_address(address: str) -> tuple[str, int | None]:
    """Host, in lower case and without brackets, and port, if there is one; ValueError if it is neither."""
    parts = urlsplit(f"//{address}")
    if not parts.hostname or parts.path or parts.query or parts.fragment or "@" in address:
        raise ValueError(f"{address[:200]!r} is no host or host:port")
    return parts.hostname.rstrip("."), parts.port


def accepts_insecure(plain_words: str | None) -> bool:
    """Whether the configuration's `insecure` has the exact words; any other text is an error."""
    if plain_words is None:
        return False
    if not hmac.compare_digest(plain_words.encode(), PLAIN_WORDS.encode()):
        raise ConfigError(f'insecure = {plain_words[:100]!r} is not valid; write insecure = "{PLAIN_WORDS}"')
    return True


def check_listen(host: str, tls: bool, plain_words: str | None = None) -> None:
    """Raise ConfigError for a listener that any machine could use without authentication."""
    _check("listen on", host, tls, plain_words)


def check_connect(host: str, tls: bool, plain_words: str | None = None) -> None:
    """Raise ConfigError for a connection to another machine without encryption."""
    _check("connect to", host, tls, plain_words)


def _check(act: str, host: str, tls: bool, plain_words: str | None) -> None:
    accepted = accepts_insecure(plain_words)
    if not (tls or is_loopback(host) or accepted):
        raise ConfigError(
            f"can't {act} {host or 'every address'} without TLS: make keys with `tops keys`, "
            f'use a loopback address, or write insecure = "{PLAIN_WORDS}"'
        )
