"""A broker's metrics for Prometheus, computed at each scrape: they cost nothing on the path of an event."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tops.core.commit.epochs import Stage
from tops.runtime.broker_node import BrokerNode
from tops.server.connections import Connections
from tops.server.retention import JournalSpace, Retainer

COUNTERS = {  # help texts of the node's counters, since the start of the process
    "rejected": "Number of messages and connections that were rejected.",
    "over_quota": "Number of messages that were rejected because of a quota.",
    "sender_mismatches": "Number of messages that were rejected because their content did not fit their sender.",
    "dropped": "Number of messages that were dropped because their neighbour was disconnected.",
    "slow_readers": "Number of sites that were disconnected because they read too slowly.",
    "followers_dropped": "Number of durable subscriptions that were dropped because too much was retained for them.",
    "alarms": "Number of alarms.",
    "decisions": "Number of commit decisions.",
    "resets": "Number of link sessions with brokers that were reset.",
}


class NodeCollector:
    """Collects the metrics of one broker."""

    def __init__(self, node: BrokerNode, connections: Connections, retainer: Retainer) -> None:
        self.node, self.connections, self.retainer = node, connections, retainer

    def collect(self) -> Iterator[Metric]:
        yield from self._links()
        yield from self._transactions()
        yield from self._journal()
        for name, value in self.node.counters.items():
            yield CounterMetricFamily(f"tops_{name}", COUNTERS[name], value=value)
        yield _gauge(
            "tops_backpressure", "Whether publishers have to wait (1) or not (0).", int(self.node.backpressure)
        )
        yield _gauge("tops_effects_waiting", "Number of effects that wait for the disk.", len(self.node.outbox))
        yield _gauge(
            "tops_connections_unauthenticated",
            "Number of connections that are not authenticated yet.",
            self.connections.budget.waiting,
        )

        if (keys := self.connections.own.keys) is not None:
            ends = keys.credentials.not_after.timestamp()
            yield _gauge(
                "tops_certificate_expiry_timestamp_seconds",
                "Time when this broker's certificate expires, in seconds since 1970.",
                ends,
            )

    def _links(self) -> Iterator[Metric]:
        sites = self.node.guards
        connected = GaugeMetricFamily("tops_links", "Number of connected links.", labels=["kind"])
        connected.add_metric(["site"], sum(self.node.links[s].connected for s in sites if s in self.node.links))
        connected.add_metric(["broker"], sum(link.connected for link in self.node.broker_links()))
        yield connected
        links = list(self.node.links.values())
        pending = sum(link.pending_bytes for link in links)
        yield _gauge("tops_queued_bytes", "Number of bytes that are queued or unacknowledged, for all links.", pending)
        neighbours = GaugeMetricFamily(
            "tops_link_up", "Whether a configured link is up (1) or not (0).", labels=["broker"]
        )
        for name in self.node.core.topology.neighbours[self.node.name]:
            link = self.node.links.get(name)
            neighbours.add_metric([name], int(link is not None and link.connected))
        yield neighbours
        received, sent = sum(x.received_messages for x in links), sum(x.sent_messages for x in links)
        yield _gauge("tops_messages_received", "Number of messages received on current links.", received)
        yield _gauge("tops_messages_sent", "Number of messages sent on current links.", sent)
        received, sent = sum(x.received_bytes for x in links), sum(x.sent_bytes for x in links)
        yield _gauge("tops_bytes_received", "Number of bytes received on current links.", received)
        yield _gauge("tops_bytes_sent", "Number of bytes sent on current links.", sent)
        count = sum(len(site.subscriptions) for site in self.node.core.edge.sites.values())
        yield _gauge("tops_subscriptions", "Number of subscriptions of connected sites.", count)

    def _transactions(self) -> Iterator[Metric]:
        rendezvous = self.node.core.rendezvous
        states = GaugeMetricFamily("tops_transactions", "Number of open transactions, by state.", labels=["state"])
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
        text = "Number of undecided transactions that a participant has prepared."
        yield _gauge("tops_transactions_in_doubt", text, doubt)
        unfinished = sum(len(x.decided) for x in rendezvous.epochs.values())
        text = "Number of decided epochs that not all participants have finished."
        yield _gauge("tops_epochs_unfinished", text, unfinished)
        last = GaugeMetricFamily("tops_log_last_number", "Last index of each log.", labels=["event_type"])
        lag = GaugeMetricFamily(
            "tops_subscription_lag",
            "Number of entries that a durable subscriber has not acknowledged.",
            labels=["event_type", "name"],
        )
        for name, log in rendezvous.logs.items():
            last.add_metric([name], log.last_number)
            for feed in log.subscribers:
                lag.add_metric([name, feed.key], log.last_number - feed.position)
        yield last
        yield lag

    def _journal(self) -> Iterator[Metric]:
        journal = self.node.store.journal
        statistics = journal.statistics
        yield _gauge("tops_journal_bytes", "Size of the journal on disk in bytes.", journal.size_bytes)
        yield _gauge("tops_journal_queued", "Number of records that wait for the writer.", journal.queued)
        yield CounterMetricFamily("tops_journal_records", "Number of written records.", value=statistics.records)
        yield CounterMetricFamily("tops_journal_fsyncs", "Number of syncs of the journal.", value=statistics.fsyncs)
        text = "Duration of the last sync in seconds."
        yield _gauge("tops_journal_last_fsync_seconds", text, statistics.last_fsync_s)
        yield _gauge(
            "tops_journal_full",
            "Whether the journal is over its size with nothing to truncate (1) or not (0).",
            int(self.retainer.space is JournalSpace.FULL),
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
