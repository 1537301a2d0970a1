"""What a broker shows of itself: topology, subscriptions, transactions, journal; plain values, nothing is changed."""

from collections.abc import Iterator
from typing import Any

from tops.core.commit.epochs import Epoch, Stage
from tops.core.routing_tx.coordinator import State
from tops.model.errors import UnknownTransaction
from tops.model.ids import TxId, hashed_voter
from tops.model.rejections import sentence
from tops.runtime.broker_node import BrokerNode
from tops.server.retention import Retainer, Room


class Views:
    """The views of one broker."""

    def __init__(self, node: BrokerNode, retainer: Retainer) -> None:
        self.node, self.retainer = node, retainer

    def unready(self, started: bool) -> list[str]:
        """What is still missing for this broker to do its part; links to others are reported, not waited for."""
        lacking = [] if started else ["recovery"]
        if self.retainer.room is Room.FULL and self.node.refusing:
            lacking.append("room in the journal")
        return lacking

    def topology(self) -> dict[str, Any]:
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
            ],
            "alarms": [{"at": at, "kind": kind, "text": text} for at, kind, text in self.node.alarms],
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

    def transactions(self) -> list[dict[str, Any]]:
        """Those that this broker coordinates, those in doubt first."""
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
        if tx in outcomes.refused:
            return {"tx": tx, "state": "aborted", "reason": "refused", "in_doubt": False}
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
            "room": self.retainer.room.value,
            "logs": [
                {"event_type": name, "oldest": log.oldest, "last": log.last_number, "decided": log.decided_upto}
                for name, log in sorted(self.node.core.rendezvous.logs.items())
            ],
        }


def _shown(tx: TxId, event_type: str, tx_type: str, state: str) -> dict[str, Any]:
    return {"tx": tx, "event_type": event_type, "type": tx_type, "state": state, "in_doubt": False}


def _with_epoch(shown: dict[str, Any], epoch: Epoch | None) -> dict[str, Any]:
    if epoch is None:
        return shown
    missing = sorted(k for k in epoch.counted if k not in epoch.votes and k not in epoch.gone)
    return {
        **shown,
        "epoch": str(epoch.id),
        "stage": epoch.stage.value,
        "votes": len(epoch.votes),
        "missing": [epoch.voters[k].identity or hashed_voter(k) for k in missing],
        "in_doubt": epoch.stage is Stage.VOTING and bool(epoch.votes),
    }
