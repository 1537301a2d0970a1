"""The names of a listener, and whether a request is for one of them.

A web page can't forge `Host` and `Origin`: the browser writes them. `Host` reveals a page whose own name was made to
point at this listener (DNS rebinding), and `Origin` a page of another server. Programs send no `Origin`.
"""

from collections.abc import Iterable

from aiohttp import web

from tops.model.errors import NotAuthenticated
from tops.security import split_address

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class WrongHost(NotAuthenticated):
    """The request names a host that is not a name of this listener."""


class ForeignOrigin(NotAuthenticated):
    """The request was made by a web page of another server."""


class Names:
    """The addresses of one listener, each a host and a port; `None` stands for every port."""

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        setting: str = "hosts",
    ) -> None:
        """`addresses` are the `host:port` under which it listens or is reached; `hosts` and `origins` are further ones
        of proxies, from the configuration; `setting` is the key that a rejection names."""
        self._setting = setting
        self._names: set[tuple[str, int | None]] = set()
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        for address in addresses:
            host, port = split_address(address)
            self._names |= {(name, port) for name in (host, *LOOPBACK_NAMES)}
        self._names |= {split_address(host) for host in hosts}

    def check(self, request: web.Request) -> None:
        """Raise WrongHost or ForeignOrigin unless the request was made for this listener, by a program or by a page
        that this listener itself has served."""
        given = request.headers.getall("Host", [])
        if len(given) != 1 or not self._is_ours(given[0], request):
            shown = ", ".join(given)[:200]
            raise WrongHost(
                f"this listener is not {shown!r}: use one of its addresses, or add the name to {self._setting!r}"
            )
        for origin in request.headers.getall("Origin", []):
            page = origin.rstrip("/").lower()
            if page not in self._origins and page != f"{request.scheme}://{given[0].lower()}":
                raise ForeignOrigin(f"a web page of {origin[:200]!r} may not use this listener: see 'origins'")

    def _is_ours(self, given: str, request: web.Request) -> bool:
        try:
            host, port = split_address(given)
        except ValueError:
            return False
        if port is None:
            port = 443 if request.scheme == "https" else 80
        if (host, port) in self._names or (host, None) in self._names:
            return True
        # A listener at every address has all of them as names; an address, unlike a name, can't be rebound.
        reached = request.transport.get_extra_info("sockname") if request.transport is not None else None
        return reached is not None and (host, port) == (str(reached[0]).partition("%")[0], reached[1])
