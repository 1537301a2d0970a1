"""What a broker does for the event types whose rendezvous it is: number, log, coordinate, remember.

It owns one `EpochCoordinator` per type, the tx coordinators of distributed transactions, the relays of local ones and
the outcomes. It answers letters and looks at publications on their way through; it knows nothing of links.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tops.constraints import Predicate, check_consistent
from tops.core.ballot import ReadyTx
from tops.core.census import Member
from tops.core.epochs import QUESTION, EpochCoordinator, EpochOptions
from tops.core.event_coordinator import EventCoordinator
from tops.core.event_log import EventLog, Feed, Repetition, is_start
from tops.core.local_relay import LocalRelay
from tops.core.outcomes import Outcomes
from tops.core.standing import StandingAnswers
from tops.core.tx_coordinator import TxCoordinator, decided_within_s
from tops.effects import Alarm, Disseminate, Effect, Note, Persist, Post, SetTimer
from tops.errors import InvalidEventType, InvalidTransaction, InvariantBroken, TransactionClosed
from tops.event_types import EventType, EventTypes
from tops.filters import Filter
from tops.ids import NodeId, TxId, tx_id
from tops.messages import (
    AbortTx,
    Address,
    AskEpoch,
    AskLog,
    AskMembership,
    AskOutcome,
    BeginPublic,
    BeginTx,
    CensusOpened,
    CensusReplied,
    CommitTx,
    Definitions,
    EpochFinished,
    EpochVoted,
    Event,
    EventConfirmed,
    EventsPublished,
    Follower,
    LocalCommitOrdered,
    LogEntry,
    LogTold,
    LogWanted,
    MembershipAnswered,
    ParticipantAborted,
    ParticipantLost,
    Publication,
    Published,
    PublisherDone,
    PublisherLost,
    PublishInTx,
    PublishInTxAnswered,
    RouteAsked,
    RouteStands,
    RunOneShot,
    StandingAccepted,
    StandingAnswered,
    StandingWithdrawn,
    TxAbandoned,
    TxOpened,
    TxOutcome,
    TxPublished,
    TxSpec,
    TypeAdvertised,
    TypeAnswered,
    decode_body,
)
from tops.records import (
    AnyRecord,
    EpochCommitted,
    FinishesNoted,
    InSyncChanged,
    LogAppended,
    OutcomesForgotten,
    Started,
    SubscriptionKept,
    TxRefused,
    TypeDefined,
)
from tops.transactions import (
    LocalOutcome,
    Outcome,
    Scope,
    ScopeLimit,
    TxState,
    TxType,
    check_limit,
)

UNKNOWN_TYPE = "the coordinator does not know event type {!r}: advertise it first"


class RendezvousOptions(msgspec.Struct, frozen=True):
    epochs: EpochOptions = EpochOptions()
    lease_s: float = 5.0  # a standing answer that is not renewed for so long is withdrawn
    keep_outcomes: int = 100_000
    log_tail: int = 4096


class Rendezvous:
    """The coordinator's side of all event types that meet at this broker."""

    def __init__(
        self, me: NodeId, incarnation: int, predicates: Mapping[str, Predicate], options: RendezvousOptions
    ) -> None:
        self.me, self.incarnation, self.predicates, self.options = me, incarnation, predicates, options
        self.types = EventTypes()
        self.outcomes = Outcomes(options.keep_outcomes)
        self.coordinators: dict[TxId, TxCoordinator] = {}
        self.relays: dict[TxId, LocalRelay] = {}
        self.families: dict[str, str] = {}  # type -> its oldest ancestor
        self.epochs: dict[str, EpochCoordinator] = {}  # per family
        self.logs: dict[str, EventLog] = {}  # per durable family
        self.logs_of: dict[str, EventLog] = {}  # the same by each type's own name
        self.publishers: dict[TxId, tuple[NodeId, int]] = {}  # whose death ends a private transaction
        self.counter = 0
        self.public_requests: OrderedDict[tuple[str, int, int], TxId] = OrderedDict()
        self.letters: dict[type, Callable[[Any, Address, int, float], list[Effect]]] = {
            TypeAdvertised: self._advertised,
            BeginTx: self._begin,
            BeginPublic: self._begin_public,
            RunOneShot: self._run_one_shot,
            CensusReplied: self._replied,
            StandingAnswered: self._standing_answered,
            StandingWithdrawn: self._standing_withdrawn,
            PublishInTx: self._publish_in_tx,
            PublisherDone: self._publisher_done,
            CommitTx: self._commit,
            AbortTx: self._abort,
            ParticipantAborted: self._participant_aborted,
            ParticipantLost: self._participant_lost,
            PublisherLost: self._publisher_lost,
            EpochVoted: self._voted,
            EpochFinished: self._finished,
            AskEpoch: self._ask_epoch,
            AskMembership: self._ask_membership,
            AskOutcome: self._ask_outcome,
            LogWanted: self._log_wanted,
            AskLog: self._ask_log,
            RouteAsked: self._route_asked,
        }

    def on_letter(self, letter: object, sender: Address, incarnation: int, now: float) -> list[Effect]:
        """A letter that is addressed to this broker as a rendezvous."""
        handler = self.letters.get(type(letter))
        return handler(letter, sender, incarnation, now) if handler is not None else []

    # ------------------------------------------------------------------------------------------------- event types

    def _advertised(self, m: TypeAdvertised, sender: Address, incarnation: int, now: float) -> list[Effect]:
        name = m.definitions[-1].name
        try:
            effects = self._define(m.definitions)
        except InvalidEventType as refusal:
            return [Post(sender, TypeAnswered(event_type=name, refusal=str(refusal)))]
        return [*effects, Post(sender, TypeAnswered(event_type=name))]

    def _define(self, definitions: Definitions) -> list[Effect]:
        """Take a type and its ancestors, for good."""
        effects: list[Effect] = []
        for definition in definitions:
            new = definition.name not in self.types
            if new and definition.durable and definition.parent is not None and definition.parent not in self.logs_of:
                raise InvalidEventType(f"durable event type {definition.name!r} needs a durable parent")
            whole = self.types.define(definition)
            if new:
                self._know(whole)
                effects.append(Persist(TypeDefined(event_type=definition)))
        return effects

    def _know(self, whole: EventType) -> None:
        family = self.types.family(whole.name)
        self.families[whole.name] = family
        self._epochs_of(family, whole.durable)
        log = self.logs.get(family)
        if log is not None:
            self.logs_of[whole.name] = log

    def _epochs_of(self, family: str, durable: bool) -> EpochCoordinator:
        epochs = self.epochs.get(family)
        if epochs is None:
            log = None
            if durable:
                log = EventLog(family, self.incarnation, self.types.lineage, self.options.log_tail)
                self.logs[family] = log
            epochs = self.epochs[family] = EpochCoordinator(
                family,
                self.me,
                self.incarnation,
                StandingAnswers(self.options.lease_s, self.types.lineage),
                log,
                self.outcomes,
                self.predicates,
                self.options.epochs,
                self._settled,
            )
        return epochs

    # ------------------------------------------------------------------------------------------ publications passing by

    def on_publication(
        self, publication: Publication, publisher: Address, incarnation: int, now: float
    ) -> list[Effect]:
        """A publication that a site sent up the tree; what is to go down again is among the effects."""
        match publication:
            case Published():
                return self._published(publication, publisher)
            case EventsPublished():
                return self._published_together(publication, publisher)
            case CensusOpened(tx=tx, spec=spec):
                return self._announced(tx, spec, publisher, incarnation, publication)
            case TxPublished():
                return self._event(publication)
        return []

    def _published(self, published: Published, publisher: Address) -> list[Effect]:
        log = self.logs_of.get(published.event.type)
        if log is None:
            return [Disseminate(published)]
        seen = log.recognise(published.origin)
        if seen is Repetition.REPEATED:
            return [Post(publisher, EventConfirmed(origin=published.origin))]
        if seen is Repetition.OUT_OF_TURN:
            return []
        entry = LogEntry(number=log.reserve(), event=published.event, origin=published.origin)
        log.fill(entry)
        return [
            Persist(LogAppended(event_type=log.event_type, entry=entry)),
            Post(publisher, _confirmed(log, entry)),
            Disseminate(published),
            *log.pump_all(),
        ]

    def _published_together(self, published: EventsPublished, publisher: Address) -> list[Effect]:
        """Each event gets its own number and record; all of them are confirmed at once."""
        log = self.logs_of.get(published.event_type)
        if log is None:
            return [Disseminate(published)]
        last = published.origin
        bodies = [body for encoded in published.bodies if (body := decode_body(encoded)) is not None]
        if not bodies or len(bodies) < len(published.bodies) or last.number < len(bodies):
            return []
        origins = [msgspec.structs.replace(last, number=last.number - n) for n in range(len(bodies) - 1, -1, -1)]
        if log.recognise(origins[0]) is not Repetition.NEW:
            single = [
                Published(event=Event(published.event_type, body), origin=origin)
                for body, origin in zip(bodies, origins, strict=True)
            ]
            return [effect for each in single for effect in self._published(each, publisher)]
        effects: list[Effect] = []
        for body, origin in zip(bodies, origins, strict=True):
            entry = LogEntry(number=log.reserve(), event=Event(published.event_type, body), origin=origin)
            log.fill(entry)
            effects.append(Persist(LogAppended(event_type=log.event_type, entry=entry)))
        confirmed = EventConfirmed(origin=last, log_number=log.last_number, count=len(bodies))
        return [*effects, Post(publisher, confirmed), Disseminate(published), *log.pump_all()]

    def _event(self, published: TxPublished) -> list[Effect]:
        relay = self.relays.get(published.tx)
        if relay is not None:
            relay.on_event(published)
            if relay.broken is not None:
                return self._end_relay(relay, Outcome.ABORTED, relay.broken)
            return [Disseminate(published)]
        coordinator = self.coordinators.get(published.tx)
        if coordinator is None:
            return []
        effects = coordinator.on_event(published)
        if coordinator.failed is not None and not coordinator.detached:
            return effects + self._end(coordinator)
        return [*effects, Disseminate(published)]

    # ------------------------------------------------------------------------------------------- local transactions

    def _announced(
        self, tx: TxId, spec: TxSpec, initiator: Address, incarnation: int, census: CensusOpened
    ) -> list[Effect]:
        if self.outcomes.is_refused(tx) or tx in self.relays:
            return []
        self.relays[tx] = LocalRelay(tx, spec, initiator, keep_events=spec.event_type in self.logs_of, numbering=None)
        self.publishers[tx] = (NodeId(initiator.handle), incarnation)
        return [Disseminate(census), SetTimer(("deadline", tx), decided_within_s(spec))]

    def _commit_local(self, tx: TxId, last_sequence: int | None, publisher: Address) -> list[Effect]:
        relay = self.relays[tx]
        lacking = relay.lacking(last_sequence)
        if lacking is not None:
            return self._end_relay(relay, Outcome.ABORTED, lacking)
        log = self.logs_of.get(relay.spec.event_type)
        if log is None:
            return [relay.commit_order(), *self._end_relay(relay, Outcome.COMMITTED, "")]
        entry = relay.entry(log.reserve())
        log.fill(entry)
        return [
            Persist(LogAppended(event_type=log.event_type, entry=entry)),
            relay.commit_order(),
            *self._end_relay(relay, Outcome.COMMITTED, "", entry.number),
            *log.pump_all(),
        ]

    def _end_relay(
        self, relay: LocalRelay, outcome: Outcome, reason: str, log_number: int | None = None
    ) -> list[Effect]:
        del self.relays[relay.tx]
        self.publishers.pop(relay.tx, None)
        if relay.numbering is not None:
            relay.numbering.close(TxState.COMMITTED if outcome is Outcome.COMMITTED else TxState.ABORTED)
        ended = TxOutcome(tx=relay.tx, outcome=outcome, reason=reason, log_number=log_number)
        effects = self.outcomes.settle(ended, relay.initiator)
        if outcome is Outcome.ABORTED:
            effects.insert(0, relay.abandon_order(reason))
        return effects

    # ------------------------------------------------------------------------------------ distributed: opening

    def _refusal(self, spec: TxSpec) -> str | None:
        """Why the coordinator does not take this transaction, or None."""
        if spec.event_type not in self.types:
            return UNKNOWN_TYPE.format(spec.event_type)
        independent = spec.local_outcome is LocalOutcome.INDEPENDENT and spec.limit is not ScopeLimit.DISTRIBUTED
        if spec.event_type in self.logs_of and spec.tx_type is TxType.DISTRIBUTED and independent:
            return "on a durable type local subscribers go by the log: use local_outcome 'follows'"
        try:
            check_limit(spec.tx_type, spec.limit, spec.local_outcome)
            check_consistent(spec.constraints, spec.tx_type)
        except InvalidTransaction as error:
            return str(error)
        return None

    def _epochs(self, spec: TxSpec) -> EpochCoordinator:
        return self.epochs[self.families[spec.event_type]]

    def _begin(self, m: BeginTx, sender: Address, incarnation: int, now: float) -> list[Effect]:
        known = self.coordinators.get(m.tx)
        if known is not None:  # asked again: the answer may have been lost
            return [] if known.state is TxState.CENSUS else [Post(sender, TxOpened(tx=m.tx, state=known.state))]
        if self.outcomes.is_refused(m.tx):
            return [Post(sender, TxOpened(tx=m.tx, state=TxState.ABORTED, reason="it ended already"))]
        refusal = self._refusal(m.spec)
        if refusal is not None:
            return [Post(sender, TxOpened(tx=m.tx, state=TxState.ABORTED, reason=refusal))]
        coordinator = self._coordinator(m.tx, m.spec, sender)
        self.publishers[m.tx] = (NodeId(sender.handle), incarnation)
        if m.own is not None:
            address = Address(sender.broker, m.own, incarnation)
            own = Member(m.own, m.own, None, address, incarnation, counts=False)
            coordinator.census.answer(own)
        return self._open(coordinator)

    def _coordinator(
        self, tx: TxId, spec: TxSpec, initiator: Address, numbering: EventCoordinator | None = None
    ) -> TxCoordinator:
        coordinator = self.coordinators[tx] = TxCoordinator(
            tx,
            spec,
            initiator,
            keep_events=spec.event_type in self.logs_of,
            predicates=self.predicates,
            numbering=numbering,
        )
        return coordinator

    def _open(self, coordinator: TxCoordinator) -> list[Effect]:
        standing = self._epochs(coordinator.spec).standing
        members = [standing.pseudonymous(m, coordinator.tx) for m in standing.voters(coordinator.spec).values()]
        return self._step(coordinator, coordinator.open(self.me, self.incarnation, members))

    def _step(self, coordinator: TxCoordinator, effects: list[Effect]) -> list[Effect]:
        """Go on with a coordinator after one of its steps: end it if it failed, run a one-shot that has begun."""
        if coordinator.failed is not None:
            return effects + self._end(coordinator)
        if coordinator.one_shot is not None and coordinator.state is TxState.ACTIVE and coordinator.numbering:
            for event in coordinator.one_shot:
                published = coordinator.numbering.admit(event)
                effects += [*coordinator.on_event(published), Disseminate(published)]
            return effects + self._request_commit(coordinator, None)
        return effects

    def _begin_public(self, m: BeginPublic, sender: Address, incarnation: int, now: float) -> list[Effect]:
        refusal = self._refusal(m.spec)
        if refusal is not None:
            return [Post(sender, TxOpened(tx=TxId(""), state=TxState.ABORTED, reason=refusal, request=m.request))]
        asked = (sender.handle, incarnation, m.request)
        if asked in self.public_requests:  # the answer was lost, or is on its way
            return self._public_again(self.public_requests[asked], m.request, sender)
        self.counter += 1
        tx = self.public_requests[asked] = tx_id(self.me, self.incarnation, self.counter)
        if len(self.public_requests) > self.options.keep_outcomes:
            self.public_requests.popitem(last=False)
        numbering = EventCoordinator(tx, m.spec.event_type)
        # The initiator learns the id first; what becomes of the census follows under that id.
        learn: Effect = Post(sender, TxOpened(tx=tx, state=TxState.CENSUS, request=m.request))
        self.publishers[tx] = (NodeId(sender.handle), incarnation)
        if m.spec.tx_type is TxType.DISTRIBUTED:
            return [learn, *self._open(self._coordinator(tx, m.spec, sender, numbering))]
        numbering.open()
        self.relays[tx] = LocalRelay(
            tx, m.spec, sender, keep_events=m.spec.event_type in self.logs_of, numbering=numbering
        )
        census = CensusOpened(tx=tx, spec=m.spec, coordinator=self.me, incarnation=self.incarnation, initiator=sender)
        opened = TxOpened(tx=tx, state=TxState.ACTIVE)
        return [learn, Disseminate(census), SetTimer(("deadline", tx), decided_within_s(m.spec)), Post(sender, opened)]

    def _public_again(self, tx: TxId, request: int, sender: Address) -> list[Effect]:
        learn = Post(sender, TxOpened(tx=tx, state=TxState.CENSUS, request=request))
        owner = self.coordinators.get(tx) or self.relays.get(tx)
        if owner is None:
            return [learn, *self.outcomes.ask(tx, sender, alive=False)]
        active = isinstance(owner, LocalRelay) or owner.state is not TxState.CENSUS
        return [learn, *([Post(sender, TxOpened(tx=tx, state=TxState.ACTIVE))] if active else [])]

    def _run_one_shot(self, m: RunOneShot, sender: Address, incarnation: int, now: float) -> list[Effect]:
        alive = self._alive(m.tx, m.spec.event_type)
        if alive or self.outcomes.is_refused(m.tx):
            return self.outcomes.ask(m.tx, sender, alive)
        refusal = self._refusal(m.spec)
        if refusal is not None:
            outcome = TxOutcome(tx=m.tx, outcome=Outcome.ABORTED, reason=refusal)
            return self.outcomes.settle(outcome, sender)
        epochs = self._epochs(m.spec)
        if epochs.holds(m.tx):
            return []  # said twice
        if m.spec.census is not None:
            numbering = EventCoordinator(m.tx, m.spec.event_type)
            coordinator = self._coordinator(m.tx, m.spec, sender, numbering)
            coordinator.one_shot = m.events
            return self._open(coordinator)
        ready = ReadyTx(m.tx, m.spec, sender, len(m.events), m.events, m.events)
        effects: list[Effect] = []
        if epochs.log is None:
            effects += self._announce_one_shot(m, sender)
        return effects + epochs.submit(ready)

    def _announce_one_shot(self, m: RunOneShot, sender: Address) -> list[Effect]:
        """Local and non-transactional subscribers take a one-shot as they take any transaction."""
        if m.spec.limit is ScopeLimit.DISTRIBUTED:
            return []
        census = CensusOpened(tx=m.tx, spec=m.spec, coordinator=self.me, incarnation=self.incarnation, initiator=sender)
        effects: list[Effect] = [Disseminate(census)]
        for sequence, event in enumerate(m.events, start=1):
            published = TxPublished(tx=m.tx, event_type=m.spec.event_type, sequence=sequence, event=event)
            effects.append(Disseminate(published))
        if m.spec.local_outcome is LocalOutcome.INDEPENDENT:
            order = LocalCommitOrdered(tx=m.tx, event_type=m.spec.event_type, last_sequence=len(m.events))
            effects.append(Disseminate(order))
        return effects

    # ---------------------------------------------------------------------------------- distributed: census, events

    def _replied(self, m: CensusReplied, sender: Address, incarnation: int, now: float) -> list[Effect]:
        coordinator = self.coordinators.get(m.tx)
        if coordinator is None:
            return [_membership(m.tx, m.pseudonym, TxState.ABORTED, sender)]
        member = Member(m.pseudonym, m.pseudonym, m.identity, sender, incarnation)
        return self._step(coordinator, coordinator.on_replied(member))

    def _publish_in_tx(self, m: PublishInTx, sender: Address, incarnation: int, now: float) -> list[Effect]:
        owner = self.coordinators.get(m.tx) or self.relays.get(m.tx)
        numbering = owner.numbering if owner is not None else None
        if numbering is None:
            answer = PublishInTxAnswered(tx=m.tx, request=m.request, sequence=None, state=TxState.ABORTED)
            return [Post(sender, answer)]
        publisher = (NodeId(sender.handle), incarnation)
        known = numbering.admitted.get((*publisher, m.request))
        if known is not None:  # asked again: the answer may have been lost
            return [
                Post(sender, PublishInTxAnswered(tx=m.tx, request=m.request, sequence=known, state=numbering.state))
            ]
        try:
            new = publisher not in numbering.publishing
            published = numbering.admit(m.event, publisher, m.request)
        except TransactionClosed:
            answer = PublishInTxAnswered(tx=m.tx, request=m.request, sequence=None, state=numbering.state)
            return [Post(sender, answer)]
        answer = PublishInTxAnswered(tx=m.tx, request=m.request, sequence=published.sequence, state=numbering.state)
        if new and owner is not None and sender != owner.initiator:
            self.outcomes.askers.setdefault(m.tx, []).append(sender)  # every publisher hears how it ends
        return [*self._event(published), Post(sender, answer)]

    def _publisher_done(self, m: PublisherDone, sender: Address, incarnation: int, now: float) -> list[Effect]:
        owner = self.coordinators.get(m.tx) or self.relays.get(m.tx)
        if owner is not None and owner.numbering is not None:
            owner.numbering.publishing.discard((NodeId(sender.handle), incarnation))
        return []

    # --------------------------------------------------------------------------------------- distributed: commitment

    def _commit(self, m: CommitTx, sender: Address, incarnation: int, now: float) -> list[Effect]:
        if m.tx in self.relays:
            return self._commit_local(m.tx, m.last_sequence, sender)
        coordinator = self.coordinators.get(m.tx)
        if coordinator is None:
            return self._ended(m, sender)
        if coordinator.state is TxState.COMMITTING:
            return self._epochs(coordinator.spec).wait_again(m.tx)
        return self._request_commit(coordinator, m.last_sequence)

    def _request_commit(self, coordinator: TxCoordinator, last_sequence: int | None) -> list[Effect]:
        effects = coordinator.commit(last_sequence)
        if coordinator.state is TxState.COMMITTING:
            return effects + self._epochs(coordinator.spec).submit(coordinator.ready())
        if coordinator.failed is not None:
            return effects + self._end(coordinator)
        return effects

    def _settled(self, ready: ReadyTx, committed: bool) -> list[Effect]:
        """An epoch decided one of its members."""
        coordinator = self.coordinators.pop(ready.tx, None)
        self.publishers.pop(ready.tx, None)
        if coordinator is not None:
            return coordinator.settled(committed)
        follows = ready.spec.local_outcome is LocalOutcome.FOLLOWS and ready.spec.limit is not ScopeLimit.DISTRIBUTED
        if not follows or ready.spec.event_type in self.logs_of:
            return []
        order = LocalCommitOrdered(tx=ready.tx, event_type=ready.spec.event_type, last_sequence=ready.last_sequence)
        reason = "the transaction aborted"
        abandoned = TxAbandoned(tx=ready.tx, event_type=ready.spec.event_type, reason=reason)
        return [Disseminate(order if committed else abandoned)]

    def _end(self, coordinator: TxCoordinator) -> list[Effect]:
        """A coordinator failed before its transaction was voted on."""
        outcome = TxOutcome(
            tx=coordinator.tx,
            outcome=Outcome.ABORTED,
            reason=coordinator.failed or "",
            locals_wait=coordinator.detached,
        )
        if coordinator.detached:
            return [Post(coordinator.initiator, outcome)]
        del self.coordinators[coordinator.tx]
        self.publishers.pop(coordinator.tx, None)
        return self.outcomes.settle(outcome, coordinator.initiator)

    def _voted(self, m: EpochVoted, sender: Address, incarnation: int, now: float) -> list[Effect]:
        epochs = self.epochs.get(m.epoch.event_type)
        return epochs.on_voted(m, incarnation) if epochs is not None else []

    def _finished(self, m: EpochFinished, sender: Address, incarnation: int, now: float) -> list[Effect]:
        epochs = self.epochs.get(m.epoch.event_type)
        return epochs.on_finished(m, sender) if epochs is not None else []

    # ------------------------------------------------------------------------------------------- aborts and losses

    def _abort(self, m: AbortTx, sender: Address, incarnation: int, now: float) -> list[Effect]:
        relay = self.relays.get(m.tx)
        if relay is not None:
            return self._end_relay(relay, Outcome.ABORTED, m.reason)
        coordinator = self.coordinators.get(m.tx)
        if coordinator is None:
            return self._ended(m, sender)
        return self._abort_coordinator(coordinator, m.reason, sender)

    def _abort_coordinator(self, coordinator: TxCoordinator, reason: str, asker: Address | None) -> list[Effect]:
        """Whoever asked hears the outcome: an abort that comes after the decision changes nothing."""
        tx = coordinator.tx
        if asker is not None and asker != coordinator.initiator:
            self.outcomes.askers.setdefault(tx, []).append(asker)
        if coordinator.state is not TxState.COMMITTING:
            effects = coordinator.abort(reason)
            return effects + self._end(coordinator)
        epochs = self._epochs(coordinator.spec)
        if epochs.withdraw(tx):
            outcome = TxOutcome(tx=tx, outcome=Outcome.ABORTED, reason=reason)
            return self._settled(coordinator.ready(), False) + self.outcomes.settle(outcome, coordinator.initiator)
        epoch = epochs.voting(tx)
        if epoch is not None and len(epoch.members) == 1:
            return epochs.abort(tx, reason)
        return []

    def _participant_aborted(
        self, m: ParticipantAborted, sender: Address, incarnation: int, now: float
    ) -> list[Effect]:
        coordinator = self.coordinators.get(m.tx)
        member = coordinator.members.get(m.voter) if coordinator is not None else None
        if coordinator is None or member is None or member.incarnation != incarnation:
            return []
        if coordinator.state is TxState.COMMITTING:
            return self._epochs(coordinator.spec).drop([m.voter], m.reason)
        return self._step(coordinator, coordinator.on_participant_lost(m.voter, m.reason))

    def _participant_lost(self, m: ParticipantLost, sender: Address, incarnation: int, now: float) -> list[Effect]:
        return self._lose(m.handles, "the participant died")

    def _lose(self, handles: tuple[str, ...], reason: str) -> list[Effect]:
        effects: list[Effect] = []
        for coordinator in list(self.coordinators.values()):
            for handle in handles:
                if handle in coordinator.members and coordinator.tx in self.coordinators:
                    effects += self._step(coordinator, coordinator.on_participant_lost(handle, reason))
        for epochs in self.epochs.values():
            for handle in handles:
                epochs.standing.withdraw(handle)
            effects += epochs.drop(handles, reason)
        return effects

    def _publisher_lost(self, m: PublisherLost, sender: Address, incarnation: int, now: float) -> list[Effect]:
        """An undecided transaction of a dead publisher is aborted, behind its last accepted event."""
        effects: list[Effect] = []
        life = (m.site, m.incarnation)
        reason = f"publisher {m.site} died"
        for relay in list(self.relays.values()):
            if self._published_by(relay.tx, relay.numbering, life):
                effects += self._end_relay(relay, Outcome.ABORTED, reason)
        for coordinator in list(self.coordinators.values()):
            if coordinator.one_shot is None and self._published_by(coordinator.tx, coordinator.numbering, life):
                effects += self._abort_coordinator(coordinator, reason, None)
        return effects

    def _published_by(self, tx: TxId, numbering: EventCoordinator | None, life: tuple[NodeId, int]) -> bool:
        return self.publishers.get(tx) == life or (numbering is not None and life in numbering.publishing)

    # ------------------------------------------------------------------------------------------- standing answers

    def _standing_answered(self, m: StandingAnswered, sender: Address, incarnation: int, now: float) -> list[Effect]:
        family = self.families.get(m.event_type)
        if family is None:
            return []
        epochs = self.epochs[family]
        standing = epochs.standing
        new = standing.renew(m, sender, incarnation, now)
        effects = self._judge_position(epochs, m, new)
        answer = standing.answers[m.voter]
        accepted = StandingAccepted(voter=m.voter, incarnation=self.incarnation, in_sync=standing.counted(answer))
        effects.append(Post(sender, accepted))
        if new:
            if len(standing.answers) == 1:  # later ones must not put off the look at the earlier ones
                effects.append(SetTimer(("lease", family), self.options.lease_s))
            effects += epochs.start()
        return effects

    def _judge_position(self, epochs: EpochCoordinator, m: StandingAnswered, new: bool) -> list[Effect]:
        """A replica is in sync only with everything decided; it grows into the set while nothing is in flight."""
        log = epochs.log
        if log is None or m.position is None or m.identity is None or m.scope is not Scope.DISTRIBUTED:
            return []
        in_sync = epochs.standing.in_sync
        alarms: list[Effect] = []
        if m.position > log.last_number:
            # Our journal lost what this replica has: what it holds under the next numbers is not what others will.
            text = f"{m.identity} has applied {m.position}, and the log of {log.event_type} ends at {log.last_number}"
            alarms = [Alarm("ahead-of-log", text)] if new else []
            in_sync = in_sync - {m.identity}
        elif m.identity in in_sync and new and m.position < log.decided_upto:
            in_sync = in_sync - {m.identity}
        elif m.identity not in in_sync and m.position >= log.decided_upto and not epochs.in_flight:
            in_sync = in_sync | {m.identity}
        if in_sync == epochs.standing.in_sync:
            return alarms
        epochs.standing.in_sync = in_sync
        return [*alarms, Persist(InSyncChanged(event_type=log.event_type, in_sync=in_sync))]

    def _standing_withdrawn(self, m: StandingWithdrawn, sender: Address, incarnation: int, now: float) -> list[Effect]:
        return self._lose((m.voter,), "the participant withdrew")

    def on_lease(self, event_type: str, now: float) -> list[Effect]:
        """Time to see which standing answers were not renewed."""
        epochs = self.epochs.get(event_type)
        if epochs is None:
            return []
        effects: list[Effect] = []
        for late in epochs.standing.expire(now):
            effects += self._lose((late.voter,), "the participant fell silent")
        if epochs.standing.answers:
            effects.append(SetTimer(("lease", event_type), self.options.lease_s))
        return effects

    # ------------------------------------------------------------------------------------------------- questions

    def _ask_epoch(self, m: AskEpoch, sender: Address, incarnation: int, now: float) -> list[Effect]:
        epochs = self.epochs.get(m.epoch.event_type)
        if epochs is None or m.epoch.coordinator != self.me:
            return []
        return epochs.on_asked(m.epoch, m.digest, m.voter, sender)

    def _ask_membership(self, m: AskMembership, sender: Address, incarnation: int, now: float) -> list[Effect]:
        if m.tx in self.relays:
            return [_membership(m.tx, m.voter, TxState.ACTIVE, sender)]
        coordinator = self.coordinators.get(m.tx)
        epochs = self.epochs.get(self.families.get(m.event_type, ""))
        if coordinator is None and epochs is not None and epochs.holds(m.tx):
            return []  # a one-shot's end is still to come
        if coordinator is not None and coordinator.detached and m.voter not in coordinator.joined:
            return []  # a local subscriber: it goes by the publisher's word, which is still to come
        if coordinator is None or coordinator.failed is not None:
            return [_membership(m.tx, m.voter, TxState.ABORTED, sender)]
        if m.voter in coordinator.members:
            coordinator.members[m.voter].address = sender  # it may have moved to another broker
        if coordinator.state is TxState.CENSUS:
            return []
        answer = MembershipAnswered(
            tx=m.tx, voter=m.voter, state=coordinator.state, members=coordinator.census.hashed_members()
        )
        return [Post(sender, answer)]

    def _ask_outcome(self, m: AskOutcome, sender: Address, incarnation: int, now: float) -> list[Effect]:
        return self._ended(m, sender)

    def _ended(self, m: AskOutcome | CommitTx | AbortTx, sender: Address) -> list[Effect]:
        """What became of a transaction that is not being coordinated any more, or never was."""
        alive = self._alive(m.tx, m.event_type)
        remembered = m.tx_type is TxType.DISTRIBUTED or m.event_type in self.logs_of
        if not alive and not remembered and not self.outcomes.is_refused(m.tx):
            reason = "the broker keeps no record of local transactions, and was restarted"
            return [Post(sender, TxOutcome(tx=m.tx, outcome=Outcome.UNKNOWN, reason=reason))]
        return self.outcomes.ask(m.tx, sender, alive)

    def _route_asked(self, m: RouteAsked, sender: Address, incarnation: int, now: float) -> list[Effect]:
        return [Post(sender, RouteStands(subscription=m.subscription))]

    def _alive(self, tx: TxId, event_type: str) -> bool:
        """Whether this coordinator is at it: its census, its events, its votes, or its end."""
        epochs = self.epochs.get(self.families.get(event_type, ""))
        return tx in self.coordinators or tx in self.relays or (epochs is not None and epochs.holds(tx))

    def _log_wanted(self, m: LogWanted, sender: Address, incarnation: int, now: float) -> list[Effect]:
        wanted = m.definitions[-1]
        if wanted.name not in self.types:
            effects = self._advertised(TypeAdvertised(definitions=m.definitions), sender, incarnation, now)
        else:
            effects = []
        log = self.logs_of.get(wanted.name)
        if log is None:
            return effects
        if m.passing:
            return effects + self._read_in_passing(log, m, sender)
        known = log.feeds.get(m.name)
        position = m.position
        if position is None:
            position = known.position if known is not None else _start(m.start, log)
        if known is None or known.position != position:
            effects.append(Note(SubscriptionKept(event_type=log.event_type, name=m.name, position=position)))
        feed = Feed(m.name, wanted.name, sender, m.filter, position, position, m.credit, m.voter)
        return effects + log.want(feed)

    @staticmethod
    def _read_in_passing(log: EventLog, m: LogWanted, sender: Address) -> list[Effect]:
        """Somebody looks at what is in the log. No record is made of it: it is not there after a restart."""
        if m.position is None or m.position < 0:
            log.end(m.name)
            return []
        feed = Feed(m.name, m.definitions[-1].name, sender, m.filter, m.position, m.position, m.credit, passing=True)
        return log.want(feed)

    def _ask_log(self, m: AskLog, sender: Address, incarnation: int, now: float) -> list[Effect]:
        log = self.logs_of.get(m.event_type)
        if log is None:
            return []  # the asker repeats itself: the type may be on its way
        standing = self.epochs[self.families[m.event_type]].standing
        present = {s.identity for s in standing.answers.values()}
        followers = tuple(
            Follower(f.name, f.position, f.name in present, f.name in standing.in_sync)
            for f in sorted(log.subscribers, key=lambda f: f.name)
        )
        told = LogTold(
            request=m.request,
            event_type=m.event_type,
            decided=log.decided_upto,
            oldest=log.oldest,
            in_sync=tuple(sorted(standing.in_sync)),
            followers=followers,
        )
        return [Post(sender, told)]

    def log_read(self, event_type: str, feed: str, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """What a `ReadLog` brought."""
        if feed == QUESTION:
            return self.epochs[event_type].on_read(entries)
        return self.logs[event_type].on_read(feed, entries)

    # ------------------------------------------------------------------------------------------------ time, recovery

    def on_timer(self, key: tuple[str, ...], now: float) -> list[Effect]:
        match key:
            case ("census", tx):
                coordinator = self.coordinators.get(TxId(tx))
                return [] if coordinator is None else self._step(coordinator, coordinator.close_census())
            case ("deadline", tx):
                return self._deadline(TxId(tx))
            case ("epoch", event_type, number):
                return self.epochs[event_type].on_timer(int(number))
            case ("notes", event_type):
                return self.epochs[event_type].write_notes()
            case ("lease", event_type):
                return self.on_lease(event_type, now)
        return []

    def _deadline(self, tx: TxId) -> list[Effect]:
        reason = "it was not decided in time"
        relay = self.relays.get(tx)
        if relay is not None:
            return self._end_relay(relay, Outcome.ABORTED, reason)
        coordinator = self.coordinators.get(tx)
        if coordinator is None:
            return []
        coordinator.detached = False
        return self._abort_coordinator(coordinator, reason, None)

    def recover(self, record: AnyRecord) -> None:
        """Replay one record of the journal, in order."""
        match record:
            case Started(incarnation=incarnation):
                self.incarnation = max(self.incarnation, incarnation)
            case TypeDefined(event_type=event_type):
                self._know(self.types.define(event_type))
            case LogAppended(event_type=name) | InSyncChanged(event_type=name):
                self.epochs[name].recover(record)
            case EpochCommitted(epoch=epoch):
                self.epochs[epoch.event_type].recover(record)
            case FinishesNoted(event_type=name):
                self.epochs[name].recover(record)
            case TxRefused(tx=tx):
                self.outcomes.refuse(tx)
            case OutcomesForgotten(lives=lives):
                for life, counter in lives.items():
                    self.outcomes.forget(life, counter)
            case SubscriptionKept(event_type=name, name=feed, position=position):
                log = self.logs[name]
                if position < 0:
                    log.end(feed)
                else:
                    log.feeds[feed] = Feed(feed, name, Address(self.me), Filter.nothing(), position, position, 0)

    def recovered(self) -> list[Effect]:
        """The journal is read: numbers that were given out and never decided are void."""
        effects: list[Effect] = []
        for log in self.logs.values():
            for number in log.missing_numbers():
                entry = LogEntry(number=number)
                log.fill(entry)
                effects.append(Persist(LogAppended(event_type=log.event_type, entry=entry)))
        return effects


def _start(start: str, log: EventLog) -> int:
    if start == "now" or not is_start(start):
        return log.decided_upto
    oldest = log.oldest - 1
    return oldest if start == "oldest" else min(max(int(start) - 1, oldest), log.decided_upto)


def _confirmed(log: EventLog, entry: LogEntry) -> EventConfirmed:
    if entry.origin is None:
        raise InvariantBroken(f"{log.event_type}#{entry.number} has no origin to confirm to")
    return EventConfirmed(origin=entry.origin, log_number=entry.number)


def _membership(tx: TxId, voter: str, state: TxState, to: Address) -> Effect:
    return Post(to, MembershipAnswered(tx=tx, voter=voter, state=state))
