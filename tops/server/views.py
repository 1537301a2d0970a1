"""A broker's views for HTTP: topology, subscriptions, transactions, journal; plain values, read only."""

from collections.abc import Iterator
from typing import Any

from tops.core.commit.epochs import Epoch, Stage
from tops.core.ordering.broker import DomainAtBroker
from tops.core.routing_tx.coordinator import State
from tops.model.errors import UnknownTransaction
from tops.model.ids import TxId, hashed_voter
from tops.model.rejections import sentence
from tops.runtime.broker_node import BrokerNode
from tops.server.retention import JournalSpace, Retainer


class Views:
    """The views of one broker."""

    def __init__(self, node: BrokerNode, retainer: Retainer) -> None:
        self.node, self.retainer = node, retainer

    def unready(self, started: bool) -> list[str]:
        """What is missing until this broker is ready; links to other brokers are reported and not required."""
        lacking = [] if started else ["recovery"]
        if self.retainer.space is JournalSpace.FULL and self.node.rejecting:
            lacking.append("space in the journal")
        return lacking

    def topology(self, *, whole: bool) -> dict[str, Any]:
        """With `whole` also the sites that are connected, and the alarms: only administrators learn who is there."""
        core = self.node.core
        return {
            "broker": core.name,
            "cluster": self.node.cluster,
            "incarnation": core.incarnation,
            "brokers": [
                {"name": b, "url": url, "links": list(core.topology.neighbours[b])}
                for b, url in self.node.addresses.items()
            ],
            "links": [
                {
                    "peer": name,
                    "kind": "site" if name in self.node.guards else "broker",
                    "connected": link.connected,
                    "incarnation": link.incarnation,
                    "queued_bytes": link.pending_bytes,
                }
                for name, link in sorted(self.node.links.items())
                if whole or name not in self.node.guards
            ],
            "alarms": [{"at": at, "kind": kind, "text": text} for at, kind, text in self.node.alarms if whole],
        }

    def subscriptions(self) -> dict[str, Any]:
        rendezvous = self.node.core.rendezvous
        return {
            "sites": [
                {
                    "site": site.name,
                    "subscription": s.subscription,
                    "event_type": s.definitions[-1].name,
                    "filter": repr(s.filter),
                    "scope": None if s.scope is None else s.scope.name.lower(),
                    "durable": s.durable,
                }
                for site in self.node.core.edge.sites.values()
                for s in site.subscriptions.values()
            ],
            "durable": [
                {
                    "event_type": log.event_type,
                    "name": feed.key,
                    "position": feed.position,
                    "behind": log.last_number - feed.position,
                }
                for log in rendezvous.logs.values()
                for feed in log.subscribers
            ],
            "dropped": [
                {"event_type": log.event_type, "name": name, "position": position}
                for log in rendezvous.logs.values()
                for name, position in log.dropped.items()
            ],
        }

    def ordering(self) -> dict[str, Any]:
        """The ordering domains, and what waits at the topic managers of this broker."""
        return {"domains": [_domain(domain) for _, domain in sorted(self.node.core.ordering.domains.items())]}

    def transactions(self) -> list[dict[str, Any]]:
        """The transactions that this broker coordinates, those in doubt first."""
        return sorted(self._transactions(), key=lambda t: (not t["in_doubt"], t["tx"]))

    def _transactions(self) -> Iterator[dict[str, Any]]:
        rendezvous = self.node.core.rendezvous
        voting = {
            m.tx: epoch
            for epochs in rendezvous.epochs.values()
            for epoch in epochs.in_flight.values()
            for m in epoch.members
        }
        for coordinator in rendezvous.coordinators.values():
            shown = _shown(coordinator.tx, coordinator.spec.event_type, "distributed", coordinator.state.value)
            shown["members"] = len(coordinator.members)
            yield _with_epoch(shown, voting.pop(coordinator.tx, None))
        for relay in rendezvous.relays.values():
            yield _shown(relay.tx, relay.spec.event_type, "local", "active")
        for epochs in rendezvous.epochs.values():
            for ready in epochs.queue:
                if ready.tx not in rendezvous.coordinators:
                    yield _shown(ready.tx, ready.spec.event_type, "distributed", "queued")
            for epoch_id, decided in epochs.decided.items():
                for tx in decided.transactions:
                    shown = _shown(tx, epoch_id.event_type, "distributed", "committed")
                    yield {**shown, "epoch": str(epoch_id), "unfinished": sorted(map(hashed_voter, decided.committing))}
        routing = self.node.core.tree.coordinator
        for one in routing.open.values() if routing is not None else ():
            shown = _shown(one.tx, "", f"routing, {one.kind.value}", one.state.value)
            yield {**shown, "in_doubt": one.state is State.PREPARING}
        for tx, epoch in voting.items():
            yield _with_epoch(_shown(tx, epoch.id.event_type, "distributed", "committing"), epoch)

    def transaction(self, tx: str) -> dict[str, Any]:
        for shown in self._transactions():
            if shown["tx"] == tx:
                return shown
        outcomes = self.node.core.rendezvous.outcomes
        committed = outcomes.committed.get(TxId(tx))
        if committed is not None:
            return {"tx": tx, "state": "committed", "log_number": committed.log_number, "in_doubt": False}
        if tx in outcomes.aborted:
            return {"tx": tx, "state": "aborted", "reason": sentence(outcomes.aborted[TxId(tx)]), "in_doubt": False}
        if tx in outcomes.rejected:
            return {"tx": tx, "state": "aborted", "reason": "rejected", "in_doubt": False}
        coordinator = self.node.core.tree.coordinator
        if coordinator is not None and TxId(tx) in coordinator.committed:
            return {"tx": tx, "state": "committed", "in_doubt": False}
        if coordinator is not None and TxId(tx) in coordinator.aborted:
            return {"tx": tx, "state": "aborted", "reason": str(coordinator.aborted[TxId(tx)]), "in_doubt": False}
        raise UnknownTransaction(tx)

    def journal(self) -> dict[str, Any]:
        journal = self.node.store.journal
        found, done = journal.recovery, journal.statistics
        return {
            "first": journal.first_sequence,
            "next": journal.next_sequence,
            "durable": journal.durable_sequence,
            "bytes": journal.size_bytes,
            "queued": journal.queued,
            "fsyncs": done.fsyncs,
            "recovered_records": found.records,
            "torn_bytes": found.torn_bytes,
            "space": self.retainer.space.value,
            "logs": [
                {"event_type": name, "oldest": log.oldest, "last": log.last_number, "decided": log.decided_upto}
                for name, log in sorted(self.node.core.rendezvous.logs.items())
            ],
        }


def _domain(at: DomainAtBroker) -> dict[str, Any]:
    domain, managers = at.domain, at.managers
    shown: dict[str, Any] = {
        "name": domain.name,
        "order": domain.order.value,
        "durable": domain.durable,
        "stages": list(at.layout.stages),
        "unanswered": list(at.unanswered),  # brokers that do not know yet that this one has started
        "topics": [],
    }
    if managers is None:
        return shown
    for topic, numbered in managers.numbered.items():
        group = managers.groups.of(topic)
        shown["topics"].append(
            {
                "event_type": domain.types[topic],
                "numbered": numbered,
                "pending": len(managers.pending[topic]),
                "group": len(group.here) + len(group.lower) + len(group.higher),
            }
        )
    waiting = {broker: len(outgoing.waiting) for broker, outgoing in managers.outgoing.items()}
    return {**shown, "open": managers.is_open, "hops": managers.hops, "not_taken": waiting}


def _shown(tx: TxId, event_type: str, tx_type: str, state: str) -> dict[str, Any]:
    return {"tx": tx, "event_type": event_type, "type": tx_type, "state": state, "in_doubt": False}


def _with_epoch(shown: dict[str, Any], epoch: Epoch | None) -> dict[str, Any]:
    if epoch is None:
        return shown
    missing = sorted(k for k in epoch.counted if k not in epoch.votes and k not in epoch.lost)
    return {
        **shown,
        "epoch": str(epoch.id),
        "stage": epoch.stage.value,
        "votes": len(epoch.votes),
        "missing": [epoch.voters[k].identity or hashed_voter(k) for k in missing],
        "in_doubt": epoch.stage is Stage.VOTING and bool(epoch.votes),
    }
