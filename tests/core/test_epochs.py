"""Epochs at the coordinator: numbers, votes, one decision, and what is told to whoever asks."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.machines import BROKER, PUBLISHER, address, member, of, persisted, sender, sent_messages, shown, voter
from tests.core.machines import ready as ready_tx
from tops.core.commit.ballot import ReadyTx
from tops.core.commit.epochs import Epoch, EpochOptions, Stage
from tops.core.coordinator.rendezvous import Rendezvous, RendezvousOptions
from tops.model.constraints import AnyConstraint, AtLeast, MinParticipants
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId, hashed
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Outcome, Scope
from tops.protocol.effects import Alarm, Effect, Note, Persist, SendTo, SetTimer
from tops.protocol.messages import (
    EpochDecided,
    EpochFinished,
    EpochId,
    EpochVoted,
    FinishNoted,
    PrepareEpoch,
    StandingRegistered,
    TxOutcome,
    TypeAdvertised,
    VotesMissing,
)
from tops.protocol.records import EpochCommitted, FinishesNoted, InSyncChanged, LogAppended

NO = Rejection(RejectionCode.PARTICIPANT_FAILED, "no")
GIVEN_UP = Rejection(RejectionCode.ABORTED, "changed its mind")


def ready(tx: str, voters: str | None = None, *constraints: AnyConstraint) -> ReadyTx:
    """A transaction whose commit was asked for; its voters are known by their identities."""
    made = ready_tx(tx, voters, *constraints)
    if voters is not None:
        made.members = {voter(name): member(voter(name), identity=name) for name in voters}
    return made


class Machine:
    """One coordinator with three standing voters, which are replicas if the type is durable."""

    def __init__(self, *, durable: bool = True, voters: str = "abc", **options: Any) -> None:
        rendezvous = Rendezvous(BROKER, 1, {}, RendezvousOptions(epochs=EpochOptions(**options), log_tail=64), bytes)
        definition = EventType("plain", {"mark": str, "key": str}, durable=durable)
        rendezvous.on_message(TypeAdvertised(definitions=(definition,)), sender("P"), PUBLISHER, 0.0)
        self.core = rendezvous.epochs["plain"]
        self.outcomes, self.standing, self.log = self.core.outcomes, self.core.standing, self.core.log
        self.settled: list[tuple[TxId, bool]] = []
        self.core.settled = self._settled
        for key in voters:
            self.stand(key)
        self.standing.in_sync = frozenset(voters)

    def stand(self, key: str) -> None:
        """A voter leaves its standing answer."""
        answered = StandingRegistered(
            voter=key,
            event_type="plain",
            filter=Filter.everything(),
            scope=Scope.DISTRIBUTED,
            secret=b"",
            position=0 if self.log is not None else None,
        )
        self.standing.renew(answered, sender(key), address(key), 0.0)

    def _settled(self, one: ReadyTx, committed: bool) -> list[Effect]:
        self.settled.append((one.tx, committed))
        return []

    @property
    def epoch(self) -> Epoch:
        return next(iter(self.core.in_flight.values()))

    def vote(self, key: str, *excluded: str, **changed: Any) -> list[Effect]:
        epoch = self.epoch
        why = {TxId(tx): NO for tx in excluded}
        voted = EpochVoted(epoch=epoch.id, digest=epoch.digest, voter=key, excluded=why)
        return self.core.on_voted(msgspec.structs.replace(voted, **changed), sender(key))

    def finish(self, key: str, *, note: bool = False) -> list[Effect]:
        finished = EpochFinished(epoch=self.epoch.id, voter=key, note=note)
        return self.core.on_finished(finished, sender(key), address(key))


def epoch_id(number: int = 1, attempt: int = 1, coordinator: str = "b1", incarnation: int = 1) -> EpochId:
    return EpochId("plain", number, attempt, NodeId(coordinator), incarnation)


def told(effects: list[Effect]) -> list[tuple[TxId, Outcome]]:
    return [(o.tx, o.outcome) for o in sent_messages(effects, TxOutcome)]


# ------------------------------------------------------------------------------------------------------ forming


def test_an_epoch_takes_its_number_when_its_prepare_goes_out_to_every_voter() -> None:
    machine = Machine()

    effects = machine.core.submit(ready("t1"))

    prepares = sent_messages(effects, PrepareEpoch)
    assert [p.voter for p in prepares] == ["a", "b", "c"]
    assert {p.epoch for p in prepares} == {epoch_id()}
    assert machine.log is not None
    assert (machine.log.last_number, machine.log.decided_upto) == (1, 0)


def test_transactions_that_wait_together_share_the_next_epoch_in_order() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    for tx in ("t2", "t3"):
        assert machine.core.submit(ready(tx)) == []

    for key in "abc":
        machine.vote(key)
    effects = [e for key in "abc" for e in machine.finish(key)]

    assert [m.tx for m in sent_messages(effects, PrepareEpoch)[0].members] == ["t2", "t3"]
    assert {p.epoch.number for p in sent_messages(effects, PrepareEpoch)} == {2}


def test_an_epoch_holds_no_more_members_than_it_may() -> None:
    machine = Machine(members_max=2)
    machine.core.submit(ready("t1"))
    for tx in ("t2", "t3", "t4"):
        machine.core.submit(ready(tx))

    for key in "abc":
        machine.vote(key)
    effects = [e for key in "abc" for e in machine.finish(key)]

    assert [m.tx for m in sent_messages(effects, PrepareEpoch)[0].members] == ["t2", "t3"]


def test_the_test_before_prepare_aborts_without_asking_anybody() -> None:
    machine = Machine()

    effects = machine.core.submit(ready("t1", None, MinParticipants(4)))

    assert sent_messages(effects, PrepareEpoch) == []
    assert told(effects) == [("t1", Outcome.ABORTED)]
    assert machine.log is not None
    assert machine.log.last_number == 0


def test_without_a_log_interactive_transactions_do_not_wait_for_each_other() -> None:
    machine = Machine(durable=False)

    first, second = machine.core.submit(ready("t1", "ab")), machine.core.submit(ready("t2", "ab"))

    assert sent_messages(first, PrepareEpoch)
    assert sent_messages(second, PrepareEpoch)
    assert len(machine.core.in_flight) == 2


# ------------------------------------------------------------------------------------------------ votes and decision


def test_the_decision_is_on_disk_before_anybody_hears_it() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    machine.vote("a")
    machine.vote("b")

    effects = machine.vote("c")

    assert isinstance(effects[0], Persist)
    assert isinstance(effects[0].record, LogAppended)
    assert effects[0].record.entry.committing == shown("abc")
    decided = sent_messages(effects, EpochDecided)
    assert [d.voter for d in decided] == ["a", "b", "c"]
    assert decided[0].committing == {hashed(key) for key in "abc"}
    assert told(effects) == []  # the publisher hears when all have finished


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": epoch_id(attempt=2)},
        {"epoch": epoch_id(incarnation=2)},
        {"epoch": epoch_id(number=2)},
        {"epoch": epoch_id(coordinator="b2")},
        {"digest": "another list of members"},
        {"excluded": {TxId("t9"): NO}},
        {"rows": ((1,), (1,))},
        {"results": (b"", b"")},
    ],
    ids=str,
)
def test_a_vote_for_anything_but_this_attempt_changes_nothing(changed: dict[str, Any]) -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    machine.vote("a")
    machine.vote("b")

    assert machine.vote("c", **{"excluded": {TxId("t1"): NO}, **changed}) == []
    assert told(machine.vote("c") + machine.finish("a") + machine.finish("b") + machine.finish("c")) == [
        ("t1", Outcome.COMMITTED)
    ]


def test_a_vote_of_another_life_of_the_voter_changes_nothing() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    epoch = machine.epoch
    voted = EpochVoted(epoch=epoch.id, digest=epoch.digest, voter="a", excluded={})

    assert machine.core.on_voted(voted, sender("a", 2)) == []
    assert epoch.votes == {}


def test_a_second_vote_does_not_replace_the_first() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    machine.vote("a")

    assert machine.vote("a", "t1") == []
    machine.vote("b")
    effects = machine.vote("c")

    assert persisted(effects, LogAppended)


def test_who_has_not_voted_when_it_drops_is_gone_and_who_has_is_bound() -> None:
    machine = Machine()
    machine.core.submit(ready("t1", None, MinParticipants(2)))
    machine.vote("a")

    assert machine.core.drop([voter("a")], "died") == []
    machine.vote("b")
    effects = machine.core.drop([voter("c")], "died")

    assert persisted(effects, LogAppended)[0].entry.committing == shown("ab")


def test_a_replica_that_misses_the_window_is_dropped_and_out_of_sync_in_the_same_record() -> None:
    machine = Machine()
    machine.core.submit(ready("t1", None, MinParticipants(2)))
    machine.vote("a")
    machine.vote("b")

    effects = machine.core.on_timer(1)

    record = persisted(effects, LogAppended)[0]
    assert (record.entry.committing, record.in_sync) == (shown("ab"), frozenset("ab"))
    assert "c" in [d.voter for d in sent_messages(effects, EpochDecided)]  # it is told to roll back


def test_a_late_vote_on_an_interactive_transaction_is_the_publishers_to_wait_for() -> None:
    machine = Machine(durable=False)
    machine.core.submit(ready("t1", "ab"))
    machine.vote("a")

    effects = machine.core.on_timer(1)

    assert sent_messages(effects, VotesMissing) == [VotesMissing(tx=TxId("t1"), missing=1)]
    assert of(machine.core.wait_again(TxId("t1")), SetTimer)
    assert persisted(machine.vote("b"), EpochCommitted)


def test_excluded_by_one_that_is_needed_a_member_aborts_and_the_rest_is_prepared_again() -> None:
    machine = Machine()
    machine.core.submit(ready("t0"))
    for tx in ("t1", "t2"):
        machine.core.submit(ready(tx))
    for key in "abc":
        machine.vote(key)
    for key in "abc":
        machine.finish(key)
    machine.vote("a")
    machine.vote("b")

    effects = machine.vote("c", "t1")

    assert told(effects) == [("t1", Outcome.ABORTED)]
    again = sent_messages(effects, PrepareEpoch)
    assert {(p.epoch.number, p.epoch.attempt) for p in again} == {(2, 2)}
    assert [m.tx for m in again[0].members] == ["t2"]
    assert again[0].digest != ""


def test_after_too_many_differing_votes_the_rest_run_one_by_one() -> None:
    machine = Machine(attempts_max=3)
    machine.core.submit(ready("t0"))
    names = [f"t{i}" for i in range(1, 7)]
    for tx in names:
        machine.core.submit(ready(tx))
    for key in "abc":
        machine.vote(key)
    for key in "abc":
        machine.finish(key)

    attempts = []
    for bad in ("t1", "t2", "t3"):
        attempts.append((machine.epoch.id.number, machine.epoch.id.attempt))
        machine.vote("a")
        machine.vote("b")
        machine.vote("c", bad)

    assert attempts == [(2, 1), (2, 2), (2, 3)]
    assert [m.tx for m in machine.epoch.members] == ["t4"]
    assert (machine.epoch.id.number, machine.epoch.id.attempt) == (3, 1)
    assert machine.log is not None
    assert machine.log.tail[2].transactions == ()  # the number that was tried in vain is void


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_put_back_never_commits_without_one_that_was_asked_before(durable: bool) -> None:
    machine = Machine(durable=durable, attempts_max=1)
    free, bound = ready("t3"), ready("t4", None, MinParticipants(2))
    machine.core.submit(ready("t1"), ready("t2"), free, bound)
    machine.vote("a")
    machine.vote("b", "t1")
    machine.vote("c")  # t1 aborts, t2 is prepared by itself, t3 and t4 wait
    machine.standing.withdraw(voter("c"))

    effects = machine.core.drop([voter("c")], "it is gone")
    effects += machine.vote("a") + machine.vote("b")

    assert told(effects) == [("t2", Outcome.ABORTED), ("t3", Outcome.ABORTED)]
    assert [m.tx for m in machine.epoch.members] == ["t4"]  # its constraints can do without c
    assert machine.epoch.counted == frozenset(map(voter, "ab"))
    assert not machine.core.holds(free.tx)


def test_what_is_put_back_commits_with_those_that_were_asked_before_and_one_more() -> None:
    machine = Machine(durable=False, voters="ab", attempts_max=1)
    machine.core.submit(ready("t1"), ready("t2"), ready("t3"))
    machine.vote("a", "t1")
    machine.vote("b")
    machine.stand("c")
    for key in "ab":
        machine.vote(key)  # t2
    for key in "ab":
        machine.finish(key)

    decided = [e for key in "abc" for e in machine.vote(key)]

    record = persisted(decided, EpochCommitted)[0]
    assert (record.transactions, record.committing) == (("t3",), frozenset(map(voter, "abc")))


def test_an_aborted_number_is_void_and_not_reused() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    for key in "ab":
        machine.vote(key, "t1")

    effects = machine.vote("c", "t1")

    assert told(effects) == [("t1", Outcome.ABORTED)]
    void = [e.record for e in effects if isinstance(e, Note | Persist)]
    assert [r.entry.number for r in void if isinstance(r, LogAppended)] == [1]
    machine.core.submit(ready("t2"))
    assert machine.epoch.id.number == 2


def test_differing_rows_raise_an_alarm() -> None:
    machine = Machine()
    machine.core.submit(ready("t1", None, MinParticipants(2)))
    machine.vote("a", rows=((1,),))
    machine.vote("b", rows=((1,),))

    effects = machine.vote("c", rows=((2,),))

    assert [a.kind for a in of(effects, Alarm)] == ["rows-differ"]
    assert persisted(effects, LogAppended)[0].entry.committing == shown("ab")


# ------------------------------------------------------------------------------------------------ finishing and asking


def decided() -> Machine:
    machine = Machine()
    machine.core.submit(ready("t1"))
    for key in "abc":
        machine.vote(key)
    assert machine.epoch.stage is Stage.FINISHING
    return machine


def test_the_publisher_hears_when_everyone_has_finished() -> None:
    machine = decided()

    assert told(machine.finish("a") + machine.finish("b")) == []
    outcome = sent_messages(machine.finish("c"), TxOutcome)[0]

    assert (outcome.outcome, outcome.pending, outcome.log_number) == (Outcome.COMMITTED, (), 1)
    assert machine.core.in_flight == {}


def test_after_the_window_the_publisher_hears_who_is_pending_and_they_are_out_of_sync_on_disk_first() -> None:
    machine = decided()
    machine.finish("a")

    effects = machine.core.on_timer(1)

    kinds = [type(e) for e in effects]
    assert persisted(effects, InSyncChanged)[0].in_sync == {"a"}
    assert sent_messages(effects, TxOutcome)[0].pending == ("b", "c")
    assert kinds.index(Persist) < kinds.index(SendTo)


def test_a_voter_that_asks_while_votes_are_out_hears_nothing() -> None:
    machine = Machine()
    machine.core.submit(ready("t1"))
    machine.vote("a")

    assert machine.core.on_outcome_requested(machine.epoch.id, machine.epoch.digest, voter("a"), address("a")) == []


def test_a_voter_that_asks_after_the_decision_hears_it_as_often_as_it_asks() -> None:
    machine = decided()
    epoch = machine.epoch
    before = [
        sent_messages(machine.core.on_outcome_requested(epoch.id, epoch.digest, voter("a"), address("a")), EpochDecided)
        for _ in range(3)
    ]
    for key in "abc":
        machine.finish(key)

    after = sent_messages(
        machine.core.on_outcome_requested(epoch.id, epoch.digest, voter("a"), address("a")), EpochDecided
    )

    assert all(answer[0].committing == {hashed(k) for k in "abc"} for answer in [*before, after])


@pytest.mark.parametrize("wrong", [epoch_id(attempt=7), epoch_id(incarnation=7), epoch_id(number=7)])
def test_an_attempt_that_was_never_decided_is_presumed_aborted(wrong: EpochId) -> None:
    machine = decided()
    for key in "abc":
        machine.finish(key)

    answer = sent_messages(machine.core.on_outcome_requested(wrong, "", voter("a"), address("a")), EpochDecided)

    assert [a.committing for a in answer] == [frozenset()]


def test_a_finish_is_noted_on_disk_before_a_voter_may_forget() -> None:
    machine = Machine(durable=False)
    machine.core.submit(ready("t1", "ab"))
    machine.vote("a")
    machine.vote("b")
    epoch = machine.epoch.id
    machine.finish("a", note=True)
    machine.finish("b", note=True)

    effects = machine.core.write_notes()

    assert isinstance(effects[0], Persist)
    assert isinstance(effects[0].record, FinishesNoted)
    assert epoch not in machine.core.decided
    again = machine.core.on_finished(EpochFinished(epoch=epoch, voter="a", note=True), sender("a"), address("a"))
    assert [n.voter for n in sent_messages(again, FinishNoted)] == ["a"]


def test_a_prepare_tells_below_which_number_everything_is_noted() -> None:
    machine = Machine(durable=False)
    for tx in ("t1", "t2", "t3"):
        machine.core.submit(ready(tx, "ab"))
    first, second, third = (epoch.id for epoch in machine.core.in_flight.values())
    for epoch in list(machine.core.in_flight.values()):
        for key in "ab":
            vote = EpochVoted(epoch=epoch.id, digest=epoch.digest, voter=key, excluded={})
            machine.core.on_voted(vote, sender(key))

    def noted_after(epoch: EpochId, voters: str, tx: str) -> set[int]:
        for key in voters:
            finished = EpochFinished(epoch=epoch, voter=key, note=True)
            machine.core.on_finished(finished, sender(key), address(key))
        machine.core.write_notes()
        return {p.noted for p in sent_messages(machine.core.submit(ready(tx, "ab")), PrepareEpoch)}

    assert noted_after(second, "ab", "t4") == {1}  # nobody has finished the first
    assert noted_after(first, "a", "t5") == {1}  # one of two has
    assert noted_after(first, "b", "t6") == {3}
    assert noted_after(third, "ab", "t7") == {4}  # which is not decided


@pytest.mark.parametrize("durable", [True, False])
def test_a_recovered_coordinator_tells_the_same_decision(durable: bool) -> None:
    machine = Machine(durable=durable)
    machine.core.submit(ready("t1", "abc"))
    machine.vote("a")
    machine.vote("b")
    effects = machine.vote("c")
    epoch, digest = machine.epoch.id, machine.epoch.digest
    record = effects[0].record if isinstance(effects[0], Persist) else None
    assert isinstance(record, LogAppended | EpochCommitted)

    second = Machine(durable=durable)
    second.core.incarnation = 2
    second.core.recover(record)
    answer = sent_messages(second.core.on_outcome_requested(epoch, digest, voter("a"), address("a")), EpochDecided)

    assert answer[0].committing == {hashed(k) for k in "abc"}
    assert second.outcomes.is_rejected(TxId("t1"))


# ------------------------------------------------------------------------------------- every message in every state


CONSTRAINTS: list[tuple[AnyConstraint, ...]] = [(), (MinParticipants(1),), (AtLeast(2, frozenset("abc")),)]


class Play:
    """Random inputs to one coordinator, and what must never be contradicted."""

    def __init__(self, durable: bool) -> None:
        self.machine = Machine(durable=durable, members_max=3)
        self.durable = durable
        self.submitted: list[str] = []
        self.seen: list[tuple[EpochId, str]] = []
        self.outcomes: dict[TxId, set[Outcome]] = {}
        self.committing: dict[EpochId, set[frozenset[str]]] = {}
        self.logged: list[TxId] = []

    def take(self, effects: list[Effect]) -> None:
        for prepare in sent_messages(effects, PrepareEpoch):
            self.seen.append((prepare.epoch, prepare.digest))
        for outcome in sent_messages(effects, TxOutcome):
            self.outcomes.setdefault(outcome.tx, set()).add(outcome.outcome)
        for decision in sent_messages(effects, EpochDecided):
            self.committing.setdefault(decision.epoch, set()).add(decision.committing)
        for record in persisted(effects, LogAppended):
            self.logged += [t.tx for t in record.entry.transactions]
        for decision_record in persisted(effects, EpochCommitted):
            self.logged += decision_record.transactions
        if self.durable:
            assert len(self.machine.core.in_flight) <= 1

    def step(self, draw: Any) -> None:
        core = self.machine.core
        action = draw(st.sampled_from(["submit", "vote", "vote", "vote", "finish", "drop", "timer", "ask", "abort"]))
        key = draw(st.sampled_from("abcz"))
        if action == "submit" and len(self.submitted) < 6:
            tx = f"t{len(self.submitted) + 1}"
            self.submitted.append(tx)
            constraint = draw(st.sampled_from(CONSTRAINTS))
            self.take(core.submit(ready(tx, draw(st.sampled_from([None, "abc"])), *constraint)))
        if action == "abort" and self.submitted:
            self.take(core.abort(TxId(draw(st.sampled_from(self.submitted))), GIVEN_UP))
        if not self.seen:
            return
        epoch, digest = draw(st.sampled_from(self.seen[-4:]))
        if action == "vote":
            bad = draw(st.lists(st.sampled_from(self.submitted), max_size=1))
            excluded = {TxId(tx): NO for tx in bad}
            voted = EpochVoted(epoch=epoch, digest=digest, voter=key, excluded=excluded)
            self.take(core.on_voted(voted, sender(key, draw(st.sampled_from([1, 1, 1, 2])))))
        elif action == "finish":
            finished = EpochFinished(epoch=epoch, voter=key, note=draw(st.booleans()))
            self.take(core.on_finished(finished, sender(key), address(key)))
        elif action == "drop":
            self.take(core.drop([voter(key)], "died"))
        elif action == "timer":
            self.take(core.on_timer(epoch.number) + core.write_notes())
        elif action == "ask" and key != "z":
            self.take(core.on_outcome_requested(epoch, digest, voter(key), address(key)))

    def end(self) -> None:
        """Votes stay out, and time passes: everything that was submitted ends."""
        for _ in range(60):
            for number in list(self.machine.core.in_flight):
                self.take(self.machine.core.on_timer(number))
                for one in self.submitted:
                    epoch = self.machine.core.voting(TxId(one))
                    if epoch is not None and epoch.unchecked:
                        self.take(self.machine.core.abort(TxId(one), GIVEN_UP))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), durable=st.booleans())
def test_whatever_arrives_in_whatever_order_nothing_is_decided_or_told_twice(data: Any, durable: bool) -> None:
    play = Play(durable)

    for _ in range(data.draw(st.integers(1, 40))):
        play.step(data.draw)
    play.end()

    assert len(play.logged) == len(set(play.logged))
    assert all(len(outcomes) == 1 for outcomes in play.outcomes.values())
    assert {tx for tx, o in play.outcomes.items() if o == {Outcome.COMMITTED}} == set(play.logged)
    assert set(play.outcomes) == set(play.submitted)
    assert play.machine.core.in_flight == {}
    assert not play.machine.core.held
    for epoch, sets in play.committing.items():
        assert len(sets) == 1, f"{epoch} was told {sets}"
