"""The executor of a replica: a prefix of the log, and at most one epoch that is prepared."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.machines import BROKER, event, of, sent_messages
from tops.core.participant.calls import Calls
from tops.core.participant.epoch_executor import EpochExecutor, Work
from tops.model.ids import TxId, hashed
from tops.model.log_points import BEGINNING, NO_DIGEST, LogPoint, chained
from tops.model.rejections import Rejection, RejectionCode
from tops.model.sizes import TEXT_MAX
from tops.model.transactions import ScopeLimit, TxType
from tops.protocol.effects import ApplyEntries, BatchPrepared, Call, Effect, FinishBatch, Memo, PrepareBatch
from tops.protocol.messages import (
    EpochDecided,
    EpochFinished,
    EpochId,
    EpochMember,
    EpochVoted,
    GetEpochOutcome,
    LogDelivered,
    LogEntry,
    LoggedTx,
    PrepareEpoch,
    QueryPeers,
)
from tops.sim.databases import ReplicaDatabase

ME = "me"
HISTORY = "h" * 32


def digest_at(number: int, void: frozenset[int] = frozenset()) -> str:
    """The digest of the log that `entry` has the entries of."""
    digest = NO_DIGEST
    for n in range(1, number + 1):
        digest = chained(HISTORY, digest, n, () if n in void else (f"t{n}",))
    return digest


def packed(after: int, upto: int, void: frozenset[int] = frozenset()) -> bytes:
    return b"".join(bytes.fromhex(digest_at(n, void)) for n in range(after, upto + 1))


def epoch(number: int, attempt: int = 1, incarnation: int = 1) -> EpochId:
    return EpochId("set", number, attempt, BROKER, incarnation)


def prepare(number: int, attempt: int = 1, incarnation: int = 1, void: frozenset[int] = frozenset()) -> PrepareEpoch:
    tx = TxId(f"t{number}")
    members = (EpochMember(tx, 1, (event(f"m{number}"),)),)
    before = LogPoint(HISTORY, number - 1, digest_at(number - 1, void))
    return PrepareEpoch(
        epoch=epoch(number, attempt, incarnation), digest=f"d{number}", voter=ME, members=members, before=before
    )


def decide(
    number: int, attempt: int = 1, *, commit: bool = True, incarnation: int = 1, digest: str = ""
) -> EpochDecided:
    committing = frozenset({hashed(ME)}) if commit else frozenset({hashed("others")})
    return EpochDecided(
        epoch=epoch(number, attempt, incarnation), digest=digest or f"d{number}", voter=ME, committing=committing
    )


def entry(number: int, *, void: bool = False) -> LogEntry:
    tx = TxId(f"t{number}")
    logged = LoggedTx(tx, "set", (event(f"m{number}"),), {}, ScopeLimit.LOCAL, TxType.DISTRIBUTED)
    return LogEntry(number=number, transactions=() if void else (logged,))


def delivery(after: int, upto: int) -> LogDelivered:
    return LogDelivered(
        name="r",
        event_type="set",
        acknowledged=after,
        after=after,
        upto=upto,
        entries=tuple(entry(n) for n in range(after + 1, upto + 1)),
        incarnation=1,
        history=HISTORY,
        digests=packed(after, upto),
    )


class Machine:
    """One executor on a real replica database that objects to whatever no correct machine asks for."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.database = ReplicaDatabase()
        self.caught_up: list[bool] = []
        self.core = EpochExecutor(1, "r", BROKER, BEGINNING, self.calls, [BROKER], 1.0, self._progressed)
        self.waiting: list[Call] = []
        self.sent: list[Any] = []

    def _progressed(self, caught_up: bool) -> list[Effect]:
        self.caught_up.append(caught_up)
        return []

    def take(self, effects: list[Effect]) -> list[Effect]:
        for call in of(effects, Call):
            assert not self.waiting, "the database was asked for two things at once"
            self.waiting.append(call)
        self.sent += [e for e in effects if not isinstance(e, Call)]
        return effects

    def work(self) -> None:
        """The database does what it was asked for, and answers."""
        call = self.waiting.pop()
        match call:
            case PrepareBatch(memo=memo, members=members, before=before):
                result: object = self.database.prepare(memo, members, before)
            case FinishBatch(memo=memo, committed=committed):
                result = self.database.finish(memo, committed)
            case ApplyEntries(entries=entries, upto=upto, history=history, digests=digests):
                result = self.database.apply(entries, upto, history, digests)
            case _:
                raise AssertionError(call)
        self.take(self.calls.done(call.call, result))

    def work_all(self) -> None:
        while self.waiting:
            self.work()

    def votes(self) -> list[EpochId]:
        return [v.epoch for v in sent_messages(self.sent, EpochVoted)]


def test_an_epoch_is_prepared_promised_and_finished() -> None:
    machine = Machine()

    machine.take(machine.core.on_prepare(prepare(1)))
    machine.work()
    assert machine.votes() == [epoch(1)]
    machine.take(machine.core.on_decided(decide(1)))
    machine.work()

    assert machine.database.position == machine.core.position == 1
    assert [f.epoch for f in sent_messages(machine.sent, EpochFinished)] == [epoch(1)]
    assert machine.core.work is Work.IDLE


def test_a_reason_is_cut_to_what_a_broker_takes() -> None:
    """A message of a database may be of any length; a vote that is rejected for it would never arrive."""
    machine = Machine()
    machine.take(machine.core.on_prepare(prepare(1)))
    (call,) = machine.waiting
    assert isinstance(call, PrepareBatch)
    tx = call.members[0].tx

    long = Rejection(RejectionCode.PARTICIPANT_FAILED, "x" * 10_000)
    machine.take(machine.calls.done(call.call, BatchPrepared({tx: long}, ())))

    (vote,) = sent_messages(machine.sent, EpochVoted)
    assert vote.excluded == {tx: Rejection(RejectionCode.PARTICIPANT_FAILED, "x" * TEXT_MAX)}


def test_an_epoch_waits_until_everything_before_its_number_is_applied() -> None:
    machine = Machine()

    assert machine.core.on_prepare(prepare(3)) == []
    machine.take(machine.core.on_log(delivery(0, 2)))
    machine.work()
    machine.work()

    assert machine.database.position == 2
    assert machine.votes() == [epoch(3)]


def test_nothing_is_applied_while_a_promise_is_open() -> None:
    machine = Machine()
    machine.take(machine.core.on_prepare(prepare(1)))
    machine.work()

    assert machine.core.on_log(delivery(0, 1)) == []
    machine.take(machine.core.on_decided(decide(1, commit=False)))
    machine.work_all()

    assert machine.database.position == 1  # rolled back first, then from the log
    assert sent_messages(machine.sent, EpochFinished) == []


@pytest.mark.parametrize(
    "other",
    [decide(1, 2), decide(2), decide(1, incarnation=2), decide(1, digest="another list")],
    ids=["attempt", "number", "incarnation", "members"],
)
def test_a_decision_on_anything_but_the_promised_attempt_changes_nothing(other: EpochDecided) -> None:
    machine = Machine()
    machine.take(machine.core.on_prepare(prepare(1)))
    machine.work()

    assert machine.core.on_decided(other) == []
    assert machine.core.work is Work.PREPARED
    assert machine.database.prepared is not None


def test_a_newer_attempt_of_the_number_replaces_the_older_one() -> None:
    machine = Machine()
    machine.take(machine.core.on_prepare(prepare(1)))
    machine.work()

    machine.take(machine.core.on_prepare(prepare(1, 2)))
    machine.work()

    assert machine.votes() == [epoch(1), epoch(1, 2)]
    assert machine.core.on_decided(decide(1)) == []  # of the attempt that is gone
    machine.take(machine.core.on_decided(decide(1, 2)))
    machine.work()
    assert machine.database.position == 1


@pytest.mark.parametrize("late", [prepare(1), prepare(1, 2)], ids=["same attempt", "older attempt"])
def test_an_older_or_repeated_prepare_changes_nothing(late: PrepareEpoch) -> None:
    machine = Machine()
    machine.take(machine.core.on_prepare(prepare(1, 2)))
    machine.work()

    assert machine.core.on_prepare(late) == []
    assert machine.votes() == [epoch(1, 2)]


def test_a_decision_that_overtakes_the_preparation_is_kept_for_it() -> None:
    machine = Machine()
    machine.take(machine.core.on_prepare(prepare(1)))

    assert machine.core.on_decided(decide(1, commit=False)) == []
    machine.work_all()

    assert machine.votes() == []  # there is nothing left to vote on
    assert machine.database.prepared is None
    assert machine.database.position == 0


def test_a_promise_found_after_a_crash_is_settled_before_anything_else() -> None:
    machine = Machine()
    memo = Memo(epoch(1), "d1", ME, (TxId("t1"),))
    machine.database.prepare(memo, prepare(1).members, prepare(1).before)

    machine.take(machine.core.recover([memo]))
    assert machine.core.on_log(delivery(0, 1)) == []
    assert machine.core.on_prepare(prepare(2)) == []
    assert [a.epoch for a in sent_messages(machine.sent, GetEpochOutcome)] == [epoch(1)]
    machine.take(machine.core.on_decided(decide(1)))
    machine.work_all()

    assert machine.database.position == 1
    assert machine.votes() == [epoch(2)]


def test_in_doubt_it_asks_the_coordinator_and_then_everybody() -> None:
    machine = Machine()
    machine.take(machine.core.on_prepare(prepare(1)))
    machine.work()

    asked = [machine.core.on_doubt() for _ in range(4)]

    assert all(len(sent_messages(effects, GetEpochOutcome)) == 1 for effects in asked)
    assert [len(sent_messages(effects, QueryPeers)) for effects in asked] == [0, 0, 1, 1]


def test_deliveries_that_are_repeated_or_overlap_are_applied_once() -> None:
    machine = Machine()

    machine.take(machine.core.on_log(delivery(0, 2)))
    machine.work()
    machine.take(machine.core.on_log(delivery(0, 2)))
    machine.take(machine.core.on_log(delivery(1, 4)))
    machine.work_all()

    assert machine.database.position == 4
    assert [m for marks in machine.database.rows.values() for m in marks] == ["m1", "m2", "m3", "m4"]


def test_entries_that_come_while_one_is_being_applied_are_applied_together() -> None:
    machine = Machine()

    machine.take(machine.core.on_log(delivery(0, 1)))
    waiting = [machine.core.on_log(delivery(after, after + 1)) for after in (1, 2, 4)]
    machine.work()

    assert waiting == [[], [], []]
    (call,) = machine.waiting
    assert isinstance(call, ApplyEntries)
    assert ([e.number for e in call.entries], call.upto) == ([2, 3], 3), "what is beyond the gap waits"


# ------------------------------------------------------------------------------------------- whatever the network does

NUMBERS = 4


class Coordinator:
    """What a correct coordinator may say about NUMBERS numbers: attempts, one decision each, and the log."""

    def __init__(self, draw: Any) -> None:
        self.attempts = {n: draw(st.integers(1, 3)) for n in range(1, NUMBERS + 1)}
        self.ends = {n: draw(st.sampled_from(["with me", "without me", "void"])) for n in self.attempts}
        self.committed: set[int] = set()  # numbers that we are told to commit
        self.void = frozenset(n for n, end in self.ends.items() if end == "void")

    def close(self, number: int, votes: list[EpochId]) -> None:
        """The decision, once and for all: we are among those who commit only if our vote on the last attempt came."""
        if self.ends[number] == "with me" and epoch(number, self.attempts[number]) in votes:
            self.committed.add(number)

    def decision(self, number: int, attempt: int) -> EpochDecided:
        return decide(number, attempt, commit=attempt == self.attempts[number] and number in self.committed)

    def log(self) -> tuple[LogEntry, ...]:
        return tuple(entry(n, void=self.ends[n] == "void") for n in range(1, NUMBERS + 1))

    def deliver(self, after: int) -> LogDelivered:
        return LogDelivered(
            name="r",
            event_type="set",
            acknowledged=after,
            after=after,
            upto=NUMBERS,
            entries=tuple(e for e in self.log() if e.number > after and e.number not in self.committed),
            incarnation=1,
            history=HISTORY,
            digests=packed(after, NUMBERS, self.void),
        )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_is_lost_late_or_repeated_a_replica_stays_a_prefix_and_catches_up(data: Any) -> None:
    machine, said = Machine(), Coordinator(data.draw)
    for number in range(1, NUMBERS + 1):
        for attempt in range(1, said.attempts[number] + 1):
            for _ in range(data.draw(st.integers(0, 2))):
                machine.take(machine.core.on_prepare(prepare(number, attempt, void=said.void)))
                for _ in range(data.draw(st.integers(0, 3))):
                    if machine.waiting:
                        machine.work()
        said.close(number, machine.votes() if data.draw(st.booleans()) else [])
        for attempt in data.draw(st.lists(st.integers(1, said.attempts[number]), max_size=3)):
            machine.take(machine.core.on_decided(said.decision(number, attempt)))
        if data.draw(st.booleans()):
            machine.work_all()

    for _ in range(2 * NUMBERS):
        machine.work_all()
        memo = machine.core.memo
        if memo is not None and machine.core.work is Work.PREPARED:
            machine.take(machine.core.on_decided(said.decision(memo.epoch.number, memo.epoch.attempt)))
        machine.work_all()
        machine.take(machine.core.on_log(said.deliver(machine.core.position)))
    machine.work_all()

    assert machine.database.position == NUMBERS
    assert set(machine.database.applied) == {f"t{n}" for n, end in said.ends.items() if end != "void"}
    assert machine.core.work is Work.IDLE
