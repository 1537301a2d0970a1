"""A site without its socket: what an application asks for goes in, effects come out.

The publisher's side is here (event types, events, own transactions); the subscriber's side is `Participation`. A site
has one link at a time; when it is a new one, everything the broker must know is said again, and whatever is still
unanswered is asked again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tops.constraints import check_consistent
from tops.core.calls import Calls
from tops.core.participation import Participation, SiteOptions, Wish
from tops.core.publisher import PublisherTx
from tops.core.routing import rendezvous_of
from tops.effects import Answer, Disseminate, Effect, Memo, Post, Promise, Send, SetTimer
from tops.errors import (
    InvalidEventType,
    LimitExceeded,
    NotAdvertised,
    NotReachable,
    OutcomeUnknown,
    TopsError,
    TransactionAborted,
    TransactionClosed,
    UnknownTransaction,
)
from tops.event_types import EventTypes
from tops.filters import Filter
from tops.ids import NodeId, Pseudonym, TxId, tx_id
from tops.messages import (
    Address,
    AskLog,
    AskOutcome,
    BeginPublic,
    BeginTx,
    CensusOpened,
    Definitions,
    Dissemination,
    Envelope,
    EpochDecided,
    Event,
    EventConfirmed,
    EventsPublished,
    EventsRefused,
    FinishNoted,
    Letter,
    LinkMessage,
    LogDelivered,
    LogRefused,
    LogTold,
    LogWanted,
    MembershipAnswered,
    Origin,
    PeerKnows,
    PeersAsked,
    PrepareEpoch,
    Publication,
    Published,
    PublisherDone,
    PublishInTxAnswered,
    RouteAsked,
    RouteStands,
    RunOneShot,
    StandingAccepted,
    TxOpened,
    TxOutcome,
    TxSpec,
    TypeAdvertised,
    TypeAnswered,
    VotesMissing,
    type_of,
)
from tops.transactions import Access, LocalOutcome, Outcome, TxState, TxType, check_limit

RETRY = ("retry",)
ENDED_MAX = 1000


class SiteCore:
    """One site: the client library's machine."""

    def __init__(
        self,
        name: NodeId,
        incarnation: int,
        brokers: Sequence[NodeId],
        entropy: Callable[[int], bytes],
        options: SiteOptions | None = None,
    ) -> None:
        self.name, self.incarnation, self.brokers = name, incarnation, tuple(sorted(brokers))
        self.options = options or SiteOptions()
        self.entropy = entropy
        self.types = EventTypes()
        self.calls = Calls()
        self.link: NodeId | None = None
        self.participation = Participation(
            name, self.types, self.calls, self.brokers, self.rendezvous, entropy, self.options
        )
        self.advertised: dict[str, Definitions] = {}
        self.advertising: dict[str, list[int]] = {}
        self.unconfirmed: dict[tuple[str, int], tuple[int, Published]] = {}  # durable publications, in order
        self.opening: dict[int, tuple[BeginPublic, float]] = {}  # public ones without an id yet, and for how long
        self.transactions: dict[TxId, PublisherTx] = {}
        self.ended: OrderedDict[TxId, TxOutcome] = OrderedDict()  # for those who use a transaction after its end
        self.asking: dict[TxId, tuple[AskOutcome, list[int]]] = {}
        self.asking_logs: dict[int, AskLog] = {}
        self.reading_logs: dict[str, tuple[int, LogWanted]] = {}  # by the reader's name
        self.routes_asked: dict[int, int] = {}  # subscription -> the request that waits for its route
        self.counter = 0
        self.publications: dict[str, int] = {}  # per family
        self._retrying = False
        self._coordinators: dict[str, NodeId] = {}
        participation = self.participation
        self._letters: dict[type, Callable[[Any], list[Effect]]] = {
            PrepareEpoch: participation.on_prepare,
            EpochDecided: participation.on_decided,
            LogDelivered: self._on_log,
            StandingAccepted: participation.on_accepted,
            FinishNoted: participation.on_noted,
            MembershipAnswered: participation.on_membership,
            PeerKnows: participation.on_peer_knows,
            LogRefused: self._on_log_refused,
            TxOutcome: self._on_outcome,
            EventConfirmed: self._on_confirmed,
            EventsRefused: self._on_refused,
            TxOpened: self._on_opened,
            PublishInTxAnswered: self._on_tx_letter,
            VotesMissing: self._on_tx_letter,
            TypeAnswered: self._on_type_answered,
            RouteStands: self._on_route,
            LogTold: self._on_log_told,
        }

    def rendezvous(self, family: str) -> NodeId:
        return rendezvous_of(self.brokers, family)

    def coordinator_of(self, event_type: str) -> NodeId:
        known = self._coordinators.get(event_type)
        if known is None:
            known = self._coordinators[event_type] = self.rendezvous(self.types.family(event_type))
        return known

    # --------------------------------------------------------------------------------------------------------- link

    def link_up(self, broker: NodeId, now: float) -> list[Effect]:
        """A link to a broker that knows nothing of this site yet."""
        self.link = broker
        effects = self.participation.link_up(broker)
        for definitions in self.advertised.values():
            effects += self._advertise_letter(definitions)
        return self._request(effects + self._repeat(0.0))

    def link_down(self) -> None:
        self.link = None

    def receive(self, message: LinkMessage, now: float) -> list[Effect]:
        if isinstance(message, Envelope):
            return self._carry_out(self._on_letter(message.body, message.sender))
        if isinstance(message, Dissemination) and self.link is not None:
            effects = self.participation.on_publication(message.publication, message.lineage, self.link)
            return self._carry_out(effects)
        return []

    def _on_letter(self, letter: Letter, sender: Address) -> list[Effect]:
        if isinstance(letter, PeersAsked):
            return self.participation.on_peers_asked(letter, sender)
        handler = self._letters.get(type(letter))
        return handler(letter) if handler is not None else []

    def _on_tx_letter(self, letter: PublishInTxAnswered | VotesMissing) -> list[Effect]:
        known = self.transactions.get(letter.tx)
        if known is None:
            return []
        return known.on_published(letter) if isinstance(letter, PublishInTxAnswered) else known.on_votes_missing(letter)

    # --------------------------------------------------------------------------------------------- types and events

    def advertise(self, request: int, definitions: Definitions) -> list[Effect]:
        """Say that this site is going to publish a type; answered when the rendezvous has taken it."""
        try:
            self.types.define_all(definitions)
        except InvalidEventType as refusal:
            return [Answer(request, error=refusal)]
        name = definitions[-1].name
        self.advertised[name] = definitions
        self.advertising.setdefault(name, []).append(request)
        return self._request(self._advertise_letter(definitions))

    def _advertise_letter(self, definitions: Definitions) -> list[Effect]:
        coordinator = self.rendezvous(definitions[0].name)
        return [Post(Address(coordinator), TypeAdvertised(definitions=definitions))]

    def _on_type_answered(self, answered: TypeAnswered) -> list[Effect]:
        waiting = self.advertising.pop(answered.event_type, [])
        if answered.refusal is None:
            return [Answer(request) for request in waiting]
        self.advertised.pop(answered.event_type, None)
        return [Answer(request, error=InvalidEventType(answered.refusal)) for request in waiting]

    def publish(self, request: int, event: Event) -> list[Effect]:
        """An ordinary event; for a durable type the answer means that it is on disk."""
        error = self._problem(event)
        if error is not None:
            return [Answer(request, error=error)]
        family = self.types.family(event.type)
        number = self.publications[family] = self.publications.get(family, 0) + 1
        published = Published(event=event, origin=Origin(family, self.name, self.incarnation, number))
        effects: list[Effect] = [Disseminate(published)]
        if self.types.whole(event.type).durable:
            self.unconfirmed[family, number] = (request, published)
            return self._request(effects)
        return self._request([*effects, Answer(request)])

    def publish_confirmed(
        self, event_type: str, events: Sequence[tuple[int, dict[str, Any], msgspec.Raw]]
    ) -> list[Effect]:
        """Events of a durable type, in order, each with its request, its body and that body encoded; each request is
        answered with the event's number when it is on disk. The caller has checked every body."""
        family = self.types.family(event_type)
        number = self.publications.get(family, 0)
        for request, body, _ in events:
            number += 1
            origin = Origin(family, self.name, self.incarnation, number)
            self.unconfirmed[family, number] = (request, Published(event=Event(event_type, body), origin=origin))
        self.publications[family] = number
        bodies = tuple(encoded for _, _, encoded in events)
        return self._request([Disseminate(EventsPublished(event_type=event_type, bodies=bodies, origin=origin))])

    def publish_all(self, event_type: str, bodies: tuple[msgspec.Raw, ...]) -> list[Effect]:
        """Ordinary events of an advertised type that is not durable, in order; the caller has checked and encoded
        each."""
        family = self.types.family(event_type)
        number = self.publications[family] = self.publications.get(family, 0) + len(bodies)
        origin = Origin(family, self.name, self.incarnation, number)
        return self._carry_out([Disseminate(EventsPublished(event_type=event_type, bodies=bodies, origin=origin))])

    def _problem(self, event: Event) -> TopsError | None:
        if event.type not in self.advertised:
            return NotAdvertised(event.type)
        return self._problem_with_body(event)

    def _problem_with_body(self, event: Event) -> TopsError | None:
        try:
            self.types.whole(event.type).check(event.body)
        except TopsError as error:
            return error
        return None

    def _on_confirmed(self, confirmed: EventConfirmed) -> list[Effect]:
        answers: list[Effect] = []
        origin, log_number = confirmed.origin, confirmed.log_number
        for before in range(confirmed.count - 1, -1, -1):
            known = self.unconfirmed.pop((origin.family, origin.number - before), None)
            if known is not None:
                answers.append(Answer(known[0], None if log_number is None else log_number - before))
        return answers

    def _on_refused(self, refused: EventsRefused) -> list[Effect]:
        return self.refuse_events(refused.event_type, LimitExceeded(refused.reason))

    def refuse_events(self, event_type: str, error: TopsError) -> list[Effect]:
        """Durable events of this type that wait for a confirmation get none.

        The log expects numbers without gaps, so those at the end are given again."""
        refused = [(key, request) for key, (request, p) in self.unconfirmed.items() if p.event.type == event_type]
        for (family, number), _ in reversed(refused):
            del self.unconfirmed[family, number]
            if self.publications[family] == number:
                self.publications[family] -= 1
        return [Answer(request, error=error) for _, request in refused]

    # ------------------------------------------------------------------------------------------- own transactions

    def begin(self, request: int, spec: TxSpec, own: Pseudonym | None = None) -> list[Effect]:
        """Open a transaction; answered with its id when events may be published in it.

        `own` is the key under which resources that the publisher enlisted take part.
        """
        error = self._problem_with_spec(spec)
        if error is not None:
            return [Answer(request, error=error)]
        coordinator = self.coordinator_of(spec.event_type)
        if spec.access is Access.PUBLIC:
            begin_public = BeginPublic(request=request, spec=spec)
            self.opening[request] = (begin_public, 0.0)
            return self._request([Post(Address(coordinator), begin_public)])
        tx = self._new_id()
        if spec.tx_type is TxType.DISTRIBUTED:
            begin = BeginTx(tx=tx, spec=spec, own=own)
            own_tx = self.transactions[tx] = PublisherTx(tx, spec, coordinator, begin)
            own_tx.opening = request
            return self._request([Post(Address(coordinator), begin)])
        own_tx = self.transactions[tx] = PublisherTx(tx, spec, coordinator)
        announced = CensusOpened(
            tx=tx, spec=spec, coordinator=coordinator, incarnation=self.incarnation, initiator=Address(coordinator)
        )
        own_tx.opening = request
        return self._request([Disseminate(announced), *own_tx.on_opened(TxOpened(tx=tx, state=TxState.ACTIVE))])

    def execute(self, request: int, spec: TxSpec, events: tuple[Event, ...]) -> list[Effect]:
        """A one-shot: begin, all events and commit in one message; answered with the outcome."""
        error = self._problem_with_spec(spec)
        for event in events:
            error = error or self._problem_with_body(event)
        if error is not None:
            return [Answer(request, error=error)]
        tx = self._new_id()
        coordinator = self.coordinator_of(spec.event_type)
        own_tx = self.transactions[tx] = PublisherTx(tx, spec, coordinator)
        own_tx.one_shot, own_tx.state, own_tx.wish = True, TxState.COMMITTING, "commit"
        own_tx.ending.append(request)
        return self._request([Post(Address(coordinator), RunOneShot(tx=tx, spec=spec, events=events))])

    def _problem_with_spec(self, spec: TxSpec) -> TopsError | None:
        if spec.event_type not in self.advertised:
            return NotAdvertised(spec.event_type)
        try:
            check_limit(spec.tx_type, spec.limit, spec.local_outcome)
            check_consistent(spec.constraints, spec.tx_type)
        except TopsError as error:
            return error
        return None

    def _new_id(self) -> TxId:
        self.counter += 1
        return tx_id(self.name, self.incarnation, self.counter)

    def _on_opened(self, opened: TxOpened) -> list[Effect]:
        if opened.request is not None:
            public = self.opening.pop(opened.request, None)
            if public is None:
                return []
            spec = public[0].spec
            own_tx = PublisherTx(opened.tx, spec, self.coordinator_of(spec.event_type))
            own_tx.opening = opened.request
            if opened.state is not TxState.CENSUS:
                return own_tx.on_opened(opened)
            self.transactions[opened.tx] = own_tx
            return []
        known = self.transactions.get(opened.tx)
        if known is None:
            return []
        effects = known.on_opened(opened)
        if known.state in (TxState.ABORTED, TxState.CENSUS_UNFULFILLED):
            del self.transactions[opened.tx]
        return effects

    def contribute(self, tx: TxId, spec: TxSpec) -> None:
        """Publish in somebody else's public transaction, whose announcement this site has seen."""
        if tx not in self.transactions and tx not in self.ended:
            own_tx = self.transactions[tx] = PublisherTx(tx, spec, self.coordinator_of(spec.event_type))
            own_tx.state, own_tx.contributed = TxState.ACTIVE, True

    def tx_publish(self, request: int, tx: TxId, event: Event) -> list[Effect]:
        """An event inside a transaction; it travels under the transaction's type whatever its own."""
        known = self.transactions.get(tx)
        if known is None:
            return [Answer(request, error=self._no_longer_open(tx))]
        problem = self._problem_with_body(event) if event.type in self.types else None
        if problem is not None:
            return [Answer(request, error=problem)]
        return self._request(known.publish(request, event))

    def _no_longer_open(self, tx: TxId) -> TopsError:
        outcome = self.ended.get(tx)
        if outcome is None:
            return UnknownTransaction(tx)
        if outcome.outcome is Outcome.UNKNOWN:
            return OutcomeUnknown(tx, "its coordinator")
        if outcome.outcome is Outcome.ABORTED:
            return TransactionAborted(tx, outcome.reason)
        return TransactionClosed(tx, outcome.outcome.value)

    def done(self, tx: TxId) -> list[Effect]:
        """A contributor to a public transaction has said all it wants."""
        known = self.transactions.get(tx)
        if known is None:
            return []
        if known.contributed and not known.waits():
            del self.transactions[tx]
        return self._carry_out([Post(Address(known.coordinator), PublisherDone(tx=tx))])

    def commit(self, request: int, tx: TxId) -> list[Effect]:
        known = self.transactions.get(tx)
        if known is None:
            return [Answer(request, error=self._no_longer_open(tx))]
        return self._request(known.commit(request))

    def abort(self, request: int, tx: TxId, reason: str) -> list[Effect]:
        known = self.transactions.get(tx)
        if known is not None:
            return self._request(known.abort(request, reason))
        if tx in self.ended and self.ended[tx].outcome is not Outcome.UNKNOWN:
            return [Answer(request, self.ended[tx])]
        return [Answer(request, error=self._no_longer_open(tx))]

    def ask_outcome(self, request: int, question: AskOutcome) -> list[Effect]:
        """What became of a transaction, also one of an earlier life of this site."""
        if question.event_type not in self.types:
            refusal = InvalidEventType(f"event type {question.event_type!r} is not known here: advertise or subscribe")
            return [Answer(request, error=refusal)]
        self.asking.setdefault(question.tx, (question, []))[1].append(request)
        return self._request(self._ask(question))

    def _ask(self, question: AskOutcome) -> list[Effect]:
        return [Post(Address(self.coordinator_of(question.event_type)), question)]

    def ask_log(self, request: int, event_type: str) -> list[Effect]:
        """How far a durable type's log is decided; repeated until it is answered or `forget_log` ends it."""
        question = self.asking_logs[request] = AskLog(request=request, event_type=event_type)
        return self._request([Post(Address(self.coordinator_of(event_type)), question)])

    def forget_log(self, request: int) -> None:
        """Nobody waits for that answer any more."""
        self.asking_logs.pop(request, None)

    def read_log(self, request: int, name: str, event_type: str, after: int, entries_max: int) -> list[Effect]:
        """Some of the entries that follow a number, in passing: under a name of the reader's own, one read at a time.

        Repeated until it is answered; `read_log_done` ends it."""
        wanted = self._reading(name, event_type, after, entries_max)
        self.reading_logs[name] = (request, wanted)
        return self._request([Post(Address(self.coordinator_of(event_type)), wanted)])

    def read_log_done(self, name: str, event_type: str) -> list[Effect]:
        self.reading_logs.pop(name, None)
        return self._carry_out([Post(Address(self.coordinator_of(event_type)), self._reading(name, event_type, -1, 0))])

    def _reading(self, name: str, event_type: str, after: int, entries_max: int) -> LogWanted:
        return LogWanted(
            name=name,
            definitions=self.types.definitions(event_type),
            filter=Filter(),
            position=after,
            start="",
            credit=entries_max,
            voter=None,
            passing=True,
        )

    def _on_log(self, delivered: LogDelivered) -> list[Effect]:
        reading = self.reading_logs.get(delivered.name)
        if reading is None:
            return self.participation.on_log(delivered)
        request, wanted = reading
        if delivered.after != wanted.position:
            return []  # of an earlier question
        del self.reading_logs[delivered.name]
        return [Answer(request, delivered)]

    def _on_log_refused(self, refused: LogRefused) -> list[Effect]:
        reading = self.reading_logs.pop(refused.name, None)
        if reading is None:
            return self.participation.on_log_refused(refused)
        text = f"the log of {refused.event_type!r} begins at {refused.oldest}; what was before is no longer kept"
        return [Answer(reading[0], error=NotReachable(text))]

    def _on_outcome(self, outcome: TxOutcome) -> list[Effect]:
        effects: list[Effect] = []
        known = self.transactions.get(outcome.tx)
        if known is not None:
            effects += known.on_outcome(outcome)
            if not outcome.locals_wait:
                del self.transactions[outcome.tx]
                self.ended[outcome.tx] = outcome
                if len(self.ended) > ENDED_MAX:
                    self.ended.popitem(last=False)
        if outcome.locals_wait:
            return effects
        asked = self.asking.pop(outcome.tx, None)
        return effects + [Answer(request, outcome) for request in (asked[1] if asked is not None else [])]

    # ------------------------------------------------------------------------------------------------ subscriptions

    def subscribe(self, request: int, number: int, wish: Wish) -> list[Effect]:
        """`number` names the subscription in every later call."""
        return self._request(self.participation.subscribe(number, wish, request, self.link))

    def ask_route(self, request: int, number: int) -> list[Effect]:
        """Answered when events that are published from then on reach the subscription."""
        self.routes_asked[number] = request
        return self._request(self._route_question(number))

    def _route_question(self, number: int) -> list[Effect]:
        known = self.participation.subscriptions.get(number)
        if known is None:
            self.routes_asked.pop(number, None)
            return []
        return [Post(Address(known.coordinator), RouteAsked(subscription=number))]

    def _on_log_told(self, told: LogTold) -> list[Effect]:
        return [] if self.asking_logs.pop(told.request, None) is None else [Answer(told.request, told)]

    def _on_route(self, stands: RouteStands) -> list[Effect]:
        request = self.routes_asked.pop(stands.subscription, None)
        return [] if request is None else [Answer(request, stands.subscription)]

    def unsubscribe(self, number: int) -> list[Effect]:
        return self._carry_out(self.participation.unsubscribe(number, self.link))

    def recover(self, number: int, promises: Sequence[Promise], kept: Sequence[Memo] = ()) -> list[Effect]:
        """What a subscription's participant found again after a crash; call it right after `subscribe`.

        `promises` are those that are still open, `kept` those that were carried out and not yet forgotten.
        """
        return self._carry_out(self.participation.recover(number, promises, kept))

    def call_done(self, call: int, result: Any) -> list[Effect]:
        """A participant answered a call."""
        return self._carry_out(self.calls.done(call, result))

    def participant_abort(self, number: int, tx: TxId, reason: str) -> list[Effect]:
        """A participant gives up by itself, at any moment before its promise."""
        executor = self.participation.executors.get(tx, {}).get(number)
        return [] if executor is None else self._carry_out(executor.give_up(reason))

    # -------------------------------------------------------------------------------------------------------- time

    def timer(self, key: tuple[str, ...], now: float) -> list[Effect]:
        if key == RETRY:
            self._retrying = False
            return self._request(self._repeat(self.options.retry_s))
        return self._carry_out(self.participation.on_timer(key))

    def _repeat(self, elapsed_s: float) -> list[Effect]:
        """Ask again for whatever is unanswered."""
        effects: list[Effect] = []
        for _, published in self.unconfirmed.values():
            effects.append(Disseminate(published))
        for known in list(self.transactions.values()):
            effects += known.repeat(elapsed_s, self.options.give_up_s)
            if known.state is TxState.CENSUS and not known.waits():
                del self.transactions[known.tx]  # given up before the application learnt its id
        for question, _ in self.asking.values():
            effects += self._ask(question)
        for asked in self.asking_logs.values():
            effects.append(Post(Address(self.coordinator_of(asked.event_type)), asked))
        for _, wanted in self.reading_logs.values():
            effects.append(Post(Address(self.coordinator_of(wanted.definitions[-1].name)), wanted))
        effects += self._repeat_openings(elapsed_s)
        for name in self.advertising:
            effects += self._advertise_letter(self.advertised[name])
        for number in list(self.routes_asked):
            effects += self._route_question(number)
        return effects

    def _repeat_openings(self, elapsed_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for request, (begin, waited_s) in list(self.opening.items()):
            coordinator = self.coordinator_of(begin.spec.event_type)
            if waited_s + elapsed_s > self.options.give_up_s:
                del self.opening[request]
                error = NotReachable(f"broker {coordinator} does not answer: no transaction was begun")
                effects.append(Answer(request, error=error))
            else:
                self.opening[request] = (begin, waited_s + elapsed_s)
                effects.append(Post(Address(coordinator), begin))
        return effects

    def _waiting(self) -> bool:
        if self.unconfirmed or self.opening or self.asking or self.advertising or self.routes_asked:
            return True
        if self.asking_logs or self.reading_logs:
            return True
        return any(t.waits() for t in self.transactions.values())

    # ------------------------------------------------------------------------------------------------- carrying out

    def _carry_out(self, effects: list[Effect]) -> list[Effect]:
        """Turn letters and publications into messages on the link; without one they are said again later."""
        carried: list[Effect] = []
        for effect in effects:
            if type(effect) is Post:
                if self.link is not None:
                    carried.append(Send(self.link, self._envelope(effect)))
            elif type(effect) is Disseminate:
                if self.link is not None:
                    carried.append(Send(self.link, self._dissemination(effect.publication)))
            else:
                carried.append(effect)
        return carried

    def _request(self, effects: list[Effect]) -> list[Effect]:
        """Carry out what the application asked for, and see to it that it is asked for again until it is answered."""
        carried = self._carry_out(effects)
        if not self._retrying and self._waiting():
            self._retrying = True
            carried.append(SetTimer(RETRY, self.options.retry_s))
        return carried

    def _envelope(self, post: Post) -> Envelope:
        letter = post.letter
        handle = self.name if isinstance(letter, LogWanted) else _handle(letter) or self.name
        return Envelope(to=post.to, sender=Address(NodeId(""), handle), incarnation=self.incarnation, body=letter)

    def _dissemination(self, publication: Publication) -> Dissemination:
        event_type = type_of(publication)
        whole = self.types.whole(event_type)
        return Dissemination(
            rendezvous=self.coordinator_of(event_type),
            upward=True,
            early=not whole.durable,
            sender=Address(NodeId("")),
            incarnation=self.incarnation,
            publication=publication,
            lineage=self.types.lineage(event_type),
        )


def _handle(letter: Letter) -> str:
    """Participants speak under the name they vote under; everybody else under the site's."""
    return getattr(letter, "voter", "") or getattr(letter, "pseudonym", "")


def default_local_outcome(durable: bool, tx_type: TxType) -> LocalOutcome:
    """What local subscribers go by unless the initiator says otherwise: on a durable type, by the log."""
    return LocalOutcome.FOLLOWS if durable and tx_type is TxType.DISTRIBUTED else LocalOutcome.INDEPENDENT


def with_default_outcome(spec: TxSpec, durable: bool) -> TxSpec:
    return msgspec.structs.replace(spec, local_outcome=default_local_outcome(durable, spec.tx_type))
