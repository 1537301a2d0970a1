"""A broker's HTTP side, on the same port as its links: health, metrics, and read-only views.

Health and metrics can have a second listener without TLS, which serves nothing else.
"""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tops.http.gate import PRINCIPAL, Gate, json_response
from tops.http.openapi import document
from tops.http.rights import BROKER, HEALTH, Handler, Routes
from tops.model.errors import UnknownTransaction
from tops.runtime.broker_node import BrokerNode
from tops.security import EVERYTHING, Verb
from tops.server.connections import Connections
from tops.server.metrics import NodeCollector
from tops.server.retention import Retainer
from tops.server.views import Views


class BrokerPages:
    """The HTTP pages of one broker."""

    def __init__(
        self,
        node: BrokerNode,
        connections: Connections,
        retainer: Retainer,
        collector: NodeCollector,
        ready: Callable[[], bool],
    ) -> None:
        self._node, self._connections, self._ready = node, connections, ready
        self._views = Views(node, retainer)
        self._registry = CollectorRegistry()
        self._registry.register(collector)

    def health_routes(self, gate: Gate) -> Routes:
        """Only health, readiness and metrics."""
        routes = gate.routes(HEALTH)
        self._add_health(routes)
        return routes

    def routes(self, gate: Gate, login: Handler | None) -> Routes:
        """All routes; `login` exchanges a browser's one-time address for a session, in clusters without keys."""
        views, routes = self._views, gate.routes(BROKER)
        self._add_health(routes)
        routes.add("GET", "/link", self._connections.accept)
        if login is not None:
            routes.add("GET", "/login", login)
        routes.add("GET", "/v1/openapi.json", _view(document))
        routes.add("GET", "/v1/topology", self._topology)
        routes.add("GET", "/v1/subscriptions", _view(views.subscriptions))
        routes.add("GET", "/v1/transactions", _view(views.transactions))
        routes.add("GET", "/v1/transactions/{tx}", self._transaction)
        routes.add("GET", "/v1/journal", _view(views.journal))
        routes.add("GET", "/v1/ordering", _view(views.ordering))
        return routes

    def _add_health(self, routes: Routes) -> None:
        routes.add("GET", "/healthz", self._healthz)
        routes.add("GET", "/readyz", self._readyz)
        routes.add("GET", "/metrics", self._metrics)

    async def _healthz(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        lacking = self._views.unready(self._ready())
        return json_response({"ready": not lacking, "lacking": lacking}, 503 if lacking else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _topology(self, request: web.Request) -> web.Response:
        permissions = self._connections.permissions
        whole = permissions.allowed(request[PRINCIPAL], Verb.ADMINISTER, EVERYTHING)
        return json_response(self._views.topology(whole=whole))

    async def _transaction(self, request: web.Request) -> web.Response:
        try:
            return json_response(self._views.transaction(request.match_info["tx"]))
        except UnknownTransaction as error:
            return json_response({"error": str(error), "retry": error.retry.value}, 404)


def _view(show: Callable[[], object]) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return json_response(show())

    return handler
