"""An agent's own health, readiness and metrics: a listener without TLS, for probes and Prometheus, that serves no more.

To other machines it responds with yes or no and figures only: reasons may contain rows of the database. `tops rs
status` shows them, through the brokers, to an identity that has the right.
"""

import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
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

# The name of each metric, the field of the status that it shows, and its help text.
_GAUGES = (
    ("applied_index", "position", "Last index of the log that is applied."),
    ("lag_seconds", "lag_s", "Age of the replica's last moment at the end of the log in seconds; 0 while it is there."),
    ("lag_entries", "lag_transactions", "Number of log entries that are not applied."),
    ("lag_network_entries", "lag_network", "Number of log entries that have not arrived."),
    ("lag_apply_entries", "lag_apply", "Number of log entries that have arrived and are not applied."),
    ("in_sync", "in_sync", "Whether the replica is in sync (1) or not (0)."),
    ("coordinator_reachable", "linked", "Whether the coordinator of the set responds (1) or not (0)."),
    ("prepared_epochs", "prepared", "Number of epochs that are prepared and undecided."),
    ("unpublished_transactions", "unpublished", "Number of transactions committed here that are not in the log."),
    ("unpublished_seconds", "unpublished_s", "Age of the oldest transaction that is not in the log, in seconds."),
    ("quarantined_transactions", "quarantined", "Number of transactions that could not be applied and are kept."),
    ("divergent", "divergent", "Whether this replica may differ from the others (1) or not (0)."),
)
_REASONS = (
    ("stopped", "stopped", "Whether apply is stopped (1) or not (0)."),
    ("failing", "last_error", "Whether something fails and is tried again (1) or not (0)."),
    ("schema_drift", "schema_drift", "Whether tables are defined differently on replicas of the set (1) or not (0)."),
)
_COUNTERS = (
    ("conflicts", "conflicts", "Number of conflicts recorded."),
    ("direct_writes", "direct_writes", "Number of writes past replication that were noted."),
)
_LABELS = ("replica_set", "replica")


class AgentCollector:
    """An agent's metrics, read when they are asked for."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._labels = [agent.config.name, agent.replica.name]
        self.status: dict[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        for name, field, text in _GAUGES:
            yield self._gauge(name, text, float(self.status.get(field) or 0))
        for name, field, text in _REASONS:
            yield self._gauge(name, text, float(bool(self.status.get(field))))
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(f"tops_replica_{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, float(self.status.get(field) or 0))
            yield counter
        guard = self._agent.guard
        text = "Number of requests rejected because their sender lacks the right."
        yield self._by_label("requests_rejected", text, "verb", guard.rejected)
        text = "Number of requests rejected because their sender has too many under way or asks for too much."
        yield self._by_label("over_quota", text, "request", guard.over_quota)
        yield from self._writes()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"tops_replica_{name}", text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        counter = CounterMetricFamily(f"tops_replica_{name}", text, labels=[*_LABELS, label])
        for value, count in counts.items():
            counter.add_metric([*self._labels, value], float(count))
        return counter

    def _writes(self) -> Iterator[Metric]:
        """Those that this agent carries out; the coordinator of the set measures those that it decides."""
        meter, labels = self._agent.meter, [*self._labels, self._agent.config.policy]
        ended = CounterMetricFamily(
            "tops_replica_writes",
            "Number of writes that committed at this replica first or were executed here, by outcome and code.",
            labels=[*_LABELS, "policy", "outcome", "code"],
        )
        for (outcome, code), count in meter.ended.items():
            ended.add_metric([*labels, outcome, code], float(count))
        latency = HistogramMetricFamily(
            "tops_replica_write_latency_seconds",
            "Duration of the writes that committed at this replica first or were executed here, in seconds.",
            labels=[*_LABELS, "policy"],
        )
        latency.add_metric(labels, meter.latency.buckets(), meter.latency.sum_s)
        yield from (ended, latency)


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
