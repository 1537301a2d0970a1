"""A site without its socket: what an application asks for goes in, effects come out.

The publisher's side are `EventPublisher` (event types and ordinary events) and `OwnTransactions`; the subscriber's side
is `Participation`. A site has one link at a time; when it is a new one, everything the broker must know is said again,
and whatever is still unanswered is asked again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tops.core.client.event_publisher import EventPublisher
from tops.core.client.own_resources import OwnResources
from tops.core.client.own_transactions import OwnTransactions
from tops.core.client.type_directory import TypeDirectory
from tops.core.commit.decision_teller import CheckProof
from tops.core.participant.calls import Calls
from tops.core.participant.participation import Participation, SiteOptions, Wish
from tops.core.routing_tx.site import TreeSite
from tops.core.routing_tx.site_transactions import TIMER as ROUTING_TIMER
from tops.model.errors import NotReachable, TopsError
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.transactions import LocalOutcome, TxType
from tops.protocol.effects import Answer, Disseminate, Effect, Memo, Post, Promise, Send, SetTimer
from tops.protocol.messages import (
    Address,
    AskLog,
    AskOutcome,
    AskReached,
    Definitions,
    Dissemination,
    EndLog,
    Envelope,
    EpochDecided,
    Event,
    EventConfirmed,
    EventsRefused,
    FinishNoted,
    HistoryRejected,
    LinkMessage,
    LogDelivered,
    LogEnded,
    LogRecovered,
    LogRefused,
    LogTold,
    LogWanted,
    MembershipAnswered,
    PeerKnows,
    PeersAsked,
    PrepareEpoch,
    Publication,
    PublishInTxAnswered,
    RecoverLog,
    RouteAsked,
    RouteStands,
    RoutingTxBegan,
    RoutingTxEnded,
    StandingAccepted,
    TreeMessage,
    TxOpened,
    TxOutcome,
    TxOutcomes,
    TxSpec,
    TypeAnswered,
    VotesMissing,
)

RETRY = ("retry",)


class SiteCore:
    """One site: the client library's machine."""

    def __init__(
        self,
        name: NodeId,
        incarnation: int,
        brokers: Sequence[NodeId],
        entropy: Callable[[int], bytes],
        options: SiteOptions | None = None,
        check_proof: CheckProof | None = None,
    ) -> None:
        """`check_proof` is for decisions that peers pass on; None in a cluster without keys."""
        self.name, self.incarnation = name, incarnation
        self.options = options or SiteOptions()
        directory = self.directory = TypeDirectory(brokers)
        self.brokers, self.types, self.advertised = directory.brokers, directory.types, directory.advertised
        self.calls = Calls()
        self.link: NodeId | None = None
        self.tree = TreeSite(name, incarnation, self.brokers, self.calls)
        self.events = EventPublisher(directory)
        self.advertising = self.events.advertising
        participation = self.participation = Participation(
            name, self.types, self.calls, self.brokers, directory.rendezvous, entropy, self.options, check_proof
        )
        self.resources = OwnResources(
            participation.sub_transactions, participation.promises, participation.voters, entropy
        )
        own = self.own = OwnTransactions(name, incarnation, directory, self.resources, self.options.give_up_s)
        self.transactions, self.opening, self.ended, self.asking = own.transactions, own.opening, own.ended, own.asking
        self.asking_logs: dict[int, AskLog] = {}
        self.ending_logs: dict[int, EndLog] = {}
        self.recovering_logs: dict[int, RecoverLog] = {}
        self.reading_logs: dict[str, tuple[int, LogWanted]] = {}  # by the reader's name
        self.routes_asked: dict[int, int] = {}  # subscription -> the request that waits for its route
        self._retrying = False
        self._meant = (incarnation, 0)  # the lives that a letter for this one is addressed to; 0: whichever
        self._letters, self._publications = self._handlers(), participation.publications

    def _handlers(self) -> dict[type, Callable[[Any], list[Effect]]]:
        promises, subscribed = self.participation.promises, self.participation.subscribed
        return {
            PrepareEpoch: promises.on_prepare,
            EpochDecided: promises.on_decided,
            FinishNoted: promises.on_noted,
            PeerKnows: promises.on_peer_knows,
            LogDelivered: self._on_log,
            LogRefused: self._on_log_refused,
            HistoryRejected: self.participation.subscribed.on_history_rejected,
            StandingAccepted: subscribed.on_accepted,
            MembershipAnswered: self.participation.on_membership,
            TxOutcome: self.own.on_outcome,
            TxOutcomes: self.own.on_outcomes,
            TxOpened: self.own.on_opened,
            PublishInTxAnswered: self.own.on_tx_letter,
            VotesMissing: self.own.on_tx_letter,
            EventConfirmed: self.events.on_confirmed,
            EventsRefused: self.events.on_refused,
            TypeAnswered: self.events.on_type_answered,
            RouteStands: self._on_route,
            LogTold: self._on_log_told,
            AskReached: promises.on_reached_asked,
            LogEnded: self._on_log_ended,
            LogRecovered: self._on_log_recovered,
            RoutingTxBegan: self.tree.on_began,
            RoutingTxEnded: self.tree.on_ended,
        }

    @property
    def counter(self) -> int:
        """How many transactions this life of the site has begun under ids of its own."""
        return self.own.counter

    def rendezvous(self, family: str) -> NodeId:
        return self.directory.rendezvous(family)

    def coordinator_of(self, event_type: str) -> NodeId:
        return self.directory.coordinator_of(event_type)

    # --------------------------------------------------------------------------------------------------------- link

    def link_up(self, broker: NodeId, now: float) -> list[Effect]:
        """A link to a broker that knows nothing of this site yet."""
        self.link = broker
        effects = self.participation.link_up(broker) + self.events.announce() + self.tree.link_up(broker)
        return self._request(effects + self._repeat(0.0))

    def link_down(self) -> None:
        self.link = self.tree.link = None

    def receive(self, message: LinkMessage, now: float) -> list[Effect]:
        if type(message) is Envelope:
            if message.to.incarnation not in self._meant:
                return []  # for an earlier life, which numbered its requests and events as this one does
            letter = message.body
            handler = self._letters.get(type(letter))
            if handler is not None:
                effects = handler(letter)
                return self._carry_out(effects) if effects else effects
            if type(letter) is PeersAsked:
                return self._carry_out(self.participation.promises.on_peers_asked(letter, message.reply_to))
        elif type(message) is Dissemination and self.link is not None:
            publication = message.publication
            effects = self._publications[type(publication)](publication, message, self.link)
            return self._carry_out(effects) if effects else effects
        elif isinstance(message, TreeMessage) and self.link is not None:
            return self._carry_out(self.tree.receive(message))
        return []

    def routed(self, effects: list[Effect]) -> list[Effect]:
        """Carry out what the application asked of the tree's side of this site."""
        return self._carry_out(effects)

    # --------------------------------------------------------------------------------------------- types and events

    def advertise(
        self,
        request: int,
        definitions: Definitions,
        plans: tuple[TxSpec, ...] | None = None,
        members: frozenset[str] | None = None,
    ) -> list[Effect]:
        """Say that this site is going to publish a type; answered when the rendezvous has taken it."""
        return self._request(self.events.advertise(request, definitions, plans, members))

    def publish(self, request: int, event: Event) -> list[Effect]:
        """An ordinary event; for a durable type the answer means that it is on disk."""
        return self._request(self.events.publish(request, event))

    def publish_confirmed(
        self, event_type: str, events: Sequence[tuple[int, dict[str, Any], msgspec.Raw]]
    ) -> list[Effect]:
        """Events of a durable type, in order, each with its request, its body and that body encoded; each request is
        answered with the event's number when it is on disk. The caller has checked every body."""
        return self._request(self.events.publish_confirmed(event_type, events))

    def publish_all(self, event_type: str, bodies: tuple[msgspec.Raw, ...]) -> list[Effect]:
        """Ordinary events of an advertised type that is not durable, in order; the caller has checked and encoded
        each."""
        return self._carry_out(self.events.publish_all(event_type, bodies))

    def stop_repeating(self, subject: str) -> list[int]:
        """A broker did not act on a message about this subject, a kind and a name: it must not be sent again. Returns
        the requests that waited for the response."""
        kind, _, name = subject.partition(" ")
        match kind:
            case "type":
                return self.events.stop_advertising(name)
            case "tx":
                return self.own.stop_repeating(TxId(name))
            case "voter":
                return self.participation.subscribed.stop_registering(name)
            case "begin":
                return self.own.stop_opening(int(name))
        return []

    def refuse_events(self, event_type: str, error: TopsError) -> list[Effect]:
        """Durable events of this type that wait for a confirmation get none."""
        return self.events.refuse_events(event_type, error)

    # ------------------------------------------------------------------------------------------- own transactions

    def begin(self, request: int, spec: TxSpec, own: int | None = None) -> list[Effect]:
        """Open a transaction; answered with its id when events may be published in it.

        `own` is the number of resources that this site has enlisted and that take part.
        """
        return self._request(self.own.begin(request, spec, own))

    def enlist(
        self, number: int, promises: Sequence[Promise] = (), kept: Sequence[Memo] = (), compensatable: bool = False
    ) -> list[Effect]:
        """Resources of the site's own for transactions that it begins; `number` names them as it does a subscription.

        `promises` and `kept` are what an earlier life promised through them, see `recover`.
        """
        return self._carry_out(self.resources.enlist(number, promises, kept, compensatable=compensatable))

    def dismiss(self, number: int) -> list[Effect]:
        """These resources take part in nothing new."""
        return self._carry_out(self.resources.dismiss(number))

    def execute(self, request: int, spec: TxSpec, events: tuple[Event, ...]) -> list[Effect]:
        """A one-shot: begin, all events and commit in one message; answered with the outcome."""
        return self._request(self.own.execute(request, spec, events))

    def execute_all(self, spec: TxSpec, wanted: Sequence[tuple[int, tuple[Event, ...]]]) -> list[Effect]:
        """One-shots of one kind, each with the request that is answered with its outcome; they travel together."""
        return self._request(self.own.execute_all(spec, wanted))

    def contribute(self, tx: TxId, spec: TxSpec) -> None:
        """Publish in somebody else's public transaction, whose announcement this site has seen."""
        self.own.contribute(tx, spec)

    def tx_publish(self, request: int, tx: TxId, event: Event) -> list[Effect]:
        """An event inside a transaction; it travels under the transaction's type whatever its own."""
        return self._request(self.own.tx_publish(request, tx, event))

    def done(self, tx: TxId) -> list[Effect]:
        """A contributor to a public transaction has said all it wants."""
        return self._carry_out(self.own.done(tx))

    def commit(self, request: int, tx: TxId) -> list[Effect]:
        return self._request(self.own.commit(request, tx))

    def abort(self, request: int, tx: TxId, reason: str) -> list[Effect]:
        return self._request(self.own.abort(request, tx, reason))

    def ask_outcome(self, request: int, question: AskOutcome) -> list[Effect]:
        """What became of a transaction, also one of an earlier life of this site."""
        return self._request(self.own.ask_outcome(request, question))

    # ------------------------------------------------------------------------------------------------ subscriptions

    def subscribe(self, request: int, number: int, wish: Wish) -> list[Effect]:
        """`number` names the subscription in every later call."""
        return self._request(self.participation.subscribe(number, wish, request, self.link))

    def unsubscribe(self, number: int) -> list[Effect]:
        return self._carry_out(self.participation.unsubscribe(number, self.link))

    def recover(self, number: int, promises: Sequence[Promise], kept: Sequence[Memo] = ()) -> list[Effect]:
        """What a subscription's participant found again after a crash; call it right after `subscribe`.

        `promises` are those that are still open, `kept` those that were carried out and not yet forgotten.
        """
        return self._carry_out(self.participation.promises.recover(number, promises, kept))

    def call_done(self, call: int, result: Any) -> list[Effect]:
        """A participant answered a call."""
        effects = self.calls.done(call, result)
        return self._carry_out(effects) if effects else effects

    def participant_abort(self, number: int, tx: TxId, reason: str) -> list[Effect]:
        """A participant gives up by itself, at any moment before its promise."""
        executor = self.participation.executors.get(tx, {}).get(number)
        return [] if executor is None else self._carry_out(executor.give_up(reason))

    # --------------------------------------------------------------------------------------------------- questions

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

    def _on_route(self, stands: RouteStands) -> list[Effect]:
        request = self.routes_asked.pop(stands.subscription, None)
        return [] if request is None else [Answer(request, stands.subscription)]

    def ask_log(self, request: int, event_type: str) -> list[Effect]:
        """How far a durable type's log is decided; repeated until it is answered or `forget_log` ends it."""
        question = self.asking_logs[request] = AskLog(request=request, event_type=event_type)
        return self._request([Post(Address(self.coordinator_of(event_type)), question)])

    def forget_log(self, request: int) -> None:
        """Nobody waits for that answer any more."""
        self.asking_logs.pop(request, None)
        self.ending_logs.pop(request, None)
        self.recovering_logs.pop(request, None)

    def recover_log(
        self, request: int, event_type: str, replicas: tuple[str, ...], needed: int, accept_loss: bool
    ) -> list[Effect]:
        """A stale journal's log goes on in a new history; repeated until it is answered or `forget_log` gives it up."""
        asked = self.recovering_logs[request] = RecoverLog(
            request=request, event_type=event_type, replicas=replicas, needed=needed, accept_loss=accept_loss
        )
        return self._request([Post(Address(self.coordinator_of(event_type)), asked)])

    def end_log(self, request: int, event_type: str, name: str, *, operator: bool = False) -> list[Effect]:
        """A durable subscription ends for good; repeated until it is answered or `forget_log` gives it up.

        `operator`: somebody else's, by the name that the log knows it by."""
        order = self.ending_logs[request] = EndLog(request=request, event_type=event_type, name=name, operator=operator)
        return self._request([Post(Address(self.coordinator_of(event_type)), order)])

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
            return self.participation.subscribed.on_log(delivered)
        request, wanted = reading
        if delivered.after != wanted.position:
            return []  # of an earlier question
        del self.reading_logs[delivered.name]
        return [Answer(request, delivered)]

    def _on_log_refused(self, refused: LogRefused) -> list[Effect]:
        reading = self.reading_logs.pop(refused.name, None)
        if reading is None:
            return self.participation.subscribed.on_log_refused(refused)
        text = f"the log of {refused.event_type!r} begins at {refused.oldest}; what was before is no longer kept"
        return [Answer(reading[0], error=NotReachable(text))]

    def _on_log_ended(self, ended: LogEnded) -> list[Effect]:
        return [] if self.ending_logs.pop(ended.request, None) is None else [Answer(ended.request)]

    def _on_log_recovered(self, recovered: LogRecovered) -> list[Effect]:
        known = self.recovering_logs.pop(recovered.request, None)
        return [] if known is None else [Answer(recovered.request, recovered)]

    def _on_log_told(self, told: LogTold) -> list[Effect]:
        return [] if self.asking_logs.pop(told.request, None) is None else [Answer(told.request, told)]

    # -------------------------------------------------------------------------------------------------------- time

    def timer(self, key: tuple[str, ...], now: float) -> list[Effect]:
        if key == RETRY:
            self._retrying = False
            return self._request(self._repeat(self.options.retry_s))
        if key[0] == ROUTING_TIMER:
            return self._carry_out(self.tree.timer(key))
        return self._carry_out(self.participation.on_timer(key))

    def _repeat(self, elapsed_s: float) -> list[Effect]:
        """Ask again for whatever is unanswered."""
        effects = self.events.repeat_events() + self.own.repeat(elapsed_s)
        about_logs: list[AskLog | EndLog | RecoverLog] = [
            *self.asking_logs.values(),
            *self.ending_logs.values(),
            *self.recovering_logs.values(),
        ]
        for asked in about_logs:
            effects.append(Post(Address(self.coordinator_of(asked.event_type)), asked))
        for _, wanted in self.reading_logs.values():
            effects.append(Post(Address(self.coordinator_of(wanted.definitions[-1].name)), wanted))
        effects += self.own.repeat_openings(elapsed_s) + self.events.repeat_types()
        for number in list(self.routes_asked):
            effects += self._route_question(number)
        return effects

    def _waiting(self) -> bool:
        asks = self.asking_logs or self.ending_logs or self.recovering_logs or self.reading_logs or self.routes_asked
        return bool(asks or self.events.waits() or self.own.waits())

    # ------------------------------------------------------------------------------------------------- carrying out

    def _carry_out(self, effects: list[Effect]) -> list[Effect]:
        """Turn letters and publications into messages on the link; without one they are said again later."""
        link = self.link
        if link is None:
            return [effect for effect in effects if not isinstance(effect, Post | Disseminate | Send)]
        for index, effect in enumerate(effects):
            if type(effect) is Post:
                effects[index] = Send(link, Envelope(to=effect.to, body=effect.letter))
            elif type(effect) is Disseminate:
                effects[index] = Send(link, self._dissemination(effect.publication))
        return effects

    def _request(self, effects: list[Effect]) -> list[Effect]:
        """Carry out what the application asked for, and see to it that it is asked for again until it is answered."""
        carried = self._carry_out(effects)
        if not self._retrying and self._waiting():
            self._retrying = True
            carried.append(SetTimer(RETRY, self.options.retry_s))
        return carried

    def _dissemination(self, publication: Publication) -> Dissemination:
        route = self.directory.route(publication.event_type)
        return Dissemination(
            rendezvous=route.coordinator,
            upward=True,
            early=not route.durable,
            publication=publication,
            lineage=route.lineage,
        )


def default_local_outcome(durable: bool, tx_type: TxType) -> LocalOutcome:
    """What local subscribers go by unless the initiator says otherwise: on a durable type, by the log."""
    return LocalOutcome.FOLLOWS if durable and tx_type is TxType.DISTRIBUTED else LocalOutcome.INDEPENDENT


def with_default_outcome(spec: TxSpec, durable: bool) -> TxSpec:
    return msgspec.structs.replace(spec, local_outcome=default_local_outcome(durable, spec.tx_type))
