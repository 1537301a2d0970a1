"""The start of a set as a protocol: random orders of messages, crashes and direct writes never start it unequal."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from replication.replica.start.decisions import (
    Agree,
    Decision,
    Differ,
    Report,
    Start,
    State,
    TakeCopy,
    Wait,
    Withdraw,
    basis_of,
    decide,
)
from replication.replica.start.fingerprint import Fingerprint, TableDigest

NAMES = ("r1", "r2", "r3")


def fingerprint(rows: int, schema: str = "s") -> Fingerprint:
    return Fingerprint({}, {}, {"t": TableDigest(schema, rows, f"data of {rows}")})


def compared(rows: int, attempt: str = "a") -> Report:
    return Report(State.COMPARED, attempt, "", fingerprint(rows))


def choice(own: str, *, decided: int = 0, whole: bool = True, **reports: Report) -> Decision:
    return decide(own, set(NAMES), reports, decided=decided, log_is_whole=whole)


BASIS = basis_of(dict.fromkeys(NAMES, "a"))
AGREED = replace(compared(5), state=State.AGREED, basis=BASIS)
STARTED = replace(AGREED, state=State.STARTED)


def test_equal_fingerprints_of_all_replicas_are_agreed_to() -> None:
    assert choice("r1", r1=compared(5), r2=compared(5), r3=compared(5)) == Agree(BASIS)


def test_one_replica_that_does_not_respond_keeps_the_set_from_starting() -> None:
    decision = choice("r1", r1=compared(5), r2=compared(5))

    assert isinstance(decision, Wait)
    assert "r3" in decision.reason


def test_a_difference_is_told_even_before_all_have_responded() -> None:
    decision = choice("r1", r1=compared(5), r2=compared(0))

    assert isinstance(decision, Differ)
    assert "5 on r1, 0 on r2" in decision.differences[0].text


def test_a_table_of_the_set_that_no_database_has_is_a_difference() -> None:
    reports = {name: compared(5) for name in NAMES}

    decision = decide("r1", set(NAMES), reports, decided=0, log_is_whole=True, tables=["t", "gone"])

    assert isinstance(decision, Differ)
    assert decision.differences[0].text == "table gone is missing on r1, r2, r3"


def test_a_replica_starts_when_all_have_agreed_to_its_basis_and_not_before() -> None:
    assert isinstance(choice("r1", r1=AGREED, r2=AGREED, r3=compared(5)), Wait)
    assert choice("r1", r1=AGREED, r2=AGREED, r3=AGREED) == Start()


def test_a_replica_withdraws_when_another_one_is_at_a_later_attempt() -> None:
    assert choice("r1", r1=AGREED, r2=AGREED, r3=compared(5, "b")) == Withdraw()


def test_a_replica_that_had_agreed_follows_the_log_of_those_who_have_started() -> None:
    assert choice("r3", decided=7, r1=STARTED, r3=AGREED) == Start()
    assert choice("r3", decided=7, whole=False, r1=STARTED, r3=AGREED) == TakeCopy(("r1",), replaceable=True)


def test_a_replica_that_the_set_began_without_takes_a_copy() -> None:
    assert choice("r3", decided=7, r1=STARTED, r2=STARTED, r3=Report(State.NEW)) == TakeCopy(("r1", "r2"))
    assert choice("r3", decided=7, r1=STARTED, r3=compared(5)) == TakeCopy(("r1",))


def test_a_log_whose_replicas_are_all_away_is_not_begun_anew() -> None:
    reports: dict[str, Any] = {name: compared(0) for name in NAMES}

    decision = choice("r1", decided=7, **reports)

    assert isinstance(decision, Wait)
    assert "index 7" in decision.reason


# ------------------------------------------------------------------------------------------------------ random orders


@dataclass
class Replica:
    """A database with one number in it, and an agent that has collected some reports, possibly old ones."""

    data: int = 0
    report: Report = field(default_factory=lambda: Report(State.NEW))
    seen: dict[str, Report] = field(default_factory=dict)
    began_with: int | None = None


class World:
    """Replicas under a random schedule. Every step is atomic, as it is in a database; reports grow old in between."""

    def __init__(self, seed: int, decide: Callable[..., Decision] = decide) -> None:
        self.random, self.decide = random.Random(seed), decide
        self.replicas = {name: Replica() for name in NAMES}
        self.attempts = 0

    def step(self) -> None:
        name = self.random.choice(NAMES)
        replica = self.replicas[name]
        match self.random.choices(("ask", "decide", "write", "crash"), (6, 6, 1, 1))[0]:
            case "ask":
                other = self.random.choice(NAMES)
                replica.seen[other] = self.replicas[other].report
            case "decide" if replica.report.state is not State.STARTED:
                self._decide(name, replica)
            case "write":
                self._write(replica)
            case "crash":
                replica.seen.clear()

    def _decide(self, name: str, replica: Replica) -> None:
        if replica.report.state is State.NEW:
            replica.report = compared(replica.data, self._attempt())
            return
        seen = {**replica.seen, name: replica.report}
        match self.decide(name, set(NAMES), seen, decided=0, log_is_whole=True):
            case Agree(basis) if replica.report.fingerprint == fingerprint(replica.data):
                replica.report = replace(replica.report, state=State.AGREED, basis=basis)
            case Agree():
                replica.report = Report(State.NEW)
            case Withdraw():
                replica.report = compared(replica.data, self._attempt())
            case Start():
                replica.report = replace(replica.report, state=State.STARTED)
                replica.began_with = replica.data

    def _write(self, replica: Replica) -> None:
        """By hand: possible until the guard rejects it; the fingerprint is then taken again."""
        if replica.report.state in (State.NEW, State.COMPARED):
            replica.data = self.random.choices((0, 1), (4, 1))[0]
            if self.random.random() < 0.5:  # noticed at once, or only when it would be agreed to
                replica.report = Report(State.NEW)

    def _attempt(self) -> str:
        self.attempts += 1
        return str(self.attempts)

    def check(self) -> None:
        """Whoever has started began with what every other replica holds and can't lose any more."""
        for started in self.replicas.values():
            if started.began_with is not None:
                for other in self.replicas.values():
                    assert other.data == started.began_with
                    assert other.report.state in (State.AGREED, State.STARTED)


def run(seed: int, decide: Callable[..., Decision] = decide, steps: int = 400) -> World:
    world = World(seed, decide)
    for _ in range(steps):
        world.step()
        world.check()
    return world


def test_no_order_of_messages_crashes_and_direct_writes_starts_a_set_unequal() -> None:
    worlds = [run(seed) for seed in range(400)]

    started = sum(all(r.began_with is not None for r in world.replicas.values()) for world in worlds)
    assert started > 100, "hardly a set started: nothing was tested"


def hasty(own: str, listed: set[str], reports: dict[str, Report], **more: object) -> Decision:
    """Starts on equal fingerprints, without asking whether they are still true."""
    decision = decide(own, listed, reports, **more)  # type: ignore[arg-type]
    return Start() if isinstance(decision, Agree) else decision


def careless(own: str, listed: set[str], reports: dict[str, Report], **more: object) -> Decision:
    """Starts when all have agreed, to whatever."""
    mine = reports[own]
    if mine.state is State.AGREED and len(reports) == len(listed):
        agreed = all(r.state in (State.AGREED, State.STARTED) for r in reports.values())
        return Start() if agreed else Withdraw()
    return decide(own, listed, reports, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [hasty, careless])
def test_the_check_finds_protocols_that_are_wrong(wrong: Callable[..., Decision]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(2000):
            run(seed, wrong)
