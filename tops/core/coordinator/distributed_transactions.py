"""Distributed transactions at their rendezvous, from the census to the submission to an epoch, and after its end."""

from collections.abc import Iterable

from tops.core.commit.ballot import ReadyTx
from tops.core.commit.census import Census, Member
from tops.core.commit.outcomes import Outcomes
from tops.core.coordinator.event_coordinator import EventCoordinator
from tops.core.coordinator.known_types import KnownTypes, not_taken
from tops.core.coordinator.open_transactions import OpenTransactions, RendezvousNode
from tops.core.coordinator.tx_coordinator import FOLLOWED, TxCoordinator
from tops.model.constraints import needs_identity
from tops.model.ids import NodeId, TxId, voter_key
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import encoded_bytes
from tops.model.transactions import LocalOutcome, Outcome, ScopeLimit, TxState
from tops.protocol.effects import Disseminate, Effect, Reject, SendTo
from tops.protocol.messages import (
    Address,
    BeginTx,
    CensusOpened,
    CensusReplied,
    LocalCommitOrdered,
    MembershipReported,
    OneShot,
    ParticipantAborted,
    RunOneShots,
    Sender,
    TxAbandoned,
    TxOpened,
    TxOutcome,
    TxPublished,
    TxSpec,
)

COMMITTING, FOLLOWS = TxState.COMMITTING, LocalOutcome.FOLLOWS  # read with every transaction


class DistributedTransactions:
    """The tx coordinators of one rendezvous."""

    def __init__(
        self, node: RendezvousNode, known: KnownTypes, transactions: OpenTransactions, outcomes: Outcomes
    ) -> None:
        self._node, self._known, self._open, self._outcomes = node, known, transactions, outcomes

    def on_begin(self, m: BeginTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        known = self._open.coordinators.get(m.tx)
        if known is not None:  # a repeated request: the response may have been lost
            opened = TxOpened(tx=m.tx, state=known.state, incarnation=known.incarnation)
            return [] if known.state is TxState.CENSUS else [SendTo(at, opened)]
        if self.holds(m.tx, m.spec.event_type):
            return []  # a late repetition: the transaction is decided, and its outcome is sent when the epoch ends
        if self._outcomes.is_rejected(m.tx):
            ended = Rejection(RejectionCode.NOT_TAKEN, "the transaction has ended already")
            return [SendTo(at, TxOpened(tx=m.tx, state=TxState.ABORTED, rejection=ended))]
        spec_rejection = self._known.spec_rejection(m.spec)
        if spec_rejection is not None:
            return [SendTo(at, TxOpened(tx=m.tx, state=TxState.ABORTED, rejection=spec_rejection))]
        if (rejection := self._open.rejection(m.tx, m.spec, sender)) is not None:
            return [rejection, SendTo(at, TxOpened(tx=m.tx, state=TxState.ABORTED, rejection=not_taken(rejection)))]
        coordinator = self.coordinator(m.tx, m.spec, sender, at)
        self._open.publishers[m.tx] = (sender.node, sender.incarnation)
        if m.own is not None:
            own = Member(voter_key(sender.identity, m.own), m.own, None, at, sender.incarnation, counts=False)
            coordinator.census.add_reply(own)
        return self.open(coordinator)

    def coordinator(
        self, tx: TxId, spec: TxSpec, sender: Sender, at: Address, numbering: EventCoordinator | None = None
    ) -> TxCoordinator:
        census = Census(tx, spec, self._node.predicates)
        keep_events = spec.event_type in self._known.logs_of
        coordinator = TxCoordinator(tx, spec, sender, at, census, keep_events, numbering)
        self._open.coordinators[tx] = coordinator
        return coordinator

    def open(self, coordinator: TxCoordinator) -> list[Effect]:
        standing = self._known.epochs_of(coordinator.spec).standing
        members = [standing.pseudonymous(m, coordinator.tx) for m in standing.voters(coordinator.spec).values()]
        return self._go_on(coordinator, coordinator.open(self._node.me, self._node.incarnation, members))

    def _go_on(self, coordinator: TxCoordinator, effects: list[Effect]) -> list[Effect]:
        """Continue a coordinator after one of its steps: end it if it failed, run a one-shot that has begun."""
        if coordinator.failed is not None:
            return effects + self._end_failed(coordinator)
        if coordinator.one_shot is not None and coordinator.state is TxState.ACTIVE and coordinator.numbering:
            for event in coordinator.one_shot:
                published = coordinator.numbering.admit(event)
                effects += [*coordinator.on_event(published), Disseminate(published)]
            return effects + self.commit(coordinator, None)
        return effects

    def on_one_shots(self, m: RunOneShots, sender: Sender, at: Address) -> list[Effect]:
        spec, effects = m.spec, list[Effect]()
        spec_rejection = self._known.spec_rejection(spec)
        ready: dict[TxId, ReadyTx] = {}
        epochs_in_use = self._known.epochs_if_known(spec.event_type)
        waiting = epochs_in_use.held.bytes_of(sender.accountable) if epochs_in_use is not None else 0
        for one in m.transactions:
            tx = one.tx
            alive = tx in self._open or (epochs_in_use is not None and epochs_in_use.holds(tx))
            # A repeated request must not run the transaction twice: it gets the outcome of the first one.
            if alive or self._outcomes.is_rejected(tx):
                effects += self._outcomes.query(tx, at, alive)
            elif spec_rejection is not None:
                effects += self._outcomes.settle(
                    TxOutcome(tx=tx, outcome=Outcome.ABORTED, rejection=spec_rejection), at
                )
            elif spec.census is not None:
                coordinator = self.coordinator(tx, spec, sender, at, EventCoordinator(tx, spec.event_type))
                coordinator.one_shot = one.events
                effects += self.open(coordinator)
            elif (rejected := self._beyond_quota(one, spec, sender, waiting)) is not None:
                rejection = not_taken(rejected)
                aborted = TxOutcome(tx=tx, outcome=Outcome.ABORTED, rejection=rejection)
                effects += [rejected, *self._outcomes.settle(aborted, at)]
            elif tx not in ready:
                size = encoded_bytes(one.events)
                waiting += size
                ready[tx] = ReadyTx(
                    tx, spec, at, len(one.events), one.events, one.events, who=sender.accountable, size=size
                )
        if not ready:
            return effects
        epochs = self._known.epochs_of(spec)
        if epochs.log is None:
            for r in ready.values():
                effects += self._announce_one_shot(OneShot(r.tx, r.logged_events), spec, at)
        return effects + epochs.submit(*ready.values())

    def _beyond_quota(self, one: OneShot, spec: TxSpec, sender: Sender, waiting: int) -> Reject | None:
        """The rejection of a transaction if the waiting ones of its identity reach the quota of bytes.

        All identities share one queue, so one of them must not fill it."""
        quota = self._node.options.quotas.waiting_bytes
        if waiting < quota:
            return None
        reason = f"the waiting transactions of {sender.accountable} exceed the quota of {quota} bytes: wait"
        return Reject(sender, "begin", spec.event_type, reason, f"tx {one.tx}", code="quota")

    def _announce_one_shot(self, one: OneShot, spec: TxSpec, at: Address) -> list[Effect]:
        """Local and non-transactional subscribers receive a one-shot as they receive any transaction."""
        if spec.limit is ScopeLimit.DISTRIBUTED:
            return []
        census = CensusOpened(
            tx=one.tx, spec=spec, coordinator=self._node.me, incarnation=self._node.incarnation, initiator=at
        )
        effects: list[Effect] = [Disseminate(census)]
        for sequence, event in enumerate(one.events, start=1):
            published = TxPublished(tx=one.tx, event_type=spec.event_type, sequence=sequence, event=event)
            effects.append(Disseminate(published))
        if spec.local_outcome is LocalOutcome.INDEPENDENT:
            order = LocalCommitOrdered(tx=one.tx, event_type=spec.event_type, last_sequence=len(one.events))
            effects.append(Disseminate(order))
        return effects

    def on_replied(self, m: CensusReplied, sender: Sender, at: Address, now: float) -> list[Effect]:
        coordinator = self._open.coordinators.get(m.tx)
        if coordinator is None:
            return [membership(m.tx, m.pseudonym, TxState.ABORTED, at)]
        if m.event_type != coordinator.spec.event_type:
            return []  # the broker at the edge checked the right to participate under the type that the message names
        problem = self._known.no_member(self._known.families.get(m.event_type, m.event_type), sender)
        if problem is not None:
            reason = f"{problem}: only its replicas take part in {m.event_type!r}"
            return [Reject(sender, "participate", m.event_type, reason, f"tx {m.tx}")]
        named = needs_identity(coordinator.spec.constraints)
        key, identity = voter_key(sender.identity, m.pseudonym), sender.identity if named else None
        member = Member(key, m.pseudonym, identity, at, sender.incarnation)
        return self._go_on(coordinator, coordinator.on_replied(member))

    def on_event(self, coordinator: TxCoordinator, published: TxPublished) -> list[Effect]:
        effects = coordinator.on_event(published)
        if coordinator.failed is None and (rejection := self._open.record_growth(coordinator)) is not None:
            effects += coordinator.abort(rejection)
        if coordinator.failed is not None and not coordinator.detached:
            return effects + self._end_failed(coordinator)
        return [*effects, Disseminate(published)]

    def commit(self, coordinator: TxCoordinator, last_sequence: int | None) -> list[Effect]:
        effects = coordinator.commit(last_sequence)
        if coordinator.state is COMMITTING:
            return effects + self._known.epochs_of(coordinator.spec).submit(coordinator.ready())
        if coordinator.failed is not None:
            return effects + self._end_failed(coordinator)
        return effects

    def settled(self, ready: ReadyTx, committed: bool) -> list[Effect]:
        """An epoch decided one of its members."""
        coordinator = self._open.coordinators.get(ready.tx)
        if coordinator is not None:
            del self._open.coordinators[ready.tx]
        self._open.publishers.pop(ready.tx, None)
        if coordinator is not None:
            return coordinator.settled(committed)
        follows = ready.spec.local_outcome is FOLLOWS and ready.spec.event_type not in self._known.logs_of
        if not follows or ready.spec.limit is ScopeLimit.DISTRIBUTED:
            return []
        order = LocalCommitOrdered(tx=ready.tx, event_type=ready.spec.event_type, last_sequence=ready.last_sequence)
        abandoned = TxAbandoned(tx=ready.tx, event_type=ready.spec.event_type, rejection=FOLLOWED)
        return [Disseminate(order if committed else abandoned)]

    def _end_failed(self, coordinator: TxCoordinator) -> list[Effect]:
        """A coordinator failed before its transaction was voted on."""
        outcome = TxOutcome(
            tx=coordinator.tx,
            outcome=Outcome.ABORTED,
            rejection=coordinator.failed,
            locals_wait=coordinator.detached,
        )
        if coordinator.detached:
            return [SendTo(coordinator.initiator, outcome)]
        del self._open.coordinators[coordinator.tx]
        self._open.publishers.pop(coordinator.tx, None)
        return self._outcomes.settle(outcome, coordinator.initiator)

    def abort(self, coordinator: TxCoordinator, rejection: Rejection, requester: Address | None) -> list[Effect]:
        """Abort unless the transaction is decided. The requester gets the outcome, which may be a commit."""
        tx = coordinator.tx
        if requester is not None and requester != coordinator.initiator:
            self._outcomes.requesters.setdefault(tx, []).append(requester)
        if coordinator.state is not TxState.COMMITTING:
            effects = coordinator.abort(rejection)
            return effects + self._end_failed(coordinator)
        epochs = self._known.epochs_of(coordinator.spec)
        if epochs.withdraw(tx):
            outcome = TxOutcome(tx=tx, outcome=Outcome.ABORTED, rejection=rejection)
            return self.settled(coordinator.ready(), False) + self._outcomes.settle(outcome, coordinator.initiator)
        epoch = epochs.voting(tx)
        if epoch is not None and len(epoch.members) == 1:
            return epochs.abort(tx, rejection)
        return []

    def on_participant_aborted(self, m: ParticipantAborted, sender: Sender, at: Address, now: float) -> list[Effect]:
        coordinator, key = self._open.coordinators.get(m.tx), voter_key(sender.identity, m.voter)
        member = coordinator.members.get(key) if coordinator is not None else None
        if coordinator is None or member is None or member.incarnation != sender.incarnation:
            return []
        if m.event_type != coordinator.spec.event_type:
            return []
        if coordinator.state is TxState.COMMITTING:
            return self._known.epochs_of(coordinator.spec).drop([key], m.reason)
        return self._go_on(coordinator, coordinator.on_participant_lost(key, m.reason))

    def on_census_over(self, tx: TxId) -> list[Effect]:
        """The time-out of the census has passed."""
        coordinator = self._open.coordinators.get(tx)
        return [] if coordinator is None else self._go_on(coordinator, coordinator.close_census())

    def on_lost(self, keys: Iterable[str], reason: str) -> list[Effect]:
        """Remove unreachable participants from the transactions that are not being voted on yet."""
        effects: list[Effect] = []
        for coordinator in list(self._open.coordinators.values()):
            for key in keys:
                if key in coordinator.members and coordinator.tx in self._open.coordinators:
                    effects += self._go_on(coordinator, coordinator.on_participant_lost(key, reason))
        return effects

    def on_publisher_lost(self, incarnation: tuple[NodeId, int], rejection: Rejection) -> list[Effect]:
        effects: list[Effect] = []
        for coordinator in list(self._open.coordinators.values()):
            # Aborting one transaction may start the next one of its type, which may end at once and be in this list.
            still_open = coordinator.tx in self._open.coordinators
            lost = self._open.published_by(coordinator.tx, coordinator.numbering, incarnation)
            if still_open and lost and coordinator.one_shot is None:
                effects += self.abort(coordinator, rejection, None)
        return effects

    def holds(self, tx: TxId, event_type: str) -> bool:
        """Whether the transaction is in progress here: its census, its events, its votes, or its end."""
        epochs = self._known.epochs_if_known(event_type)
        return tx in self._open or (epochs is not None and epochs.holds(tx))


def membership(tx: TxId, voter: str, state: TxState, to: Address) -> Effect:
    """The response to `GetMembership` for one participant."""
    return SendTo(to, MembershipReported(tx=tx, voter=voter, state=state))
