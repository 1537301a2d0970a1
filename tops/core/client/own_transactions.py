"""The transactions in which a site publishes: from their begin to their outcome, and requests for outcomes."""

from collections import OrderedDict
from collections.abc import Sequence

from tops.core.client.own_resources import OwnResources
from tops.core.client.publisher import PublisherTx, aborted, rejection_of
from tops.core.client.type_directory import TypeDirectory
from tops.model.errors import (
    InvalidEventType,
    InvalidTransaction,
    NotAdvertised,
    NotReachable,
    OutcomeUnknown,
    TopsError,
    TransactionClosed,
    UnknownTransaction,
)
from tops.model.ids import NodeId, TxId, tx_id
from tops.model.transactions import Access, Outcome, TxState, TxType
from tops.protocol.effects import CompleteRequest, Disseminate, Effect, SendTo
from tops.protocol.messages import (
    Address,
    BeginPublic,
    BeginTx,
    CensusOpened,
    Event,
    GetOutcome,
    OneShot,
    PublisherDone,
    PublishInTxHandled,
    RunOneShot,
    RunOneShots,
    TxOpened,
    TxOutcome,
    TxOutcomes,
    TxPublished,
    TxSpec,
    VotesMissing,
)

ENDED_MAX = 1000
# Read with every transaction, and access to a member of an enum through its class is slow.
CENSUS, ACTIVE, PUBLIC, DISTRIBUTED = TxState.CENSUS, TxState.ACTIVE, Access.PUBLIC, TxType.DISTRIBUTED


class OwnTransactions:
    """All transactions of one site as a publisher."""

    def __init__(
        self, site: NodeId, incarnation: int, directory: TypeDirectory, resources: OwnResources, give_up_s: float
    ) -> None:
        self.site, self.incarnation, self.directory, self.give_up_s = site, incarnation, directory, give_up_s
        self.resources = resources
        self.counter = 0
        self.transactions: dict[TxId, PublisherTx] = {}
        # Public transactions without an id yet, and for how many seconds.
        self.opening: dict[int, tuple[BeginPublic, float]] = {}
        self.ended: OrderedDict[TxId, TxOutcome] = OrderedDict()  # for requests after the end of a transaction
        self.outcome_queries: dict[TxId, tuple[GetOutcome, list[int]]] = {}

    def begin(self, request: int, spec: TxSpec, own: int | None = None) -> list[Effect]:
        """Open a transaction; the request completes with its id when it accepts events.

        `own` is the number of resources that this site has enlisted and that take part.
        """
        error = self._problem_with_spec(spec) or self._problem_with_own(spec, own)
        if error is not None:
            return [CompleteRequest(request, error=error)]
        coordinator = self.directory.coordinator_of(spec.event_type)
        if spec.access is PUBLIC:
            begin_public = BeginPublic(request=request, spec=spec)
            self.opening[request] = (begin_public, 0.0)
            return [SendTo(Address(coordinator), begin_public)]
        tx = self._new_id()
        if spec.tx_type is DISTRIBUTED:
            name = self.resources.new_name() if own is not None else None
            begin = BeginTx(tx=tx, spec=spec, own=name)
            own_tx = self.transactions[tx] = PublisherTx.begun(tx, spec, coordinator)
            own_tx.begin_message, own_tx.opening = begin, request
            own_tx.own = (own, name) if own is not None and name is not None else None
            return [SendTo(Address(coordinator), begin)]
        own_tx = self.transactions[tx] = PublisherTx.begun(tx, spec, coordinator)
        announced = CensusOpened(
            tx=tx, spec=spec, coordinator=coordinator, incarnation=self.incarnation, initiator=Address(coordinator)
        )
        own_tx.opening = request
        return [Disseminate(announced), *own_tx.on_opened(TxOpened(tx=tx, state=ACTIVE))]

    def execute(self, request: int, spec: TxSpec, events: tuple[Event, ...]) -> list[Effect]:
        """Run a one-shot: begin, all events and commit in one message. The request completes with the outcome."""
        return self.execute_all(spec, [(request, events)])

    def execute_all(self, spec: TxSpec, wanted: Sequence[tuple[int, tuple[Event, ...]]]) -> list[Effect]:
        """Run one-shots of one kind, each with its request, in one message."""
        error = self._problem_with_spec(spec)
        if error is not None:
            return [CompleteRequest(request, error=error) for request, _ in wanted]
        effects: list[Effect] = []
        run: list[OneShot] = []
        coordinator = self.directory.coordinator_of(spec.event_type)
        for request, events in wanted:
            error = self._problem_with_events(events)
            if error is not None:
                effects.append(CompleteRequest(request, error=error))
                continue
            tx = self._new_id()
            self.transactions[tx] = PublisherTx.of_one_shot(tx, spec, coordinator, request)
            run.append(OneShot(tx, events))
        if len(run) == 1:
            effects.append(SendTo(Address(coordinator), RunOneShot(tx=run[0].tx, spec=spec, events=run[0].events)))
        elif run:
            effects.append(SendTo(Address(coordinator), RunOneShots(spec=spec, transactions=tuple(run))))
        return effects

    def _problem_with_events(self, events: tuple[Event, ...]) -> TopsError | None:
        for event in events:
            error = self.directory.problem_with(event)
            if error is not None:
                return error
        return None

    def _problem_with_spec(self, spec: TxSpec) -> TopsError | None:
        if spec.event_type not in self.directory.advertised:
            return NotAdvertised(spec.event_type)
        try:
            spec.check()
        except TopsError as error:
            return error
        return None

    def _problem_with_own(self, spec: TxSpec, own: int | None) -> TopsError | None:
        if own is None:
            return None
        if not self.resources.knows(own):
            return InvalidTransaction("these resources are not enlisted here: call enlist() first")
        if spec.tx_type is not DISTRIBUTED or spec.access is not Access.PRIVATE:
            return InvalidTransaction("a publisher's own resources take part in private distributed transactions only")
        return None

    def _new_id(self) -> TxId:
        self.counter += 1
        return tx_id(self.site, self.incarnation, self.counter)

    def on_opened(self, opened: TxOpened) -> list[Effect]:
        if opened.request is not None:
            public = self.opening.pop(opened.request, None)
            if public is None:
                return []
            spec = public[0].spec
            own_tx = self.transactions.get(opened.tx)
            if own_tx is None:
                own_tx = PublisherTx.begun(opened.tx, spec, self.directory.coordinator_of(spec.event_type))
            own_tx.await_census(opened.request)
            if opened.state is not CENSUS:
                return own_tx.on_opened(opened)
            self.transactions[opened.tx] = own_tx
            return []
        known = self.transactions.get(opened.tx)
        if known is None:
            return []
        new = known.state is CENSUS
        effects = known.on_opened(opened)
        if known.state is ACTIVE:
            if new and known.own is not None:
                number, name = known.own
                effects = self.resources.begin(number, known.tx, known.spec, known.coordinator, name) + effects
        elif known.state is TxState.ABORTED:
            del self.transactions[opened.tx]
        return effects

    def contribute(self, tx: TxId, spec: TxSpec) -> None:
        """Publish in a public transaction of another site, whose announcement this site has received."""
        if tx not in self.transactions and tx not in self.ended:
            coordinator = self.directory.coordinator_of(spec.event_type)
            own_tx = self.transactions[tx] = PublisherTx.begun(tx, spec, coordinator)
            own_tx.state, own_tx.contributed = ACTIVE, True
            own_tx.operator = (
                tx.rsplit(".", 2)[0] not in self.directory.brokers
            )  # ids of public transactions come from brokers

    def tx_publish(self, request: int, tx: TxId, event: Event) -> list[Effect]:
        """Publish an event inside a transaction; it travels under the transaction's type, whatever its own type is."""
        known = self.transactions.get(tx)
        if known is None:
            return [CompleteRequest(request, error=self._no_longer_open(tx))]
        problem = self.directory.problem_with(event) if event.type in self.directory.types else None
        if problem is not None:
            return [CompleteRequest(request, error=problem)]
        effects = known.publish(request, event)
        if known.own is None:
            return effects
        numbered = [e.publication for e in effects if isinstance(e, Disseminate)]
        for published in numbered:
            if isinstance(published, TxPublished):
                effects += self.resources.on_event(known.own[0], tx, published.sequence, event)
        return effects

    def _no_longer_open(self, tx: TxId) -> TopsError:
        outcome = self.ended.get(tx)
        if outcome is None:
            return UnknownTransaction(tx)
        if outcome.outcome is Outcome.UNKNOWN:
            return OutcomeUnknown(tx, "its coordinator")
        if outcome.outcome is Outcome.ABORTED:
            return aborted(outcome)
        return TransactionClosed(tx, outcome.outcome.value)

    def done(self, tx: TxId) -> list[Effect]:
        """A contributor to a public transaction has published everything that it wants to."""
        known = self.transactions.get(tx)
        if known is None:
            return []
        if known.contributed and not known.waits():
            del self.transactions[tx]
        return [SendTo(Address(known.coordinator), PublisherDone(tx=tx))]

    def commit(self, request: int, tx: TxId) -> list[Effect]:
        known = self.transactions.get(tx)
        if known is None:
            return [CompleteRequest(request, error=self._no_longer_open(tx))]
        return known.commit(request)

    def abort(self, request: int, tx: TxId, reason: str) -> list[Effect]:
        known = self.transactions.get(tx)
        if known is not None:
            return known.abort(request, reason)
        if tx in self.ended and self.ended[tx].outcome is not Outcome.UNKNOWN:
            return [CompleteRequest(request, self.ended[tx])]
        return [CompleteRequest(request, error=self._no_longer_open(tx))]

    def get_outcome(self, request: int, query: GetOutcome) -> list[Effect]:
        """Request the outcome of a transaction, also one of an earlier incarnation of this site."""
        if query.event_type not in self.directory.types:
            rejection = InvalidEventType(f"event type {query.event_type!r} is not known here: advertise or subscribe")
            return [CompleteRequest(request, error=rejection)]
        self.outcome_queries.setdefault(query.tx, (query, []))[1].append(request)
        return self._send_query(query)

    def _send_query(self, query: GetOutcome) -> list[Effect]:
        return [SendTo(Address(self.directory.coordinator_of(query.event_type)), query)]

    def on_outcomes(self, message: TxOutcomes) -> list[Effect]:
        effects: list[Effect] = []
        for outcome in message.outcomes:
            effects += self.on_outcome(outcome)
        return effects

    def on_outcome(self, outcome: TxOutcome) -> list[Effect]:
        effects: list[Effect] = []
        known = self.transactions.get(outcome.tx)
        if known is not None:
            effects = known.on_outcome(outcome)
            if known.own is not None and outcome.outcome is Outcome.ABORTED:
                effects += self.resources.abandon(known.own[0], known.tx, rejection_of(outcome))
            if not outcome.locals_wait:
                del self.transactions[outcome.tx]
                if not known.one_shot:  # a one-shot gets no further requests
                    self._remember(outcome)
        if self.outcome_queries and not outcome.locals_wait and outcome.tx in self.outcome_queries:
            effects += [CompleteRequest(request, outcome) for request in self.outcome_queries.pop(outcome.tx)[1]]
        return effects

    def _remember(self, outcome: TxOutcome) -> None:
        self.ended[outcome.tx] = outcome
        if len(self.ended) > ENDED_MAX:
            self.ended.popitem(last=False)

    def on_tx_message(self, message: PublishInTxHandled | VotesMissing) -> list[Effect]:
        known = self.transactions.get(message.tx)
        if known is None:
            return []
        return (
            known.on_published(message) if isinstance(message, PublishInTxHandled) else known.on_votes_missing(message)
        )

    def stop_repeating(self, tx: TxId) -> list[int]:
        """The broker did not act on a message about this transaction. Returns the requests that waited for it."""
        known = self.transactions.pop(tx, None)
        return known.waiting if known is not None else []

    def stop_opening(self, request: int) -> list[int]:
        """The broker did not begin the public transaction of this request."""
        self.opening.pop(request, None)
        return [request]

    def repeat_openings(self, elapsed_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for request, (begin, waited_s) in list(self.opening.items()):
            coordinator = self.directory.coordinator_of(begin.spec.event_type)
            if waited_s + elapsed_s > self.give_up_s:
                del self.opening[request]
                error = NotReachable(f"broker {coordinator!r} does not respond: no transaction was begun")
                effects.append(CompleteRequest(request, error=error))
            else:
                self.opening[request] = (begin, waited_s + elapsed_s)
                effects.append(SendTo(Address(coordinator), begin))
        return effects

    def repeat(self, elapsed_s: float) -> list[Effect]:
        """Repeat every request that has no response yet."""
        effects: list[Effect] = []
        for known in list(self.transactions.values()):
            effects += known.repeat(elapsed_s, self.give_up_s)
            if known.state is CENSUS and not known.waits():
                del self.transactions[known.tx]  # given up before the application got its id
        for query, _ in self.outcome_queries.values():
            effects += self._send_query(query)
        return effects

    def waits(self) -> bool:
        if self.opening or self.outcome_queries:
            return True
        return any(t.waits() for t in self.transactions.values())
