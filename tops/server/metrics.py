"""A broker's metrics for Prometheus, read when they are asked for: nothing is added to the path of an event."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tops.core.commit.epochs import Stage
from tops.model.event_types import set_of_log
from tops.runtime.broker_node import BrokerNode
from tops.runtime.tx_meter import TxMeter
from tops.server.connections import Connections
from tops.server.log_age import LogAges
from tops.server.retention import JournalSpace, Retainer

# The name and the help text of each counter of `BrokerNode.counters`.
COUNTERS: Final = {
    "rejected": ("tops_rejected_messages", "Number of messages of sites that were rejected."),
    "over_quota": ("tops_over_quota", "Number of messages that were rejected because of a quota."),
    "sender_mismatches": ("tops_sender_mismatches", "Number of messages whose content did not fit their sender."),
    "dropped": ("tops_dropped_messages", "Number of messages dropped because their receiver was disconnected."),
    "slow_readers": ("tops_slow_readers", "Number of sites disconnected because they read too slowly."),
    "followers_dropped": ("tops_followers_dropped", "Number of durable subscriptions dropped for their size."),
    "alarms": ("tops_alarms", "Number of alarms."),
    "decisions": ("tops_decisions", "Number of commits that were journaled; an epoch counts as one."),
    "resets": ("tops_link_resets", "Number of links to brokers that began a new session because of a failure."),
}
PolicyOf = Callable[[str], str]  # the policy of a replica set by the set's name; empty if it is not known


class NodeCollector:
    """Collects the metrics of one broker."""

    def __init__(
        self, node: BrokerNode, connections: Connections, retainer: Retainer, ages: LogAges, policy_of: PolicyOf
    ) -> None:
        self.node, self.connections, self.retainer = node, connections, retainer
        self._ages, self._policy_of = ages, policy_of

    def collect(self) -> Iterator[Metric]:
        yield from self._links()
        yield from self._transactions()
        yield from self._logs()
        yield from write_metrics(self.node.meter, self._policy_of)
        yield from self._journal()
        yield from self._ordering()
        for key, value in self.node.counters.items():
            name, text = COUNTERS[key]
            yield _counter(name, text, value)
        yield _gauge(
            "tops_backpressure", "Whether publishers have to wait (1) or not (0).", int(self.node.backpressure)
        )
        yield _gauge("tops_effects_waiting", "Number of effects that wait for the disk.", len(self.node.outbox))
        waiting = self.connections.budget.waiting
        yield _gauge("tops_connections_unauthenticated", "Number of connections in their handshake.", waiting)

        if (keys := self.connections.own.keys) is not None:
            ends = keys.credentials.not_after.timestamp()
            text = "Time at which this broker's certificate ends, in seconds since 1970."
            yield _gauge("tops_certificate_expiry_timestamp_seconds", text, ends)

    def _links(self) -> Iterator[Metric]:
        sites = self.node.guards
        connected = GaugeMetricFamily("tops_links", "Number of links that are connected.", labels=["kind"])
        connected.add_metric(["site"], sum(self.node.links[s].connected for s in sites if s in self.node.links))
        connected.add_metric(["broker"], sum(link.connected for link in self.node.broker_links()))
        yield connected
        held = sum(link.pending_bytes for link in self.node.links.values())
        yield _gauge("tops_queued_bytes", "Number of bytes held for neighbours.", held)
        neighbours = GaugeMetricFamily(
            "tops_link_up", "Whether a configured link is connected (1) or not (0).", labels=["broker"]
        )
        for name in self.node.core.topology.neighbours[self.node.name]:
            link = self.node.links.get(name)
            neighbours.add_metric([name], int(link is not None and link.connected))
        yield neighbours
        passed = self.node.traffic()
        yield _counter("tops_received_messages", "Number of messages received.", passed.received_messages)
        yield _counter("tops_sent_messages", "Number of messages sent.", passed.sent_messages)
        yield _counter("tops_received_bytes", "Number of bytes received.", passed.received_bytes)
        yield _counter("tops_sent_bytes", "Number of bytes sent.", passed.sent_bytes)
        count = sum(len(site.subscriptions) for site in self.node.core.edge.sites.values())
        yield _gauge("tops_subscriptions", "Number of subscriptions of the sites at this broker.", count)

    def _transactions(self) -> Iterator[Metric]:
        rendezvous = self.node.core.rendezvous
        states = GaugeMetricFamily("tops_transactions", "Number of transactions under way, by state.", labels=["state"])
        found: dict[str, int] = {"local": len(rendezvous.relays)}
        for coordinator in rendezvous.coordinators.values():
            found[coordinator.state.value] = found.get(coordinator.state.value, 0) + 1
        for epochs in rendezvous.epochs.values():
            found["queued"] = found.get("queued", 0) + len(epochs.queue)
        for state, number in sorted(found.items()):
            states.add_metric([state], number)
        yield states
        in_flight = [e for x in rendezvous.epochs.values() for e in x.in_flight.values()]
        doubt = sum(len(e.members) for e in in_flight if e.stage is Stage.VOTING and e.votes)
        yield _gauge(
            "tops_transactions_in_doubt", "Number of transactions that are prepared somewhere and undecided.", doubt
        )
        unfinished = sum(len(x.decided) for x in rendezvous.epochs.values())
        text = "Number of decided epochs that not every committing participant has confirmed."
        yield _gauge("tops_epochs_unfinished", text, unfinished)

    def _logs(self) -> Iterator[Metric]:
        last = GaugeMetricFamily("tops_log_last_index", "Last index of each log.", labels=["event_type"])
        labels = ["event_type", "name"]
        entries = GaugeMetricFamily(
            "tops_subscription_lag_entries",
            "Number of entries that a durable subscriber has not acknowledged.",
            labels=labels,
        )
        seconds = GaugeMetricFamily(
            "tops_subscription_lag_seconds",
            "Age of the oldest entry that a durable subscriber has not taken, in seconds.",
            labels=labels,
        )
        now = time.monotonic()
        for name, log in self.node.core.rendezvous.logs.items():
            last.add_metric([name], log.last_number)
            for feed in log.subscribers:
                entries.add_metric([name, feed.key], log.last_number - feed.position)
                seconds.add_metric([name, feed.key], self._ages.lag_s(name, feed.position, now))
        yield from (last, entries, seconds)

    def _ordering(self) -> Iterator[Metric]:
        pending = GaugeMetricFamily(
            "tops_ordering_pending_events",
            "Number of events that have an index and wait for their timestamp or an earlier event.",
            labels=["domain"],
        )
        subscribers = GaugeMetricFamily(
            "tops_ordering_subscriptions",
            "Number of subscriptions that the topic managers here know.",
            labels=["domain"],
        )
        hops = CounterMetricFamily(
            "tops_ordering_hops",
            "Number of partial timestamps that were passed on to another stage.",
            labels=["domain"],
        )
        for name, domain in sorted(self.node.core.ordering.domains.items()):
            if (managers := domain.managers) is not None:
                pending.add_metric([name], sum(map(len, managers.pending.values())))
                subscribers.add_metric([name], len(managers.groups.known))
                hops.add_metric([name], managers.hops)
        yield pending
        yield subscribers
        yield hops

    def _journal(self) -> Iterator[Metric]:
        journal = self.node.store.journal
        statistics = journal.statistics
        yield _gauge("tops_journal_bytes", "Size of the journal on disk in bytes.", journal.size_bytes)
        yield _gauge("tops_journal_queued_records", "Number of records that wait for the disk.", journal.queued)
        yield _counter("tops_journal_records", "Number of records written.", statistics.records)
        yield _counter("tops_journal_fsyncs", "Number of syncs of the journal.", statistics.fsyncs)
        last_s = statistics.last_fsync_s
        yield _gauge("tops_journal_last_fsync_seconds", "Duration of the last sync in seconds.", last_s)
        full = int(self.retainer.space is JournalSpace.FULL)
        yield _gauge("tops_journal_full", "Whether the journal is over its size and nothing can be dropped.", full)


def write_metrics(meter: TxMeter, policy_of: PolicyOf) -> Sequence[Metric]:
    """Writes of the replica sets whose log this broker coordinates. What a replica commits before it publishes counts
    as one when it is published; the agent's own metrics have each such write."""
    ended = CounterMetricFamily(
        "tops_coordinated_writes",
        "Number of transactions of a replica set that its coordinator has ended, by outcome and code of the rejection.",
        labels=["replica_set", "policy", "outcome", "code"],
    )
    latency = HistogramMetricFamily(
        "tops_coordinated_write_latency_seconds",
        "Duration from a write's arrival at the coordinator to its outcome, in seconds.",
        labels=["replica_set", "policy"],
    )
    policies: dict[str, str] = {}
    for family, histogram in meter.latency.items():
        if name := set_of_log(family):
            policies[name] = policy_of(name)
            latency.add_metric([name, policies[name]], histogram.buckets(), histogram.sum_s)
    for (family, outcome, code), count in meter.ended.items():
        if name := set_of_log(family):
            ended.add_metric([name, policies[name], outcome, code], count)
    return ended, latency


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
