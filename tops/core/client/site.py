"""A site without its socket: requests of an application and messages of its broker go in, effects come out.

The publisher's side are `EventPublisher` (event types and ordinary events) and `OwnTransactions`; the subscriber's side
is `Participation`. A site has one link at a time. On a new link it announces everything that the broker must know, and
repeats every request that has no response yet.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tops.core.client.event_publisher import EventPublisher
from tops.core.client.gathering import GatheredEvent, Gathering
from tops.core.client.own_resources import OwnResources
from tops.core.client.own_transactions import OwnTransactions
from tops.core.client.type_directory import TypeDirectory
from tops.core.commit.decision_sender import CheckProof
from tops.core.ordering.site import SiteOrdering
from tops.core.participant.calls import Calls
from tops.core.participant.participation import Participation, SiteOptions, Wish
from tops.model.errors import NotReachable, TopsError
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.ordering import OrderingDomain
from tops.model.transactions import LocalOutcome, TxType
from tops.protocol.effects import CompleteRequest, Disseminate, Effect, Memo, PreparedWork, SendOnLink, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    AdvertisementHandled,
    ConfirmRoute,
    CutMade,
    DecisionRelayed,
    Definitions,
    Dissemination,
    EndLog,
    Envelope,
    EpochDecided,
    Event,
    EventConfirmed,
    EventsRejected,
    FinishNoted,
    FollowLog,
    FollowRejected,
    GetAppliedIndex,
    GetLogState,
    GetOutcome,
    HistoryRejected,
    IndexesSkipped,
    LinkMessage,
    LogDelivered,
    LogEnded,
    LogRecovered,
    LogStateReported,
    MembershipReported,
    OrderedPublished,
    PrepareEpoch,
    Publication,
    PublishInTxHandled,
    QueryPeers,
    RecoverLog,
    RouteConfirmed,
    StandingAccepted,
    TxOpened,
    TxOutcome,
    TxOutcomes,
    TxSpec,
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
        domains: Sequence[OrderingDomain] = (),
    ) -> None:
        """`check_proof` checks decisions that peers relay; None in a cluster without keys. `domains` are the ordering
        domains of the cluster."""
        self.name, self.incarnation = name, incarnation
        self.options = options or SiteOptions()
        directory = self.directory = TypeDirectory(brokers, domains)
        self.brokers, self.types, self.advertised = directory.brokers, directory.types, directory.advertised
        self.calls = Calls()
        self.link: NodeId | None = None
        self.events = EventPublisher(directory)
        self.advertising = self.events.advertising
        participation = self.participation = Participation(
            name, self.types, self.calls, self.brokers, directory.rendezvous, entropy, self.options, check_proof
        )
        self.ordering = SiteOrdering(domains, participation.subscriptions, self.options.retry_s)
        self.resources = OwnResources(
            participation.sub_transactions, participation.prepared_epochs, participation.voters, entropy
        )
        own = self.own = OwnTransactions(name, incarnation, directory, self.resources, self.options.give_up_s)
        self.transactions, self.opening, self.ended, self.outcome_queries = (
            own.transactions,
            own.opening,
            own.ended,
            own.outcome_queries,
        )
        self.pending_log_requests: dict[int, GetLogState] = {}
        self.ending_logs: dict[int, EndLog] = {}
        self.recovering_logs: dict[int, RecoverLog] = {}
        self.reading_logs: dict[str, tuple[int, FollowLog]] = {}  # by the reader's name
        self.routes_requested: dict[int, int] = {}  # subscription -> the request that waits for its route
        self._retrying = False
        self._meant = (incarnation, 0)  # incarnations in addresses that reach this one; 0: any
        self.gathering = Gathering(self._publish_gathered, self.execute_all)
        self._message_handlers, self._publications = self._handlers(), participation.publications

    def _handlers(self) -> dict[type, Callable[[Any], list[Effect]]]:
        prepared_epochs, subscribed = self.participation.prepared_epochs, self.participation.subscribed
        return {
            PrepareEpoch: prepared_epochs.on_prepare,
            EpochDecided: prepared_epochs.on_decided,
            FinishNoted: prepared_epochs.on_noted,
            DecisionRelayed: prepared_epochs.on_decision_relayed,
            LogDelivered: self._on_log,
            FollowRejected: self._on_follow_rejected,
            HistoryRejected: self.participation.subscribed.on_history_rejected,
            StandingAccepted: subscribed.on_accepted,
            MembershipReported: self.participation.on_membership,
            TxOutcome: self.own.on_outcome,
            TxOutcomes: self.own.on_outcomes,
            TxOpened: self.own.on_opened,
            PublishInTxHandled: self.own.on_tx_message,
            VotesMissing: self.own.on_tx_message,
            EventConfirmed: self.events.on_confirmed,
            EventsRejected: self.events.on_events_rejected,
            AdvertisementHandled: self.events.on_advertisement_handled,
            RouteConfirmed: self._on_route,
            LogStateReported: self._on_log_state,
            GetAppliedIndex: prepared_epochs.on_get_applied_index,
            LogEnded: self._on_log_ended,
            LogRecovered: self._on_log_recovered,
            CutMade: self.ordering.on_cut,
        }

    @property
    def counter(self) -> int:
        """How many transactions this incarnation of the site has begun under ids of its own."""
        return self.own.counter

    def rendezvous(self, family: str) -> NodeId:
        return self.directory.rendezvous(family)

    def coordinator_of(self, event_type: str) -> NodeId:
        return self.directory.coordinator_of(event_type)

    # --------------------------------------------------------------------------------------------------------- link

    def link_up(self, broker: NodeId, now: float) -> list[Effect]:
        """A link to a broker that has no state of this site yet."""
        self.link = broker
        effects = self.participation.link_up(broker) + self.ordering.link_up(broker) + self.events.announce()
        return self._request(effects + self._repeat(0.0))

    def link_down(self) -> None:
        self.link = None

    def receive(self, message: LinkMessage, now: float) -> list[Effect]:
        if type(message) is Envelope:
            if message.to.incarnation not in self._meant:
                return []  # for an earlier incarnation, whose requests and events had the same numbers as these
            body = message.body
            handler = self._message_handlers.get(type(body))
            if handler is not None:
                effects = handler(body)
                return self._carry_out(effects) if effects else effects
            if type(body) is QueryPeers:
                return self._carry_out(self.participation.prepared_epochs.on_query_peers(body, message.reply_to))
        elif type(message) is Dissemination and self.link is not None:
            publication = message.publication
            if type(publication) is OrderedPublished or type(publication) is IndexesSkipped:
                return self._carry_out(self.ordering.on_publication(message, now))
            effects = self._publications[type(publication)](publication, message, self.link)
            return self._carry_out(effects) if effects else effects
        return []

    # --------------------------------------------------------------------------------------------- types and events

    def advertise(
        self,
        request: int,
        definitions: Definitions,
        plans: tuple[TxSpec, ...] | None = None,
        members: frozenset[str] | None = None,
    ) -> list[Effect]:
        """Advertise a type; the request completes when the rendezvous has accepted it."""
        return self._request(self.events.advertise(request, definitions, plans, members))

    def publish(self, request: int, event: Event) -> list[Effect]:
        """Publish an ordinary event; for a durable type the request completes when the event is on disk."""
        return self._request(self.events.publish(request, event))

    def _publish_gathered(self, event_type: str, events: Sequence[GatheredEvent]) -> list[Effect]:
        if self.types.whole(event_type).durable:
            return self._request(self.events.publish_confirmed(event_type, events))
        return self._carry_out(self.events.publish_all(event_type, tuple([encoded for _, _, encoded in events])))

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

    def reject_events(self, event_type: str, error: TopsError) -> list[Effect]:
        """End the requests for durable events of this type with an error."""
        return self.events.reject_events(event_type, error)

    # ------------------------------------------------------------------------------------------- own transactions

    def begin(self, request: int, spec: TxSpec, own: int | None = None) -> list[Effect]:
        """Open a transaction; the request completes with its id when it accepts events.

        `own` is the number of resources that this site has enlisted and that take part.
        """
        return self._request(self.own.begin(request, spec, own))

    def enlist(
        self,
        number: int,
        prepared_work: Sequence[PreparedWork] = (),
        kept: Sequence[Memo] = (),
        compensatable: bool = False,
    ) -> list[Effect]:
        """Enlist resources of the site in transactions that it begins; `number` names them like a subscription.

        `prepared_work` and `kept` are from an earlier incarnation, see `recover`.
        """
        return self._carry_out(self.resources.enlist(number, prepared_work, kept, compensatable=compensatable))

    def dismiss(self, number: int) -> list[Effect]:
        """End the part of these resources in transactions."""
        return self._carry_out(self.resources.dismiss(number))

    def execute(self, request: int, spec: TxSpec, events: tuple[Event, ...]) -> list[Effect]:
        """Run a one-shot: begin, all events and commit in one message. The request completes with the outcome."""
        return self._request(self.own.execute(request, spec, events))

    def execute_all(self, spec: TxSpec, wanted: Sequence[tuple[int, tuple[Event, ...]]]) -> list[Effect]:
        """Run one-shots of one kind, each with its request, in one message."""
        return self._request(self.own.execute_all(spec, wanted))

    def contribute(self, tx: TxId, spec: TxSpec) -> None:
        """Publish in a public transaction of another site, whose announcement this site has received."""
        self.own.contribute(tx, spec)

    def tx_publish(self, request: int, tx: TxId, event: Event) -> list[Effect]:
        """Publish an event inside a transaction; it travels under the transaction's type, whatever its own type is."""
        return self._request(self.own.tx_publish(request, tx, event))

    def done(self, tx: TxId) -> list[Effect]:
        """A contributor to a public transaction has published everything that it wants to."""
        return self._carry_out(self.own.done(tx))

    def commit(self, request: int, tx: TxId) -> list[Effect]:
        return self._request(self.own.commit(request, tx))

    def abort(self, request: int, tx: TxId, reason: str) -> list[Effect]:
        return self._request(self.own.abort(request, tx, reason))

    def get_outcome(self, request: int, query: GetOutcome) -> list[Effect]:
        """Request the outcome of a transaction, also one of an earlier incarnation of this site."""
        return self._request(self.own.get_outcome(request, query))

    # ------------------------------------------------------------------------------------------------ subscriptions

    def subscribe(self, request: int, number: int, wish: Wish) -> list[Effect]:
        """`number` names the subscription in every later call."""
        effects = self.participation.subscribe(number, wish, request, self.link)
        known = self.participation.subscriptions.get(number)
        if known is not None:
            effects += self.ordering.added(known)
        return self._request(effects)

    def unsubscribe(self, number: int) -> list[Effect]:
        known = self.participation.subscriptions.get(number)
        effects = self.participation.unsubscribe(number, self.link)
        if known is not None:
            effects += self.ordering.removed(known)
        return self._carry_out(effects)

    def recover(self, number: int, prepared_work: Sequence[PreparedWork], kept: Sequence[Memo] = ()) -> list[Effect]:
        """What a subscription's participant found after a crash; to be called right after `subscribe`.

        `prepared_work` waits for decisions; `kept` are memos of commits that are carried out and not noted yet.
        """
        return self._carry_out(self.participation.prepared_epochs.recover(number, prepared_work, kept))

    def call_done(self, call: int, result: Any) -> list[Effect]:
        """A participant has returned the result of a call."""
        effects = self.calls.done(call, result)
        return self._carry_out(effects) if effects else effects

    def participant_abort(self, number: int, tx: TxId, reason: str) -> list[Effect]:
        """A participant aborts by itself, at any moment before it is prepared."""
        executor = self.participation.executors.get(tx, {}).get(number)
        return [] if executor is None else self._carry_out(executor.give_up(reason))

    # --------------------------------------------------------------------------------------------------- questions

    def confirm_route(self, request: int, number: int) -> list[Effect]:
        """The request completes when events that are published from then on reach the subscription."""
        self.routes_requested[number] = request
        return self._request(self._route_confirmation(number))

    def _route_confirmation(self, number: int) -> list[Effect]:
        known = self.participation.subscriptions.get(number)
        if known is None:
            self.routes_requested.pop(number, None)
            return []
        return [SendTo(Address(known.coordinator), ConfirmRoute(subscription=number))]

    def _on_route(self, stands: RouteConfirmed) -> list[Effect]:
        number = stands.subscription
        effects = self.ordering.on_route(number)
        request = self.routes_requested.pop(number, None)
        if request is None:
            return effects
        known = self.participation.subscriptions.get(number)
        if known is not None and self.ordering.is_ordered(known):
            return effects + self.ordering.complete_when_ordered(request, number)
        return [*effects, CompleteRequest(request, number)]

    def get_log_state(self, request: int, event_type: str) -> list[Effect]:
        """Request the state of a durable type's log; sent until a response or `cancel_log_request` ends it."""
        query = self.pending_log_requests[request] = GetLogState(request=request, event_type=event_type)
        return self._request([SendTo(Address(self.coordinator_of(event_type)), query)])

    def cancel_log_request(self, request: int) -> None:
        """Stop repeating the request: nothing waits for its response any more."""
        self.pending_log_requests.pop(request, None)
        self.ending_logs.pop(request, None)
        self.recovering_logs.pop(request, None)

    def recover_log(
        self, request: int, event_type: str, replicas: tuple[str, ...], needed: int, accept_loss: bool
    ) -> list[Effect]:
        """Continue a stale journal's log in a new history; sent until a response or `cancel_log_request` ends it."""
        message = self.recovering_logs[request] = RecoverLog(
            request=request, event_type=event_type, replicas=replicas, needed=needed, accept_loss=accept_loss
        )
        return self._request([SendTo(Address(self.coordinator_of(event_type)), message)])

    def end_log(self, request: int, event_type: str, name: str, *, operator: bool = False) -> list[Effect]:
        """End a durable subscription permanently; sent until a response or `cancel_log_request` ends it.

        `operator`: the subscription of another identity, by its name within the log."""
        order = self.ending_logs[request] = EndLog(request=request, event_type=event_type, name=name, operator=operator)
        return self._request([SendTo(Address(self.coordinator_of(event_type)), order)])

    def read_log(self, request: int, name: str, event_type: str, after: int, entries_max: int) -> list[Effect]:
        """Read some of the entries that follow a number, without a durable subscription: under a name of the reader's
        own, one read at a time. Sent until there is a response; `read_log_done` ends it."""
        wanted = self._reading(name, event_type, after, entries_max)
        self.reading_logs[name] = (request, wanted)
        return self._request([SendTo(Address(self.coordinator_of(event_type)), wanted)])

    def read_log_done(self, name: str, event_type: str) -> list[Effect]:
        self.reading_logs.pop(name, None)
        return self._carry_out(
            [SendTo(Address(self.coordinator_of(event_type)), self._reading(name, event_type, -1, 0))]
        )

    def _reading(self, name: str, event_type: str, after: int, entries_max: int) -> FollowLog:
        return FollowLog(
            name=name,
            definitions=self.types.definitions(event_type),
            filter=Filter(),
            position=after,
            start="",
            credit=entries_max,
            voter=None,
            ephemeral=True,
        )

    def _on_log(self, delivered: LogDelivered) -> list[Effect]:
        reading = self.reading_logs.get(delivered.name)
        if reading is None:
            return self.participation.subscribed.on_log(delivered)
        request, wanted = reading
        if delivered.after != wanted.position:
            return []  # the response to an earlier request
        del self.reading_logs[delivered.name]
        return [CompleteRequest(request, delivered)]

    def _on_follow_rejected(self, rejected: FollowRejected) -> list[Effect]:
        reading = self.reading_logs.pop(rejected.name, None)
        if reading is None:
            return self.participation.subscribed.on_follow_rejected(rejected)
        text = (
            f"the log of {rejected.event_type!r} begins at {rejected.oldest}; entries before it are no longer retained"
        )
        return [CompleteRequest(reading[0], error=NotReachable(text))]

    def _on_log_ended(self, ended: LogEnded) -> list[Effect]:
        return [] if self.ending_logs.pop(ended.request, None) is None else [CompleteRequest(ended.request)]

    def _on_log_recovered(self, recovered: LogRecovered) -> list[Effect]:
        known = self.recovering_logs.pop(recovered.request, None)
        return [] if known is None else [CompleteRequest(recovered.request, recovered)]

    def _on_log_state(self, reported: LogStateReported) -> list[Effect]:
        return (
            []
            if self.pending_log_requests.pop(reported.request, None) is None
            else [CompleteRequest(reported.request, reported)]
        )

    # -------------------------------------------------------------------------------------------------------- time

    def timer(self, key: tuple[str, ...], now: float) -> list[Effect]:
        if key == RETRY:
            self._retrying = False
            return self._request(self._repeat(self.options.retry_s))
        if key[0] == "ordering":
            return self._carry_out(self.ordering.on_timer(*key[1:]))
        return self._carry_out(self.participation.on_timer(key))

    def _repeat(self, elapsed_s: float) -> list[Effect]:
        """Repeat every request that has no response yet."""
        effects = self.events.repeat_events() + self.own.repeat(elapsed_s)
        about_logs: list[GetLogState | EndLog | RecoverLog] = [
            *self.pending_log_requests.values(),
            *self.ending_logs.values(),
            *self.recovering_logs.values(),
        ]
        for message in about_logs:
            effects.append(SendTo(Address(self.coordinator_of(message.event_type)), message))
        for _, wanted in self.reading_logs.values():
            effects.append(SendTo(Address(self.coordinator_of(wanted.definitions[-1].name)), wanted))
        effects += self.own.repeat_openings(elapsed_s) + self.events.repeat_types()
        for number in list(self.routes_requested):
            effects += self._route_confirmation(number)
        return effects

    def _waiting(self) -> bool:
        requests = (
            self.pending_log_requests
            or self.ending_logs
            or self.recovering_logs
            or self.reading_logs
            or self.routes_requested
        )
        return bool(requests or self.events.waits() or self.own.waits())

    # ------------------------------------------------------------------------------------------------- carrying out

    def _carry_out(self, effects: list[Effect]) -> list[Effect]:
        """Turn addressed messages and publications into messages on the link. Without a link they are dropped here:
        whatever needs them is repeated when there is one."""
        link = self.link
        if link is None:
            return [effect for effect in effects if not isinstance(effect, SendTo | Disseminate)]
        for index, effect in enumerate(effects):
            if type(effect) is SendTo:
                effects[index] = SendOnLink(link, Envelope(to=effect.to, body=effect.message))
            elif type(effect) is Disseminate:
                effects[index] = SendOnLink(link, self._dissemination(effect.publication))
        return effects

    def _request(self, effects: list[Effect]) -> list[Effect]:
        """Carry out a request of the application, and set the timer that repeats it until there is a response."""
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
            early=not (route.durable or route.ordered),
            publication=publication,
            lineage=route.lineage,
        )


def default_local_outcome(durable: bool, tx_type: TxType) -> LocalOutcome:
    """The local outcome unless the initiator chooses one: on a durable type local subscribers follow the log."""
    return LocalOutcome.FOLLOWS if durable and tx_type is TxType.DISTRIBUTED else LocalOutcome.INDEPENDENT


def with_default_outcome(spec: TxSpec, durable: bool) -> TxSpec:
    return msgspec.structs.replace(spec, local_outcome=default_local_outcome(durable, spec.tx_type))
