"""What each HTTP route requires of its caller: a table with a row per route, and an application without other routes.

A row is either a kind of access that needs no right, or a verb and its event types. Layers above add their routes with
rows of their own (`Routes.add`); a route without a row can't be added.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from aiohttp import web

from tops.model.errors import InvariantBroken
from tops.security import EVERYTHING, Verb

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access(Enum):
    """Access that needs no right on an event type."""

    PUBLIC = "public"  # every client that can connect: the rows of a listener for health and metrics only
    LOCAL = "local"  # every client on this machine; from elsewhere, every identity
    PROVES_ITSELF = "proves itself"  # the handler checks a proof of its own before it does anything
    IDENTIFIED = "identified"  # every identity


@dataclass(frozen=True, slots=True)
class Needs:
    """A right; `{…}` in `on` stands for that part of the path."""

    verb: Verb
    on: str = EVERYTHING


Right = Access | Needs
Table = Mapping[tuple[str, str], Right]

BROKER: Table = {
    ("GET", "/link"): Access.PROVES_ITSELF,
    ("GET", "/login"): Access.PROVES_ITSELF,
    ("GET", "/healthz"): Access.LOCAL,
    ("GET", "/readyz"): Access.LOCAL,
    ("GET", "/metrics"): Access.LOCAL,
    ("GET", "/v1/openapi.json"): Access.IDENTIFIED,
    ("GET", "/v1/topology"): Access.IDENTIFIED,
    ("GET", "/v1/subscriptions"): Needs(Verb.ADMINISTER),
    ("GET", "/v1/transactions"): Needs(Verb.ADMINISTER),
    ("GET", "/v1/transactions/{tx}"): Needs(Verb.ADMINISTER),
    ("GET", "/v1/journal"): Needs(Verb.ADMINISTER),
    ("GET", "/v1/ordering"): Needs(Verb.ADMINISTER),
}
HEALTH: Table = {
    ("GET", "/healthz"): Access.PUBLIC,
    ("GET", "/readyz"): Access.PUBLIC,
    ("GET", "/metrics"): Access.PUBLIC,
}


class Routes:
    """The routes of one listener, each with its row."""

    def __init__(self, app: web.Application, table: Table) -> None:
        self.app, self.table = app, dict(table)

    def add(self, method: str, path: str, handler: Handler, right: Right | None = None) -> None:
        """Serve a route whose row is in the table or is `right`; InvariantBroken without a row."""
        if right is not None:
            self.table[method, path] = right
        if (method, path) not in self.table:
            raise InvariantBroken(f"{method} {path} has no row in the table of rights: its access is not defined")
        self.app.router.add_route(method, path, handler)
        if method == "GET":
            self.app.router.add_route("HEAD", path, handler)

    def right_of(self, request: web.Request) -> Right | None:
        """The row of a request's route; None without a route: the response is 404 or 405."""
        if request.match_info.http_exception is not None:
            return None
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else ""
        method = "GET" if request.method == "HEAD" else request.method
        if (method, path) not in self.table:
            raise InvariantBroken(f"{method} {path} was added without a row in the table of rights")
        return self.table[method, path]
