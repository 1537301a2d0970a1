"""The sub-tx executor: one transaction at one subscription, from the census to its end.

    ASKED -> ENLISTED -> ACTIVE -> PREPARED -> removed     a distributed participant
    ASKED -> ACTIVE -> removed                             a local participant, which coordinates itself

One call to the application is in progress at a time. Before it is prepared, a participant may abort at any moment;
afterwards only the decision ends the sub-transaction, and the epoch that prepared it gets that decision.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import ParamSpec

from tops.core.participant.calls import Calls
from tops.model.errors import InvariantBroken
from tops.model.ids import NodeId, Pseudonym, TxId, hashed
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import TEXT_MAX
from tops.model.transactions import Scope, TxState, TxType, granted_scope
from tops.protocol.effects import (
    AbortTxCall,
    Alarm,
    CancelTimer,
    CommitTxCall,
    Deliver,
    Effect,
    JoinTx,
    Memo,
    NotifyTx,
    PrepareTx,
    SendTo,
    SetTimer,
)
from tops.protocol.messages import (
    Address,
    CensusReplied,
    EpochId,
    Event,
    GetMembership,
    MembershipReported,
    ParticipantAborted,
    TxSpec,
)


class SubTxState(Enum):
    ASKED = "asked"  # the application is choosing a scope
    ENLISTED = "enlisted"  # has replied to the census; ends with the published list
    ACTIVE = "active"  # events arrive; ends with prepare, a local commit order, or an abort
    PREPARED = "prepared"  # prepared and durable; only the decision ends it
    ENDED = "ended"


# Read with every message, and access to a member of an enum through its class is slow.
ASKED, ENLISTED, ACTIVE, PREPARED, ENDED = SubTxState
NONE, NON_TRANSACTIONAL, LOCAL, DISTRIBUTED = Scope
LOCAL_TX = TxType.LOCAL
FOLLOWED = Rejection(RejectionCode.ABORTED, "the transaction aborted")
OVERTAKEN = Rejection(RejectionCode.BUSY, "it is prepared in a later epoch")


Voted = Callable[[Rejection | None], list[Effect]]  # the vote: a NO, or None
P = ParamSpec("P")


class SubTxExecutor:
    """One sub-transaction as a machine: everything that it does outside is in the effects that it returns."""

    def __init__(
        self,
        tx: TxId,
        subscription: int,
        spec: TxSpec,
        coordinator: NodeId,
        calls: Calls,
        *,
        voter: str,
        pseudonym: Pseudonym,
        quiet_s: float,
        delivery_attempts: int,
        ended: "Callable[[SubTxExecutor], list[Effect]]",
    ) -> None:
        self.tx, self.subscription, self.spec, self.coordinator = tx, subscription, spec, coordinator
        self.voter, self.pseudonym = voter, pseudonym
        self.quiet_s, self.delivery_attempts = quiet_s, delivery_attempts
        self.state = ASKED
        self.scope = NONE
        self.last_sequence = 0
        self.events: list[Event] = []
        self._calls, self._ended = calls, ended
        self._steps: deque[Callable[[], list[Effect]]] = deque()
        self._busy = False
        self._failed: Rejection | None = None
        self._armed = False  # whether the timer is set that requests the membership after a silence
        self._notifying: tuple[int, Event, int] | None = None  # the event at the application, and its attempt
        self._preparing: Voted | None = None  # the continuation when the application has prepared
        self._voting: Voted | None = None  # gets the vote
        self._when_ended: list[Callable[[], list[Effect]]] = []
        self.log_number: int | None = None  # where it comes from a log
        self.epoch: EpochId | None = None  # the latest one that it was prepared in; only that one's decision counts
        self.undoing = False  # prepared work is being rolled back, as decided
        self._successor: SubTxExecutor | None = None  # the same transaction, prepared once more

    # ------------------------------------------------------------------------------------------------------ census

    def request_scope(self, initiator: Address, chosen: Callable[["SubTxExecutor"], list[Effect]]) -> list[Effect]:
        """Let the application choose its scope."""

        def reported(requested: Scope) -> list[Effect]:
            if self.state is not ASKED:
                return []
            spec = self.spec
            if requested is DISTRIBUTED and spec.tx_type is LOCAL_TX:
                alarm = Alarm("wrong-scope", f"{self.tx} is local: on_join returned the distributed scope")
                return [alarm, *self.take(NONE), *chosen(self)]
            return self.take(granted_scope(requested, spec.limit, spec.tx_type)) + chosen(self)

        call = self._calls.open(reported)
        return [JoinTx(self.subscription, call, self.tx, self.spec, initiator)]

    def take(self, scope: Scope) -> list[Effect]:
        """Take part with this scope."""
        self.scope = scope
        if scope is NONE:
            return self._end()
        self.state = ENLISTED if scope is DISTRIBUTED else ACTIVE
        return [self._arm()]

    def reply(self) -> list[Effect]:
        """Reply to the census: take part as a distributed participant."""
        replied = CensusReplied(tx=self.tx, pseudonym=self.pseudonym, event_type=self.spec.event_type)
        return [SendTo(Address(self.coordinator), replied)]

    def on_began(self, members: frozenset[str]) -> list[Effect]:
        if self.state is not ENLISTED:
            return []
        if hashed(self.pseudonym) not in members:
            return self._end()
        self.state = ACTIVE
        return []  # the timer has been set since the census

    def begin(self) -> None:
        """A participant with a standing registration begins a one-shot without a census."""
        self.scope, self.state = DISTRIBUTED, ACTIVE

    # --------------------------------------------------------------------------------------------------- execution

    def on_event(self, sequence: int, event: Event) -> list[Effect]:
        if self.scope is NON_TRANSACTIONAL:
            return [Deliver(self.subscription, event, self.tx)]
        if self.state is not ACTIVE or self._failed is not None:
            return []
        if sequence != self.last_sequence + 1:
            return self.give_up(f"event {sequence} arrived after event {self.last_sequence}")
        self.last_sequence = sequence
        self.events.append(event)
        if self._busy:
            self._steps.append(partial(self._notify, sequence, event, 1))
            return []
        return self._notify(sequence, event, 1)

    def _notify(self, sequence: int, event: Event, attempt: int) -> list[Effect]:
        self._busy, self._notifying = True, (sequence, event, attempt)
        call = self._calls.open(self._notified)
        return [NotifyTx(self.subscription, call, self.tx, sequence, event)]

    def _notified(self, reason: str | None) -> list[Effect]:
        if reason is not None and self._failed is None and self._notifying is not None:
            sequence, event, attempt = self._notifying
            if attempt < self.delivery_attempts:
                return self._notify(sequence, event, attempt + 1)
            self._busy = False
            return self.give_up(reason)
        self._busy = False
        return self._next() if self._steps else []

    def give_up(self, reason: str) -> list[Effect]:
        """This participant aborts by itself: it has not voted, so no decision depends on it yet."""
        if self._failed is not None or self.state in (PREPARED, ENDED):
            return []
        effects: list[Effect] = []
        if self.scope is DISTRIBUTED:
            aborted = ParticipantAborted(
                tx=self.tx, voter=self.voter, reason=reason[:TEXT_MAX], event_type=self.spec.event_type
            )
            effects.append(SendTo(Address(self.coordinator), aborted))
        return effects + self.abandon(Rejection(RejectionCode.PARTICIPANT_FAILED, reason))

    def abandon(self, rejection: Rejection) -> list[Effect]:
        """The transaction has ended. Undo what was done, unless it is prepared: then only a decision may undo it."""
        if self._failed is not None or self.state is ENDED or self.state is PREPARED:
            return []
        if self.scope is NON_TRANSACTIONAL or self.state is ASKED:
            return self._end()  # there is nothing to undo
        self._failed = rejection
        self._steps.clear()
        voted, self._voting = self._voting, None
        vote = voted(rejection) if voted is not None else []
        return vote + self._do(self._finish, False, rejection)

    # -------------------------------------------------------------------------------------------------- commitment

    def on_local_commit(self, last_sequence: int) -> list[Effect]:
        """A local subscriber coordinates itself: it commits everything or nothing."""
        if self.scope is NON_TRANSACTIONAL:
            return self._end()
        if self.scope is not LOCAL or self._failed is not None or self.state is not ACTIVE:
            return []
        if last_sequence != self.last_sequence:
            return self.abandon(self._incomplete(last_sequence))

        def voted(rejection: Rejection | None) -> list[Effect]:
            if rejection is not None:
                return self.abandon(rejection)
            return self._do(self._finish, True, FOLLOWED)

        return self._do(self._prepare, None, voted)

    def prepare(self, memo: Memo, last_sequence: int, voted: Voted) -> list[Effect]:
        """Prepare, and vote through `voted`; a new attempt of the epoch prepares again."""
        if self._failed is not None or self.undoing or self.state not in (ACTIVE, PREPARED):
            elsewhere = Rejection(RejectionCode.PARTICIPANT_FAILED, f"{self.tx} is {self.state.value} here")
            return voted(self._failed or elsewhere)
        if self.epoch is not None and not memo.epoch.newer_than(self.epoch):
            return voted(OVERTAKEN)
        former, self._voting, self.epoch = self._voting, voted, memo.epoch
        overtaken = former(OVERTAKEN) if former is not None else []
        if last_sequence != self.last_sequence:
            return overtaken + self._reject(self._incomplete(last_sequence))

        def prepared(rejection: Rejection | None) -> list[Effect]:
            if self._voting is not voted:
                return []  # the vote was a NO meanwhile, or a later attempt waits for another vote
            if rejection is not None:
                return self._reject(rejection)
            self.state, self._voting = PREPARED, None
            return voted(None)

        effects = overtaken + self._disarm() if self._armed else overtaken
        if self._busy:
            self._steps.append(partial(self._prepare, memo, prepared))
            return effects
        return effects + self._prepare(memo, prepared)

    def _incomplete(self, last_sequence: int) -> Rejection:
        text = f"{self.last_sequence} of {last_sequence} events arrived"
        return Rejection(RejectionCode.INCOMPLETE, text)

    def _reject(self, rejection: Rejection) -> list[Effect]:
        """Vote NO. If an earlier attempt is prepared, it may be committed early already: it is undone before the vote
        leaves, so that nothing of it remains when the coordinator counts the NO."""
        voted = self._voting
        if self.state is not PREPARED or voted is None:
            return self.abandon(rejection)
        self._voting = None
        return self.finish(False, partial(voted, rejection))

    def _prepare(self, memo: Memo | None, then: Voted) -> list[Effect]:
        self._busy, self._preparing = True, then
        call = self._calls.open(self._prepared)
        return [PrepareTx(self.subscription, call, self.tx, memo, tuple(self.events))]

    def _prepared(self, reason: str | None) -> list[Effect]:
        then, self._preparing, self._busy = self._preparing, None, False
        if then is None:
            raise InvariantBroken(f"{self.tx} was prepared without a request to prepare it")
        effects = then(None if reason is None else Rejection(RejectionCode.PARTICIPANT_FAILED, reason))
        return effects + self._next() if self._steps else effects

    def finish(self, committed: bool, done: Callable[[], list[Effect]]) -> list[Effect]:
        """Carry out the decision; `done` is called when that has ended."""
        if self.state is ENDED:
            return done()
        self._when_ended.append(done)
        if self.state is not PREPARED:
            return self.abandon(FOLLOWED)
        self.undoing = not committed
        if self._busy:
            self._steps.append(partial(self._finish, committed, FOLLOWED))
            return []
        return self._finish(committed, FOLLOWED)

    def _finish(self, committed: bool, rejection: Rejection) -> list[Effect]:
        self._busy = True
        call = self._calls.open(self._finished)
        if committed:
            return [CommitTxCall(self.subscription, call, self.tx, self.log_number)]
        return [AbortTxCall(self.subscription, call, self.tx, rejection)]

    def _finished(self, _: object) -> list[Effect]:
        self._busy = False
        return self._end()

    # ------------------------------------------------------------------------------------------------------- doubt

    def _arm(self) -> Effect:
        self._armed = True
        return SetTimer(("quiet", self.tx, self.subscription), self.quiet_s)

    def _disarm(self) -> list[Effect]:
        if not self._armed:
            return []
        self._armed = False
        return [CancelTimer(("quiet", self.tx, self.subscription))]

    def on_quiet(self) -> list[Effect]:
        """No message has arrived for long. As long as nothing is prepared, the coordinator's response may end the
        sub-transaction."""
        if self.state not in (ENLISTED, ACTIVE) or self._voting is not None:
            return []
        query = GetMembership(tx=self.tx, event_type=self.spec.event_type, voter=self.voter)
        return [SendTo(Address(self.coordinator), query), self._arm()]

    def on_membership(self, reported: MembershipReported) -> list[Effect]:
        if self.state not in (ENLISTED, ACTIVE) or self._voting is not None:
            return []
        if reported.state in (TxState.ABORTED, TxState.CENSUS_UNFULFILLED, TxState.COMMITTED):
            return self.abandon(Rejection(RejectionCode.NO_RECORD, "the coordinator no longer knows the transaction"))
        listed = reported.state is TxState.ACTIVE and self.scope is DISTRIBUTED
        return self.on_began(reported.members) if listed else []

    # ------------------------------------------------------------------------------------------------------- steps

    def _do(self, step: Callable[P, list[Effect]], *args: P.args, **named: P.kwargs) -> list[Effect]:
        """Run the step now, or when the call to the application that is in progress has returned."""
        if self._busy:
            self._steps.append(partial(step, *args, **named))
            return []
        return step(*args, **named)

    def _next(self) -> list[Effect]:
        effects: list[Effect] = []
        steps = self._steps
        while steps and not self._busy:
            effects += steps.popleft()()
        return effects

    def _end(self) -> list[Effect]:
        if self.state is ENDED:
            return []
        self.state = ENDED
        effects = self._disarm() + self._ended(self) if self._armed else self._ended(self)
        waiting, self._when_ended = self._when_ended, []
        for done in waiting:
            effects += done()
        if self._successor is not None:
            self._successor._busy = False
            effects += self._successor._next()
        return effects

    def follow(self, former: "SubTxExecutor") -> None:
        """Do nothing before `former`, which is being undone, has ended: the application knows both by one id."""
        self._busy = True
        former._successor = self

    @classmethod
    def recovered(
        cls,
        tx: TxId,
        subscription: int,
        spec: TxSpec,
        memo: Memo,
        calls: Calls,
        ended: "Callable[[SubTxExecutor], list[Effect]]",
    ) -> "SubTxExecutor":
        """A prepared sub-transaction that was found after a crash."""
        executor = cls(
            tx,
            subscription,
            spec,
            memo.epoch.coordinator,
            calls,
            voter=memo.voter,
            pseudonym=Pseudonym(memo.voter),
            quiet_s=0,
            delivery_attempts=1,
            ended=ended,
        )
        executor.scope, executor.state, executor.epoch = DISTRIBUTED, PREPARED, memo.epoch
        return executor
