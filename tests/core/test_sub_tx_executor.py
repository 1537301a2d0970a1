"""The sub-tx executor: one transaction at one participant, one call at a time, one end."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.machines import BROKER, address, event, of, sent_messages, spec
from tops.core.participant.calls import Calls
from tops.core.participant.sub_tx_executor import SubTxExecutor, SubTxState
from tops.model.ids import Pseudonym, TxId, hashed
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import TEXT_MAX
from tops.model.transactions import Scope, ScopeLimit, TxState, TxType
from tops.protocol.effects import (
    AbortTxCall,
    Alarm,
    Call,
    CommitTxCall,
    Deliver,
    Effect,
    Memo,
    NotifyTx,
    PrepareTx,
    SetTimer,
)
from tops.protocol.messages import (
    CensusReplied,
    EpochId,
    GetMembership,
    MembershipReported,
    ParticipantAborted,
    TxSpec,
)

TX = TxId("P.1.1")
ME = Pseudonym("me")
MEMO = Memo(EpochId("plain", 1, 1, BROKER, 1), "digest", ME, (TX,))


class Machine:
    """One executor, and an application that answers when it is told to."""

    def __init__(
        self, scope: Scope | None = Scope.DISTRIBUTED, attempts: int = 1, tx_spec: TxSpec | None = None
    ) -> None:
        self.calls = Calls()
        self.ended = 0
        self.votes: list[Rejection | None] = []
        self.core = SubTxExecutor(
            TX,
            1,
            tx_spec or spec(),
            BROKER,
            self.calls,
            voter=ME,
            pseudonym=ME,
            quiet_s=1.0,
            delivery_attempts=attempts,
            ended=self._ended,
        )
        if scope is not None:
            self.core.take(scope)
            self.core.on_began(frozenset({hashed(ME)}))

    def _ended(self, executor: SubTxExecutor) -> list[Effect]:
        self.ended += 1
        return []

    def voted(self, rejection: Rejection | None) -> list[Effect]:
        self.votes.append(rejection)
        return []

    def answer(self, effects: list[Effect], result: object = None) -> list[Effect]:
        """The application answers the one call that these effects make."""
        (call,) = of(effects, Call)
        return self.calls.done(call.call, result)

    def event(self, sequence: int) -> list[Effect]:
        return self.core.on_event(sequence, event(f"m{sequence}"))

    def prepared(self) -> "Machine":
        self.answer(self.event(1))
        self.answer(self.core.prepare(MEMO, 1, self.voted))
        assert self.core.state is SubTxState.PREPARED
        return self


# ------------------------------------------------------------------------------------------------------------- census


def test_it_asks_the_application_and_replies_with_its_pseudonym() -> None:
    machine = Machine(None)

    chosen = machine.answer(machine.core.request_scope(address("P"), lambda e: e.reply()), Scope.DISTRIBUTED)

    assert sent_messages(chosen, CensusReplied) == [CensusReplied(tx=TX, pseudonym=ME, event_type="plain")]
    assert machine.core.state is SubTxState.ENLISTED


def test_who_is_not_on_the_published_list_is_out() -> None:
    machine = Machine(None)
    machine.core.take(Scope.DISTRIBUTED)

    machine.core.on_began(frozenset({hashed("somebody else")}))

    assert machine.core.state is SubTxState.ENDED
    assert machine.event(1) == []


def test_a_scope_below_the_limit_is_none() -> None:
    machine = Machine(None, tx_spec=spec(limit=ScopeLimit.DISTRIBUTED))

    machine.answer(machine.core.request_scope(address("P"), lambda e: []), Scope.LOCAL)

    assert (machine.core.scope, machine.core.state) == (Scope.NONE, SubTxState.ENDED)


def test_asking_for_distributed_in_a_local_transaction_raises_an_alarm_and_takes_nothing() -> None:
    machine = Machine(None, tx_spec=TxSpec("plain", TxType.LOCAL))

    effects = machine.answer(machine.core.request_scope(address("P"), lambda e: []), Scope.DISTRIBUTED)

    assert [a.kind for a in of(effects, Alarm)] == ["wrong-scope"]
    assert machine.core.scope is Scope.NONE


# ---------------------------------------------------------------------------------------------------------- execution


def test_the_application_is_called_for_one_event_at_a_time_in_order() -> None:
    machine = Machine()

    first = machine.event(1)
    assert machine.event(2) == []
    second = machine.answer(first)

    assert [n.sequence for n in of(first + second, NotifyTx)] == [1, 2]


@pytest.mark.parametrize("wrong", [1, 3, 7])
def test_a_wrong_number_aborts_the_scope_and_tells_the_coordinator(wrong: int) -> None:
    machine = Machine()
    machine.answer(machine.event(1))

    effects = machine.event(wrong)

    assert sent_messages(effects, ParticipantAborted)[0].reason == f"event {wrong} arrived after event 1"
    assert len(of(effects, AbortTxCall)) == 1


def test_a_local_subscriber_that_fails_tells_nobody() -> None:
    machine = Machine(Scope.LOCAL)

    effects = machine.answer(machine.event(1), "can't")

    assert sent_messages(effects, ParticipantAborted) == []
    assert len(of(effects, AbortTxCall)) == 1


def test_an_event_is_delivered_as_often_as_allowed_before_its_failure_counts() -> None:
    machine = Machine(attempts=3)

    second = machine.answer(machine.event(1), "busy")
    third = machine.answer(second, "busy")
    given_up = machine.answer(third, "busy")

    assert [n.sequence for n in of(second + third, NotifyTx)] == [1, 1]
    assert sent_messages(given_up, ParticipantAborted)[0].reason == "busy"


def test_a_non_transactional_subscriber_gets_events_and_keeps_them() -> None:
    machine = Machine(Scope.NON_TRANSACTIONAL)

    effects = machine.event(1) + machine.core.abandon(Rejection(RejectionCode.ABORTED, "aborted"))

    assert [d.event.body["mark"] for d in of(effects, Deliver)] == ["m1"]
    assert of(effects, AbortTxCall) == []


# --------------------------------------------------------------------------------------------------------- commitment


def test_prepare_waits_for_the_events_that_are_being_processed() -> None:
    machine = Machine()
    first = machine.event(1)

    assert of(machine.core.prepare(MEMO, 1, machine.voted), PrepareTx) == []
    prepare = machine.answer(first)
    machine.answer(prepare)

    assert machine.votes == [None]


def test_a_missing_event_is_a_no() -> None:
    machine = Machine()
    machine.answer(machine.event(1))

    effects = machine.core.prepare(MEMO, 2, machine.voted)

    assert machine.votes == [Rejection(RejectionCode.INCOMPLETE, "1 of 2 events arrived")]
    assert len(of(effects, AbortTxCall)) == 1


def test_the_reason_for_giving_up_is_cut_to_what_a_broker_takes() -> None:
    (aborted,) = sent_messages(Machine().core.give_up("x" * 10_000), ParticipantAborted)

    assert aborted.reason == "x" * TEXT_MAX


def test_after_the_promise_only_the_decision_ends_it() -> None:
    machine = Machine().prepared()

    assert machine.core.give_up("changed my mind") == []
    assert machine.core.abandon(Rejection(RejectionCode.ABORTED, "the publisher aborted")) == []
    assert machine.core.on_quiet() == []
    assert machine.core.on_membership(MembershipReported(tx=TX, voter=ME, state=TxState.ABORTED)) == []
    assert machine.core.state is SubTxState.PREPARED
    assert len(of(machine.core.finish(True, list), CommitTxCall)) == 1


@pytest.mark.parametrize("committed", [True, False])
def test_the_decision_is_carried_out_once(committed: bool) -> None:
    machine = Machine().prepared()
    finishing = machine.core.finish(committed, list)
    machine.answer(finishing)

    again = machine.core.finish(committed, list)

    assert len(of(finishing, CommitTxCall if committed else AbortTxCall)) == 1
    assert of(again, Call) == []
    assert machine.ended == 1


def test_a_local_commit_order_with_a_gap_aborts_just_here() -> None:
    machine = Machine(Scope.LOCAL)
    machine.answer(machine.event(1))

    effects = machine.core.on_local_commit(2)

    assert len(of(effects, AbortTxCall)) == 1


def test_a_local_commit_prepares_and_commits_by_itself() -> None:
    machine = Machine(Scope.LOCAL)
    machine.answer(machine.event(1))

    prepare = machine.core.on_local_commit(1)
    commit = machine.answer(prepare)
    machine.answer(commit)

    assert of(prepare, PrepareTx)[0].memo is None
    assert len(of(commit, CommitTxCall)) == 1
    assert machine.ended == 1


def test_a_new_attempt_renews_the_promise() -> None:
    machine = Machine().prepared()
    second = Memo(EpochId("plain", 1, 2, BROKER, 1), "digest", ME, (TX,))

    machine.answer(machine.core.prepare(second, 1, machine.voted))

    assert machine.votes == [None, None]
    assert machine.core.state is SubTxState.PREPARED


# ------------------------------------------------------------------------------------------------------------- doubt


@pytest.mark.parametrize("listed", [True, False])
def test_in_the_census_silence_leads_to_a_question_and_its_answer_is_the_list(listed: bool) -> None:
    machine = Machine(None)
    machine.core.take(Scope.DISTRIBUTED)

    asked = machine.core.on_quiet()
    members = frozenset({hashed(ME if listed else "somebody else")})
    machine.core.on_membership(MembershipReported(tx=TX, voter=ME, state=TxState.ACTIVE, members=members))

    assert len(sent_messages(asked, GetMembership)) == 1
    assert of(asked, SetTimer)
    assert machine.core.state is (SubTxState.ACTIVE if listed else SubTxState.ENDED)


def test_while_active_a_coordinator_that_knows_nothing_ends_it() -> None:
    machine = Machine()
    machine.answer(machine.event(1))

    effects = machine.core.on_membership(MembershipReported(tx=TX, voter=ME, state=TxState.ABORTED))

    assert len(of(effects, AbortTxCall)) == 1


def test_a_promise_found_after_a_crash_waits_for_the_decision() -> None:
    machine = Machine(None)
    recovered = SubTxExecutor.recovered(TX, 1, spec(), MEMO, machine.calls, lambda e: [])

    assert recovered.state is SubTxState.PREPARED
    assert len(of(recovered.finish(True, list), CommitTxCall)) == 1


# ---------------------------------------------------------------------------------- every message in every state

STEPS = ["began", "event", "wrong event", "prepare", "local commit", "finish", "abandon", "give up", "quiet"]
STEPS += ["membership", "answer", "answer", "answer", "refuse"]


class Play:
    """Random inputs, with a coordinator that never decides to commit without a YES."""

    def __init__(self, scope: Scope) -> None:
        self.machine = Machine(None)
        self.asked: list[Call] = []
        self.done: list[str] = []
        self.take(self.machine.core.request_scope(address("P"), lambda e: e.reply()))
        self.take(self.machine.calls.done(self.asked.pop().call, scope))
        self.decision: bool | None = None

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Call):
                assert not self.asked, "the application was asked for two things at once"
                self.asked.append(effect)
                if isinstance(effect, CommitTxCall | AbortTxCall):
                    self.done.append(type(effect).__name__)

    def step(self, name: str, flag: bool) -> None:
        core, machine = self.machine.core, self.machine
        match name:
            case "began":
                self.take(core.on_began(frozenset({hashed(ME)}) if flag else frozenset()))
            case "event":
                self.take(machine.event(core.last_sequence + 1))
            case "wrong event":
                self.take(machine.event(core.last_sequence + 3))
            case "prepare":
                self.take(core.prepare(MEMO, core.last_sequence + (0 if flag else 1), machine.voted))
            case "local commit":
                self.take(core.on_local_commit(core.last_sequence))
            case "finish":
                if self.decision is None:
                    self.decision = flag and core.state is SubTxState.PREPARED
                if not self.decision or core.state is SubTxState.PREPARED:
                    self.take(core.finish(self.decision, list))
            case "abandon":
                self.take(core.abandon(Rejection(RejectionCode.ABORTED, "aborted")))
            case "give up":
                self.take(core.give_up("gave up"))
            case "quiet":
                self.take(core.on_quiet())
            case "membership":
                state = TxState.ACTIVE if flag else TxState.ABORTED
                answer = MembershipReported(tx=TX, voter=ME, state=state, members=frozenset({hashed(ME)}))
                self.take(core.on_membership(answer))
            case "answer" | "refuse":
                if self.asked:
                    call = self.asked.pop()
                    can = isinstance(call, NotifyTx | PrepareTx) and name == "refuse"
                    self.take(machine.calls.done(call.call, "can't" if can else None))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    scope=st.sampled_from([Scope.DISTRIBUTED, Scope.DISTRIBUTED, Scope.LOCAL, Scope.NON_TRANSACTIONAL, Scope.NONE]),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.booleans()), max_size=30),
)
def test_whatever_arrives_a_participant_ends_once_and_one_way(scope: Scope, steps: list[Any]) -> None:
    play = Play(scope)

    for name, flag in steps:
        play.step(name, flag)
    while play.asked:
        play.step("answer", True)

    assert len(play.done) <= 1
    assert play.machine.ended <= 1
    if play.decision:
        assert play.done == ["CommitTxCall"]
    if play.machine.core.state is SubTxState.PREPARED:
        assert None in play.machine.votes
