"""A broker's figures for Prometheus, read when they are asked for: counting costs nothing on the path of an event."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tops.core.commit.epochs import Stage
from tops.runtime.broker_node import BrokerNode
from tops.server.connections import Connections
from tops.server.retention import Retainer, Room


class NodeCollector:
    """Collects the metrics of one broker."""

    def __init__(self, node: BrokerNode, connections: Connections, retainer: Retainer) -> None:
        self.node, self.connections, self.retainer = node, connections, retainer
        self._gone = {"received": 0, "sent": 0}

    def collect(self) -> Iterator[Metric]:
        yield from self._links()
        yield from self._transactions()
        yield from self._journal()
        yield from self._ordering()
        for name, value in self.node.counters.items():
            yield CounterMetricFamily(f"tops_{name}", f"Since the start: {name.replace('_', ' ')}.", value=value)
        yield _gauge("tops_pressed", "Whether publishers have to wait (1) or not (0).", int(self.node.pressed))
        yield _gauge("tops_effects_waiting", "Effects that wait for the disk.", len(self.node.outbox))
        yield _gauge("tops_connections_unauthenticated", "Connections in handshake.", self.connections.budget.waiting)

        if (keys := self.connections.own.keys) is not None:
            ends = keys.credentials.not_after.timestamp()
            yield _gauge("tops_certificate_expiry_timestamp_seconds", "When this broker's certificate ends.", ends)

    def _links(self) -> Iterator[Metric]:
        sites = self.node.guards
        connected = GaugeMetricFamily("tops_links", "Connected links.", labels=["kind"])
        connected.add_metric(["site"], sum(self.node.links[s].connected for s in sites if s in self.node.links))
        connected.add_metric(["broker"], sum(link.connected for link in self.node.broker_links()))
        yield connected
        links = list(self.node.links.values())
        yield _gauge("tops_queued_bytes", "Bytes held for neighbours.", sum(link.pending_bytes for link in links))
        neighbours = GaugeMetricFamily("tops_link_up", "Whether a configured link is up.", labels=["broker"])
        for name in self.node.core.topology.neighbours[self.node.name]:
            link = self.node.links.get(name)
            neighbours.add_metric([name], int(link is not None and link.connected))
        yield neighbours
        yield _gauge("tops_messages_received", "Messages from present links.", sum(x.received_messages for x in links))
        yield _gauge("tops_messages_sent", "Messages to present links.", sum(x.sent_messages for x in links))
        yield _gauge("tops_bytes_received", "Bytes from present links.", sum(x.received_bytes for x in links))
        yield _gauge("tops_bytes_sent", "Bytes to present links.", sum(x.sent_bytes for x in links))
        count = sum(len(site.subscriptions) for site in self.node.core.edge.sites.values())
        yield _gauge("tops_subscriptions", "Subscriptions of the sites here.", count)

    def _transactions(self) -> Iterator[Metric]:
        rendezvous = self.node.core.rendezvous
        states = GaugeMetricFamily("tops_transactions", "Transactions under way, by state.", labels=["state"])
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
        yield _gauge("tops_transactions_in_doubt", "Transactions that somebody has promised, undecided.", doubt)
        unfinished = sum(len(x.decided) for x in rendezvous.epochs.values())
        yield _gauge("tops_epochs_unfinished", "Decided epochs that not everybody has confirmed.", unfinished)
        last = GaugeMetricFamily("tops_log_last_number", "The last number of each log.", labels=["event_type"])
        lag = GaugeMetricFamily(
            "tops_subscription_lag", "Entries that a durable subscriber has not taken.", labels=["event_type", "name"]
        )
        for name, log in rendezvous.logs.items():
            last.add_metric([name], log.last_number)
            for feed in log.subscribers:
                lag.add_metric([name, feed.key], log.last_number - feed.position)
        yield last
        yield lag

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
        yield _gauge("tops_journal_bytes", "Size of the journal on disk.", journal.size_bytes)
        yield _gauge("tops_journal_queued", "Records that wait for the writer.", journal.queued)
        yield CounterMetricFamily("tops_journal_records", "Records written.", value=statistics.records)
        yield CounterMetricFamily("tops_journal_fsyncs", "Syncs.", value=statistics.fsyncs)
        yield _gauge("tops_journal_last_fsync_seconds", "How long the last sync took.", statistics.last_fsync_s)
        yield _gauge("tops_journal_full", "Over its size with nothing to drop.", int(self.retainer.room is Room.FULL))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
