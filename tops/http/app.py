"""A broker's HTTP side, on the same port as its links: health, metrics, and views that change nothing."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tops.errors import TopsError
from tops.http.metrics import NodeCollector
from tops.http.openapi import document
from tops.http.views import Views
from tops.runtime.broker_node import BrokerNode
from tops.runtime.connections import Connections
from tops.runtime.retention import Retainer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_encoder = msgspec.json.Encoder(enc_hook=str)


def http_app(
    node: BrokerNode, connections: Connections, retainer: Retainer, ready: Callable[[], bool]
) -> web.Application:
    """The application that serves one broker."""
    views = Views(node, retainer)
    registry = CollectorRegistry()
    registry.register(NodeCollector(node, connections, retainer))

    async def healthz(_: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        lacking = views.unready(ready())
        return _json({"ready": not lacking, "lacking": lacking}, 503 if lacking else 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def openapi(_: web.Request) -> web.Response:
        return _json(document())

    def view(show: Callable[[], object]) -> Handler:
        async def handler(_: web.Request) -> web.StreamResponse:
            return _json(show())

        return handler

    async def transaction(request: web.Request) -> web.Response:
        return _json(views.transaction(request.match_info["tx"]))

    app = web.Application(middlewares=[_errors], client_max_size=2**20)
    app.router.add_get("/link", connections.accept)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/openapi.json", openapi)
    app.router.add_get("/v1/topology", view(views.topology))
    app.router.add_get("/v1/subscriptions", view(views.subscriptions))
    app.router.add_get("/v1/transactions", view(views.transactions))
    app.router.add_get("/v1/transactions/{tx}", transaction)
    app.router.add_get("/v1/journal", view(views.journal))
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A refusal is a 4xx with the same words as everywhere else."""
    try:
        return await handler(request)
    except TopsError as error:
        return _json({"error": str(error), "retry": error.retry.value}, 404 if "no transaction" in str(error) else 400)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")
