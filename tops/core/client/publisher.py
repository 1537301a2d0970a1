"""A site's own transactions: what it asked for, and who at the site waits for which answer.

Answers can get lost with a link or a broker. Whatever is open is asked for again: an event or a begin by repeating it,
since the other side recognises repetitions, a one-shot by asking for its outcome.
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

# Looked at with every message, and an enum's members take long to find by their class.
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
    wish: str | None = None  # "commit" or "abort", once asked for
    reason: str = ""
    outcome: TxOutcome | None = None
    waited_s: float = 0.0
    one_shot: bool = False
    unchecked: bool = False  # the application was told that votes are missing, and may not come back
    contributed: bool = False  # somebody else's transaction
    own: tuple[int, Pseudonym] | None = None  # resources of the site's own that take part, and their name
    operator: bool = False  # somebody else's private one, which this site can only end
    incarnation: int = 0  # of the coordinator, as it was when it opened the transaction
    size: int = 0  # in bytes, with all events that were numbered here

    @classmethod
    def begun(cls, tx: TxId, spec: TxSpec, coordinator: NodeId) -> "PublisherTx":
        """One whose events are numbered here if nobody else publishes in it."""
        numbering = EventCoordinator(tx, spec.event_type) if spec.access is PRIVATE else None
        return cls(tx, spec, coordinator, numbering, size=logged_bytes(tx, spec.event_type, spec.attributes))

    @classmethod
    def of_one_shot(cls, tx: TxId, spec: TxSpec, coordinator: NodeId, request: int) -> "PublisherTx":
        """One that is committing from its beginning, on behalf of that request."""
        return cls(tx, spec, coordinator, state=COMMITTING, wish="commit", ending=[request], one_shot=True)

    # ------------------------------------------------------------------------------------------------------ opening

    def await_census(self, request: int) -> None:
        """The site itself has begun it, on behalf of that request.

        If the announcement was faster than the id, a participant at this site may publish in it already: what it asked
        for stays asked for.
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
        """An event for the transaction: numbered here if the site is its only publisher."""
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
        """Ask for commitment, or wait once more after `UncheckedTransaction`."""
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
        """Give it up; the answer is the outcome, which is a commit if that was decided before."""
        if self.outcome is not None and not self.outcome.locals_wait:
            return [self._completion(request, self.outcome, aborting=True)]
        self.ending.append(request)
        self.wish, self.reason, self.waited_s = "abort", reason[:TEXT_MAX], 0.0
        return [self._abort_order()]

    def on_votes_missing(self, missing: VotesMissing) -> list[Effect]:
        if self.one_shot:
            return []  # nobody is going to say whether to wait on: it ends with its votes, or with its time
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
            # Events and the final word still go to local subscribers.
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
        """Whether an answer from outside is still wanted, by somebody at this site or to forget the transaction."""
        return bool(self.opening is not None or self.ending or self.publishing or self.unchecked)

    def repeat(self, elapsed_s: float, give_up_s: float) -> list[Effect]:
        """An answer is overdue: ask again, or, after long, tell the application that we do not know."""
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
        """The requests that are not answered yet."""
        return [*([self.opening] if self.opening is not None else []), *self.ending, *self.publishing]

    def _give_up(self) -> list[Effect]:
        waiting = self.waiting
        self.opening, self.ending, self.unchecked = None, [], False
        self.publishing.clear()
        return [CompleteRequest(request, error=OutcomeUnknown(self.tx, self.coordinator)) for request in waiting]


def aborted(outcome: TxOutcome) -> TransactionAborted:
    """What a publisher is told about an abort."""
    stale = outcome.stale
    rejection = rejection_of(outcome)
    if stale is None:
        return TransactionAborted(outcome.tx, rejection)
    return JournalStale(outcome.tx, rejection, stale.event_type, stale.index, stale.replica, stale.replica_index)


def rejection_of(outcome: TxOutcome) -> Rejection:
    """Why a transaction aborted, also where nobody has said it."""
    return outcome.rejection or UNSTATED
