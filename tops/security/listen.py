"""When a node may do without TLS: on loopback, or when its configuration says in plain words what that means."""

import hmac
import ipaddress
from urllib.parse import urlsplit

from tops.model.errors import ConfigError

PLAIN_WORDS = "I accept that anyone on the network can read and write"


def is_loopback(host: str) -> bool:
    """Whether only this machine can be on the other side; an unknown name or "every address" is not loopback."""
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
    """Whether the configuration's `insecure` says it; anything but the exact words is an error, not a no."""
    if plain_words is None:
        return False
    if not hmac.compare_digest(plain_words.encode(), PLAIN_WORDS.encode()):
        raise ConfigError(f'insecure = {plain_words[:100]!r} is not understood; write insecure = "{PLAIN_WORDS}"')
    return True


def check_listen(host: str, tls: bool, plain_words: str | None = None) -> None:
    """Refuse to open a listener that would let strangers in."""
    _check("listen on", host, tls, plain_words)


def check_connect(host: str, tls: bool, plain_words: str | None = None) -> None:
    """Refuse to send data to another machine in the clear."""
    _check("connect to", host, tls, plain_words)


def _check(act: str, host: str, tls: bool, plain_words: str | None) -> None:
    accepted = accepts_insecure(plain_words)
    if not (tls or is_loopback(host) or accepted):
        raise ConfigError(
            f"refusing to {act} {host or 'every address'} without TLS: make keys with `tops keys`, "
            f'use a loopback address, or write insecure = "{PLAIN_WORDS}"'
        )
