"""Local transactions on their way through the rendezvous: announced, relayed, and ended alike at every subscriber."""

from collections.abc import Sequence
from operator import attrgetter

from tops.core.commit.outcomes import Outcomes
from tops.core.coordinator.event_coordinator import EventCoordinator
from tops.core.coordinator.known_types import KnownTypes, not_taken, unknown_type
from tops.core.coordinator.local_relay import LocalRelay
from tops.core.coordinator.open_transactions import OpenTransactions, RendezvousNode
from tops.core.coordinator.tx_coordinator import decided_within_s
from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode, over_limit
from tops.model.sizes import bundles
from tops.model.transactions import Outcome, TxState
from tops.protocol.effects import Disseminate, Effect, Persist, SetTimer
from tops.protocol.messages import (
    Address,
    CensusOpened,
    Event,
    LogEntry,
    RunOneShots,
    Sender,
    StaleJournal,
    TxOutcome,
    TxPublished,
    TxSpec,
)
from tops.protocol.records import LogAppended


class LocalTransactions:
    """The relays of one rendezvous."""

    def __init__(
        self, node: RendezvousNode, known: KnownTypes, transactions: OpenTransactions, outcomes: Outcomes
    ) -> None:
        self._node, self._known, self._open, self._outcomes = node, known, transactions, outcomes

    def on_announced(self, census: CensusOpened, sender: Sender, at: Address) -> list[Effect]:
        """A private transaction, whose initiator numbers its events."""
        tx = census.tx
        if self._outcomes.is_rejected(tx) or tx in self._open.relays:
            return []
        if (rejection := self._open.rejection(tx, census.spec, sender)) is not None:
            aborted = TxOutcome(tx=tx, outcome=Outcome.ABORTED, rejection=not_taken(rejection))
            return [rejection, *self._outcomes.settle(aborted, at)]
        self._open.publishers[tx] = (sender.node, sender.incarnation)
        return self.open(census, sender, at, None)

    def on_one_shots(self, m: RunOneShots, sender: Sender, at: Address) -> list[Effect]:
        """Announce, relay and commit at once: these transactions are never open. In a log as many as fit share an
        index."""
        effects: list[Effect] = []
        spec_rejection = self._known.spec_rejection(m.spec)
        fresh: dict[TxId, LocalRelay] = {}
        for one in m.transactions:
            if self._outcomes.is_rejected(one.tx):
                effects += self._outcomes.query(one.tx, at, alive=False)
            elif spec_rejection is not None:
                effects += self._outcomes.settle(
                    TxOutcome(tx=one.tx, outcome=Outcome.ABORTED, rejection=spec_rejection), at
                )
            elif one.tx not in fresh:
                relay = fresh[one.tx] = self._relay(one.tx, m.spec, sender, at, None)
                effects += self._announced(relay, one.events)
        return effects + self._committed(list(fresh.values())) if fresh else effects

    def _announced(self, relay: LocalRelay, events: Sequence[Event]) -> list[Effect]:
        """What subscribers receive of a one-shot before its end."""
        tx, spec, me, incarnation = relay.tx, relay.spec, self._node.me, self._node.incarnation
        census = CensusOpened(tx=tx, spec=spec, coordinator=me, incarnation=incarnation, initiator=relay.initiator)
        effects: list[Effect] = [Disseminate(census)]
        for sequence, event in enumerate(events, start=1):
            published = TxPublished(tx=tx, event_type=spec.event_type, sequence=sequence, event=event)
            relay.on_event(published)
            effects.append(Disseminate(published))
        return effects

    def open(
        self, census: CensusOpened, sender: Sender, at: Address, numbering: EventCoordinator | None
    ) -> list[Effect]:
        self._relay(census.tx, census.spec, sender, at, numbering)
        return [Disseminate(census), SetTimer(("deadline", census.tx), decided_within_s(census.spec))]

    def _relay(
        self, tx: TxId, spec: TxSpec, sender: Sender, at: Address, numbering: EventCoordinator | None
    ) -> LocalRelay:
        # Right after a restart a transaction may arrive before its type is advertised, and the type may be durable.
        keep_events = spec.event_type in self._known.logs_of or spec.event_type not in self._known.types
        relay = LocalRelay(tx, spec, sender, at, keep_events=keep_events, numbering=numbering)
        self._open.relays[tx] = relay
        return relay

    def on_event(self, relay: LocalRelay, published: TxPublished) -> list[Effect]:
        relay.on_event(published)
        if (rejection := relay.broken or over_limit(relay.size) or self._open.record_growth(relay)) is not None:
            return self.end(relay, Outcome.ABORTED, rejection)
        return [Disseminate(published)]

    def commit(self, relay: LocalRelay, last_sequence: int | None) -> list[Effect]:
        lacking = relay.lacking(last_sequence)
        if lacking is None and relay.spec.event_type not in self._known.types:
            lacking = unknown_type(relay.spec.event_type)  # it may be durable: without its log the commit would be lost
        if lacking is not None:
            return self.end(relay, Outcome.ABORTED, lacking)
        return self._committed([relay])

    def _committed(self, relays: Sequence[LocalRelay]) -> list[Effect]:
        """Commit complete transactions of one type; in a log they become as few entries as their sizes allow."""
        log = self._known.logs_of.get(relays[0].spec.event_type)
        if log is None:
            return [e for r in relays for e in (r.commit_order(), *self.end(r, Outcome.COMMITTED))]
        if log.stale is not None:
            rejection = Rejection(RejectionCode.JOURNAL_STALE, str(log.stale))
            return [e for r in relays for e in self.end(r, Outcome.ABORTED, rejection, log.stale)]
        if log.opening is not None:
            # No index may be assigned before the replicas have confirmed that this journal is the newest.
            log.opening.waiting.append(lambda: self._committed_later(relays))
            return []
        effects: list[Effect] = []
        for bundle in bundles(relays, attrgetter("size")):
            entry = LogEntry(number=log.reserve(), transactions=tuple([relay.logged() for relay in bundle]))
            log.fill(entry)
            # Persist first: a subscriber must not commit what a crash of this broker could still remove from the log.
            effects.append(Persist(LogAppended(event_type=log.event_type, entry=entry)))
            effects += [relay.commit_order() for relay in bundle]
            effects += self._ended_together(bundle, entry.number)
        return effects + log.pump_all()

    def _committed_later(self, relays: Sequence[LocalRelay]) -> list[Effect]:
        """The log has opened or is stale; some of these transactions may have ended meanwhile."""
        left = [relay for relay in relays if self._open.relays.get(relay.tx) is relay]
        return self._committed(left) if left else []

    def _ended_together(self, relays: Sequence[LocalRelay], number: int) -> list[Effect]:
        outcomes: list[tuple[TxOutcome, Address]] = []
        for relay in relays:
            self._close(relay, Outcome.COMMITTED)
            outcome = TxOutcome(tx=relay.tx, outcome=Outcome.COMMITTED, log_number=number)
            self._outcomes.remember(outcome)
            outcomes.append((outcome, relay.initiator))
        return self._outcomes.settle_commits(outcomes)

    def end(
        self,
        relay: LocalRelay,
        outcome: Outcome,
        rejection: Rejection | None = None,
        stale: StaleJournal | None = None,
    ) -> list[Effect]:
        """End the transaction, with a rejection if it aborts."""
        self._close(relay, outcome)
        ended = TxOutcome(tx=relay.tx, outcome=outcome, rejection=rejection, stale=stale)
        effects = self._outcomes.settle(ended, relay.initiator)
        if rejection is not None:
            effects.insert(0, relay.abandon_order(rejection))
        return effects

    def _close(self, relay: LocalRelay, outcome: Outcome) -> None:
        del self._open.relays[relay.tx]
        self._open.publishers.pop(relay.tx, None)
        if relay.numbering is not None:
            relay.numbering.close(TxState.COMMITTED if outcome is Outcome.COMMITTED else TxState.ABORTED)

    def on_publisher_lost(self, incarnation: tuple[NodeId, int], rejection: Rejection) -> list[Effect]:
        effects: list[Effect] = []
        for relay in list(self._open.relays.values()):
            if self._open.published_by(relay.tx, relay.numbering, incarnation):
                effects += self.end(relay, Outcome.ABORTED, rejection)
        return effects
