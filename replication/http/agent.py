"""An agent's own health, readiness and metrics: a listener without TLS, for probes and Prometheus, that serves no more.

To other machines it responds with yes or no and figures only: reasons may contain rows of the database. `tops rs
status` shows them, through the brokers, to an identity that has the right.
"""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from replication.replica.agent import Agent, complaint
from tops.http.gate import Gate, Report
from tops.http.names import Names
from tops.http.rights import HEALTH
from tops.model.errors import ConfigError
from tops.security import ConnectionBudget, KeyedBuckets, Permissions, is_loopback, split_address
from tops.server.listener import BoundedSite

REJECTIONS_PER_MINUTE = 30  # that are logged, of each address
# Nobody proves an identity here, so each connection is short: probes ask for one page.
CONNECTIONS_MAX = 128  # half of them from one address
CONNECTIONS_PER_S = 100.0  # from one address
REQUEST_S = 10.0  # from its first byte to the end of its response

log = logging.getLogger("tops.replication")

_GAUGES = {
    "position": "The last number of the log that is applied.",
    "lag_s": "Seconds since the replica was last caught up; 0 while it is.",
    "lag_transactions": "Numbers of the log that are not applied.",
    "lag_network": "Numbers of the log that have not arrived.",
    "lag_apply": "Numbers of the log that have arrived and are not applied.",
    "in_sync": "Whether the replica is in sync (1) or not (0).",
    "linked": "Whether the set's coordinator answers (1) or not (0).",
    "prepared": "Epochs that are prepared and not decided.",
    "unpublished": "Transactions committed here that are not in the log yet.",
    "quarantined": "Transactions that could not be applied and are set aside.",
    "divergent": "Whether this replica may differ from the others (1) or not (0).",
}
_REASONS = {
    "stopped": "Whether apply is stopped (1) or not (0).",
    "last_error": "Whether something comes to nothing and is tried again (1) or not (0).",
    "schema_drift": "Whether tables are defined differently on replicas of the set (1) or not (0).",
}


class AgentCollector:
    """An agent's figures, read when they are asked for."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.status: dict[str, Any] = {}

    def collect(self) -> list[Metric]:
        labels = {"replica_set": self._agent.config.name, "replica": self._agent.replica.name}
        families: list[Metric] = []
        for field, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"tops_replica_{field}", text, labels=list(labels))
            gauge.add_metric(list(labels.values()), float(self.status.get(field) or 0))
            families.append(gauge)
        for field, text in _REASONS.items():
            gauge = GaugeMetricFamily(f"tops_replica_{field}", text, labels=list(labels))
            gauge.add_metric(list(labels.values()), float(bool(self.status.get(field))))
            families.append(gauge)
        conflicts = CounterMetricFamily("tops_replica_conflicts", "Conflicts recorded.", labels=list(labels))
        conflicts.add_metric(list(labels.values()), float(self.status.get("conflicts", 0)))
        direct = CounterMetricFamily(
            "tops_replica_direct_writes", "Number of writes past replication that were noted.", labels=list(labels)
        )
        direct.add_metric(list(labels.values()), float(self.status.get("direct_writes", 0)))
        rejected = CounterMetricFamily(
            "tops_replica_requests_rejected",
            "Number of requests rejected because their sender lacks the right.",
            labels=[*labels, "verb"],
        )
        for verb, count in self._agent.guard.rejected.items():
            rejected.add_metric([*labels.values(), verb], float(count))
        over_quota = CounterMetricFamily(
            "tops_replica_over_quota",
            "Number of requests rejected because their sender has too many under way or asks for too much.",
            labels=[*labels, "request"],
        )
        for request, count in self._agent.guard.over_quota.items():
            over_quota.add_metric([*labels.values(), request], float(count))
        return [*families, conflicts, direct, rejected, over_quota]


@asynccontextmanager
async def serve_agent(agent: Agent) -> AsyncIterator[None]:
    """Serve the agent's own address, if it has one."""
    if agent.replica.listen is None:
        yield
        return
    rejected = _reporter(agent)
    runner = web.AppRunner(_agent_app(agent, rejected), access_log=None, handle_signals=False)
    await runner.setup()
    budget = ConnectionBudget(
        per_address=CONNECTIONS_MAX // 2, total=CONNECTIONS_MAX, per_second=CONNECTIONS_PER_S, wait_s=REQUEST_S
    )
    try:
        try:
            await BoundedSite(runner, split_address(agent.replica.listen), budget, rejected).start()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"replica {agent.replica.name!r} can't listen on {agent.replica.listen}: {error}"
            ) from None
        yield
    finally:
        await runner.cleanup()


def _reporter(agent: Agent) -> Report:
    """Rejections go to the log, a few per minute of each address."""
    rejections = KeyedBuckets(REJECTIONS_PER_MINUTE / 60, REJECTIONS_PER_MINUTE, keys_max=1024)

    def rejected(who: str, act: str, reason: str) -> None:
        if rejections.take(who, 1, time.monotonic()):
            log.warning("rejected", extra={"replica": agent.name, "who": who, "act": act, "reason": reason})

    return rejected


def _agent_app(agent: Agent, rejected: Report) -> web.Application:
    collector = AgentCollector(agent)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)

    def respond(request: web.Request, verdict: dict[str, Any], reasons: dict[str, Any], well: bool) -> web.Response:
        content = {**verdict, **reasons} if is_loopback(request.remote or "") else verdict
        return web.json_response(content, status=200 if well else 503)

    async def healthz(request: web.Request) -> web.Response:
        reason = complaint(await agent.status())
        return respond(request, {"healthy": not reason}, {"reason": reason}, not reason)

    async def readyz(request: web.Request) -> web.Response:
        status = await agent.status()
        try:
            bound = float(request.query.get("max_lag", "inf"))
        except ValueError:
            return web.json_response({"error": "max_lag is a number of seconds"}, status=400)
        ready = not complaint(status) and status["lag_s"] <= bound
        return respond(request, {"ready": ready}, status, ready)

    async def metrics(_: web.Request) -> web.Response:
        collector.status = await agent.status()
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    assert agent.replica.listen is not None, "an agent without an address has no application"
    routes = Gate(Names([agent.replica.listen]), Permissions(), (), rejected).routes(HEALTH)
    routes.add("GET", "/healthz", healthz)
    routes.add("GET", "/readyz", readyz)
    routes.add("GET", "/metrics", metrics)
    return routes.app
