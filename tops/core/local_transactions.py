"""Local transactions on their way through the rendezvous: announced, relayed, and ended the same way for everybody."""

from tops.core.event_coordinator import EventCoordinator
from tops.core.known_types import KnownTypes
from tops.core.local_relay import LocalRelay
from tops.core.open_transactions import OpenTransactions, RendezvousNode
from tops.core.outcomes import Outcomes
from tops.core.tx_coordinator import decided_within_s
from tops.effects import Disseminate, Effect, Persist, SetTimer
from tops.ids import NodeId
from tops.messages import Address, CensusOpened, OneShot, RunOneShots, TxOutcome, TxPublished, TxSpec
from tops.records import LogAppended
from tops.transactions import Outcome, TxState


class LocalTransactions:
    """The relays of one rendezvous."""

    def __init__(
        self, node: RendezvousNode, known: KnownTypes, transactions: OpenTransactions, outcomes: Outcomes
    ) -> None:
        self._node, self._known, self._open, self._outcomes = node, known, transactions, outcomes

    def on_announced(self, census: CensusOpened, initiator: Address, incarnation: int) -> list[Effect]:
        """A private one, whose initiator numbers its events."""
        tx = census.tx
        if self._outcomes.is_refused(tx) or tx in self._open.relays:
            return []
        self._open.publishers[tx] = (NodeId(initiator.handle), incarnation)
        return self.open(census, initiator, None)

    def on_one_shots(self, m: RunOneShots, sender: Address) -> list[Effect]:
        effects: list[Effect] = []
        for one in m.transactions:
            effects += self._on_one_shot(one, m.spec, sender)
        return effects

    def _on_one_shot(self, one: OneShot, spec: TxSpec, sender: Address) -> list[Effect]:
        """Announced, relayed and committed at once: it is never open."""
        if self._outcomes.is_refused(one.tx):
            return self._outcomes.ask(one.tx, sender, alive=False)
        refusal = self._known.refusal(spec)
        if refusal is not None:
            return self._outcomes.settle(TxOutcome(tx=one.tx, outcome=Outcome.ABORTED, reason=refusal), sender)
        me, incarnation = self._node.me, self._node.incarnation
        census = CensusOpened(tx=one.tx, spec=spec, coordinator=me, incarnation=incarnation, initiator=sender)
        relay = self._relay(census, sender, None)
        effects: list[Effect] = [Disseminate(census)]
        for sequence, event in enumerate(one.events, start=1):
            published = TxPublished(tx=one.tx, event_type=spec.event_type, sequence=sequence, event=event)
            effects += self.on_event(relay, published)
        return effects + self.commit(relay, len(one.events))

    def open(self, census: CensusOpened, initiator: Address, numbering: EventCoordinator | None) -> list[Effect]:
        self._relay(census, initiator, numbering)
        return [Disseminate(census), SetTimer(("deadline", census.tx), decided_within_s(census.spec))]

    def _relay(self, census: CensusOpened, initiator: Address, numbering: EventCoordinator | None) -> LocalRelay:
        tx, spec = census.tx, census.spec
        # Right after a restart a transaction may come before its type, and that may turn out to be a durable one.
        keep_events = spec.event_type in self._known.logs_of or spec.event_type not in self._known.types
        relay = LocalRelay(tx, spec, initiator, keep_events=keep_events, numbering=numbering)
        self._open.relays[tx] = relay
        return relay

    def on_event(self, relay: LocalRelay, published: TxPublished) -> list[Effect]:
        relay.on_event(published)
        if relay.broken is not None:
            return self.end(relay, Outcome.ABORTED, relay.broken)
        return [Disseminate(published)]

    def commit(self, relay: LocalRelay, last_sequence: int | None) -> list[Effect]:
        lacking = relay.lacking(last_sequence)
        if lacking is not None:
            return self.end(relay, Outcome.ABORTED, lacking)
        log = self._known.logs_of.get(relay.spec.event_type)
        if log is None:
            return [relay.commit_order(), *self.end(relay, Outcome.COMMITTED, "")]
        entry = relay.entry(log.reserve())
        log.fill(entry)
        return [
            Persist(LogAppended(event_type=log.event_type, entry=entry)),
            relay.commit_order(),
            *self.end(relay, Outcome.COMMITTED, "", entry.number),
            *log.pump_all(),
        ]

    def end(self, relay: LocalRelay, outcome: Outcome, reason: str, log_number: int | None = None) -> list[Effect]:
        del self._open.relays[relay.tx]
        self._open.publishers.pop(relay.tx, None)
        if relay.numbering is not None:
            relay.numbering.close(TxState.COMMITTED if outcome is Outcome.COMMITTED else TxState.ABORTED)
        ended = TxOutcome(tx=relay.tx, outcome=outcome, reason=reason, log_number=log_number)
        effects = self._outcomes.settle(ended, relay.initiator)
        if outcome is Outcome.ABORTED:
            effects.insert(0, relay.abandon_order(reason))
        return effects

    def on_publisher_lost(self, life: tuple[NodeId, int], reason: str) -> list[Effect]:
        effects: list[Effect] = []
        for relay in list(self._open.relays.values()):
            if self._open.published_by(relay.tx, relay.numbering, life):
                effects += self.end(relay, Outcome.ABORTED, reason)
        return effects
