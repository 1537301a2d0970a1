"""A site's own transactions: what it requested, and which requests of the application wait for which response.

Responses can get lost with a link or a broker. The site repeats every open request: an event or a begin is sent again,
since the other side recognises repetitions; for a one-shot it requests the outcome, since a second execution must be
ruled out.
"""

import msgspec

from tops.core.coordinator.event_coordinator import EventCoordinator
from tops.model.errors import (
    CensusUnfulfilled,
    JournalStale,
    OutcomeUnknown,
    TopsError,
    TransactionAborted,
    TransactionClosed,
    TransactionTooLarge,
    UncheckedTransaction,
)
from tops.model.ids import NodeId, Pseudonym, TxId
from tops.model.rejections import Rejection, RejectionCode, over_limit
from tops.model.sizes import TEXT_MAX, encoded_bytes, logged_bytes
from tops.model.transactions import Access, Outcome, TxState
from tops.protocol.effects import CompleteRequest, Disseminate, Effect, SendTo, TxEnded
from tops.protocol.messages import (
    AbortTx,
    Address,
    BeginTx,
    CommitTx,
    Event,
    GetOutcome,
    PublishInTx,
    PublishInTxHandled,
    TxOpened,
    TxOutcome,
    TxSpec,
    VotesMissing,
)

# Read with every message, and access to a member of an enum through its class is slow.
CENSUS, CENSUS_UNFULFILLED, ACTIVE, COMMITTING, COMMITTED, ABORTED = TxState
PRIVATE, COMMIT = Access.PRIVATE, Outcome.COMMITTED
UNSTATED = Rejection(RejectionCode.ABORTED)


class PublisherTx(msgspec.Struct, eq=False):
    """One transaction, seen from the site that publishes in it."""

    tx: TxId
    spec: TxSpec
    coordinator: NodeId
    numbering: EventCoordinator | None = None  # where the site is the only publisher
    begin_message: BeginTx | None = None  # repeated until the census has ended
    state: TxState = CENSUS
    opening: int | None = None  # the request that waits for the census
    ending: list[int] = []  # requests that wait for the outcome
    publishing: dict[int, Event] = {}  # public: requests that wait for a sequence number
    wish: str | None = None  # "commit" or "abort", once requested
    reason: str = ""
    outcome: TxOutcome | None = None
    waited_s: float = 0.0
    one_shot: bool = False
    unchecked: bool = False  # the application got `UncheckedTransaction` and has not chosen yet
    contributed: bool = False  # a transaction of another site
    own: tuple[int, Pseudonym] | None = None  # resources of the site's own that take part, and their name
    operator: bool = False  # a private transaction of another site, which this site can only end
    incarnation: int = 0  # of the coordinator, as it was when it opened the transaction
    size: int = 0  # in bytes, with all events that were numbered here

    @classmethod
    def begun(cls, tx: TxId, spec: TxSpec, coordinator: NodeId) -> "PublisherTx":
        """A transaction whose events are numbered here if no other site publishes in it."""
        numbering = EventCoordinator(tx, spec.event_type) if spec.access is PRIVATE else None
        return cls(tx, spec, coordinator, numbering, size=logged_bytes(tx, spec.event_type, spec.attributes))

    @classmethod
    def of_one_shot(cls, tx: TxId, spec: TxSpec, coordinator: NodeId, request: int) -> "PublisherTx":
        """A transaction that is committing from its beginning, for that request."""
        return cls(tx, spec, coordinator, state=COMMITTING, wish="commit", ending=[request], one_shot=True)

    # ------------------------------------------------------------------------------------------------------ opening

    def await_census(self, request: int) -> None:
        """The site itself has begun the transaction, for that request.

        If the announcement arrived before the id, a participant at this site may publish in it already: its requests
        stay open.
        """
        self.opening, self.state, self.contributed, self.waited_s = request, CENSUS, False, 0.0

    def on_opened(self, opened: TxOpened) -> list[Effect]:
        if self.state is not CENSUS:
            return []
        self.state, request, self.opening, self.begin_message = opened.state, self.opening, None, None
        self.incarnation = opened.incarnation
        if opened.state is ACTIVE:
            if self.numbering is not None:
                self.numbering.open()
            return [] if request is None else [CompleteRequest(request, self.tx)]
        rejection = opened.rejection or UNSTATED
        error: TopsError = TransactionAborted(self.tx, rejection)
        if opened.state is CENSUS_UNFULFILLED:
            error = CensusUnfulfilled(self.tx, rejection)
        effects = self.on_outcome(TxOutcome(tx=self.tx, outcome=Outcome.ABORTED, rejection=opened.rejection))
        return effects if request is None else [CompleteRequest(request, error=error), *effects]

    # --------------------------------------------------------------------------------------------------- publishing

    def publish(self, request: int, event: Event) -> list[Effect]:
        """Publish an event: it is numbered here if the site is the only publisher."""
        if self.state is not ACTIVE or self.wish is not None:
            return [CompleteRequest(request, error=TransactionClosed(self.tx, self.state.value))]
        if self.numbering is None:
            self.publishing[request] = event
            return [SendTo(Address(self.coordinator), PublishInTx(tx=self.tx, request=request, event=event))]
        grown = self.size + encoded_bytes(event)
        if (rejection := over_limit(grown)) is not None:
            return [CompleteRequest(request, error=TransactionTooLarge(self.tx, rejection))]
        self.size = grown
        published = self.numbering.admit(event)
        return [Disseminate(published), CompleteRequest(request, published.sequence)]

    def on_published(self, handled: PublishInTxHandled) -> list[Effect]:
        if self.publishing.pop(handled.request, None) is None:
            return []
        if handled.rejection is not None:
            return [CompleteRequest(handled.request, error=TransactionTooLarge(self.tx, handled.rejection))]
        if handled.sequence is None:
            return [CompleteRequest(handled.request, error=TransactionClosed(self.tx, handled.state.value))]
        return [CompleteRequest(handled.request, handled.sequence)]

    # ------------------------------------------------------------------------------------------------------- ending

    def commit(self, request: int) -> list[Effect]:
        """Request commit, or wait once more after `UncheckedTransaction`."""
        if self.outcome is not None and not self.outcome.locals_wait:
            return [self._completion(request, self.outcome)]
        if self.wish == "abort" or self.state not in (ACTIVE, COMMITTING, ABORTED):
            return [CompleteRequest(request, error=TransactionClosed(self.tx, self.state.value))]
        self.ending.append(request)
        self.wish, self.waited_s = "commit", 0.0
        if self.state is ACTIVE:
            self.state = COMMITTING
        last = None if self.numbering is None else self.numbering.last_sequence
        if self.numbering is not None:
            self.numbering.close(self.state)
        return [self._commit_order(last)]

    def abort(self, request: int, reason: str) -> list[Effect]:
        """Request an abort; the request completes with the outcome, which may be a commit that was decided before."""
        if self.outcome is not None and not self.outcome.locals_wait:
            return [self._completion(request, self.outcome, aborting=True)]
        self.ending.append(request)
        self.wish, self.reason, self.waited_s = "abort", reason[:TEXT_MAX], 0.0
        return [self._abort_order()]

    def on_votes_missing(self, missing: VotesMissing) -> list[Effect]:
        if self.one_shot:
            return []  # no application decides whether to wait: the transaction ends with its votes or its time-out
        self.unchecked = True
        waiting, self.ending = self.ending, []
        error = UncheckedTransaction(self.tx, missing.missing)
        return [CompleteRequest(request, error=error) for request in waiting]

    def on_outcome(self, outcome: TxOutcome) -> list[Effect]:
        known = self.outcome
        if known is not None and (outcome.locals_wait or not known.locals_wait):
            return []
        self.outcome = outcome
        committed = outcome.outcome is COMMIT
        self.state = COMMITTED if committed else ABORTED
        effects: list[Effect] = [] if known is not None else [TxEnded(self.tx, committed, outcome.reason)]
        if outcome.locals_wait:
            # Local subscribers still get events, and the commit or abort.
            self.state = ACTIVE if self.wish is None else COMMITTING
            return effects
        waiting, self.ending = self.ending, []
        for request in waiting:
            effects.append(self._completion(request, outcome, self.wish == "abort"))
        if self.opening is not None:
            effects.append(self._completion(self.opening, outcome))
            self.opening = None
        for request in self.publishing:
            effects.append(CompleteRequest(request, error=TransactionClosed(self.tx, self.state.value)))
        self.publishing.clear()
        return effects

    def _completion(self, request: int, outcome: TxOutcome, aborting: bool = False) -> Effect:
        if outcome.outcome is COMMIT:
            return CompleteRequest(request, outcome)
        if outcome.outcome is Outcome.UNKNOWN:
            return CompleteRequest(request, error=OutcomeUnknown(self.tx, self.coordinator))
        if aborting:
            return CompleteRequest(request, outcome)
        return CompleteRequest(request, error=aborted(outcome))

    # ------------------------------------------------------------------------------------------------------ repeating

    def waits(self) -> bool:
        """Whether a response is still missing, for a request of the application or to drop the transaction."""
        return bool(self.opening is not None or self.ending or self.publishing or self.unchecked)

    def repeat(self, elapsed_s: float, give_up_s: float) -> list[Effect]:
        """A response is overdue: repeat the request, or after `give_up_s` end it with `OutcomeUnknown`."""
        self.waited_s += elapsed_s
        if self.waited_s > give_up_s:
            return self._give_up()
        to = Address(self.coordinator)
        if self.begin_message is not None and self.state is CENSUS:
            return [SendTo(to, self.begin_message)]
        events: list[Effect] = [
            SendTo(to, PublishInTx(tx=self.tx, request=request, event=event))
            for request, event in self.publishing.items()
        ]
        return events + (self._repeat_wish(to) if self.ending or self.unchecked else [])

    def _repeat_wish(self, to: Address) -> list[Effect]:
        if self.one_shot or not self.ending:
            query = GetOutcome(tx=self.tx, tx_type=self.spec.tx_type, event_type=self.spec.event_type)
            return [SendTo(to, query)]
        if self.wish == "abort":
            return [self._abort_order()]
        return [self._commit_order(None if self.numbering is None else self.numbering.last_sequence)]

    def _commit_order(self, last_sequence: int | None) -> Effect:
        order = CommitTx(
            tx=self.tx,
            tx_type=self.spec.tx_type,
            event_type=self.spec.event_type,
            last_sequence=last_sequence,
            incarnation=self.incarnation,
        )
        return SendTo(Address(self.coordinator), order)

    def _abort_order(self) -> Effect:
        order = AbortTx(
            tx=self.tx,
            tx_type=self.spec.tx_type,
            event_type=self.spec.event_type,
            reason=self.reason,
            operator=self.operator,
        )
        return SendTo(Address(self.coordinator), order)

    @property
    def waiting(self) -> list[int]:
        """The requests that have not completed yet."""
        return [*([self.opening] if self.opening is not None else []), *self.ending, *self.publishing]

    def _give_up(self) -> list[Effect]:
        waiting = self.waiting
        self.opening, self.ending, self.unchecked = None, [], False
        self.publishing.clear()
        return [CompleteRequest(request, error=OutcomeUnknown(self.tx, self.coordinator)) for request in waiting]


def aborted(outcome: TxOutcome) -> TransactionAborted:
    """The error that a publisher gets for an abort."""
    stale = outcome.stale
    rejection = rejection_of(outcome)
    if stale is None:
        return TransactionAborted(outcome.tx, rejection)
    return JournalStale(outcome.tx, rejection, stale.event_type, stale.index, stale.replica, stale.replica_index)


def rejection_of(outcome: TxOutcome) -> Rejection:
    """Why a transaction aborted; a general text where the outcome names no reason."""
    return outcome.rejection or UNSTATED
