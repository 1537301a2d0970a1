"""A write that needs two of three is decided with two votes; the third replica keeps its promise or follows the log."""

from collections.abc import Hashable

import msgspec
import pytest

from tests.core.driven_rendezvous import ME, DrivenRendezvous, sent_effects, standing_only
from tests.core.machines import shown
from tops.model.constraints import AtLeast
from tops.model.ids import TxId, hashed, voter_key
from tops.model.transactions import Outcome
from tops.protocol.effects import Alarm, CancelTimer, Effect, Note, Persist, SetTimer
from tops.protocol.messages import (
    Address,
    EpochDecided,
    EpochFinished,
    EpochVoted,
    GetEpochOutcome,
    LogDelivered,
    ParticipantLost,
    PrepareEpoch,
    Sender,
    TxOutcome,
    TxOutcomes,
)
from tops.protocol.records import InSyncChanged, LogAppended

NAMES = frozenset("ABC")
TWO_OF_THREE = msgspec.structs.replace(standing_only("set", AtLeast(2, NAMES)), decide_when_met=True)
ROWS = ((1,),)


def three_replicas() -> DrivenRendezvous:
    rendezvous = DrivenRendezvous()
    for name in "abc":
        rendezvous.stand(name, "set", name.upper(), position=0)
        rendezvous.feed(name, name.upper(), 0)
    return rendezvous


def prepared(rendezvous: DrivenRendezvous, tx: str) -> dict[str, PrepareEpoch]:
    return {p.voter: p for p in sent_effects(rendezvous.one_shot(tx, TWO_OF_THREE), PrepareEpoch)}


def finish(rendezvous: DrivenRendezvous, prepare: PrepareEpoch) -> list[Effect]:
    finished = EpochFinished(epoch=prepare.epoch, voter=prepare.voter, note=False)
    return rendezvous.deliver(finished, Address(ME, prepare.voter, 1))


def fed(effects: list[Effect]) -> list[tuple[str, int]]:
    """Who gets entries of the log up to which number."""
    return [(d.name, d.upto) for d in sent_effects(effects, LogDelivered)]


def told(effects: list[Effect]) -> dict[str, bool]:
    """Who hears a decision, and whether it commits."""
    return {d.voter: hashed(d.voter) in d.committing for d in sent_effects(effects, EpochDecided)}


def decided_by_two(rendezvous: DrivenRendezvous, tx: str = "p.1.1") -> tuple[dict[str, PrepareEpoch], list[Effect]]:
    prepares = prepared(rendezvous, tx)
    rendezvous.vote(prepares["a"], rows=ROWS)
    return prepares, rendezvous.vote(prepares["b"], rows=ROWS)


def fire(rendezvous: DrivenRendezvous, key: Hashable) -> list[Effect]:
    """The timer of an epoch fires."""
    assert isinstance(key, tuple)
    return rendezvous.core.on_timer(key, 3.0)


def test_two_votes_decide_and_the_third_hears_nothing_yet() -> None:
    rendezvous = three_replicas()

    prepares, effects = decided_by_two(rendezvous)

    records = [e.record for e in effects if isinstance(e, Persist) and isinstance(e.record, LogAppended)]
    assert [(r.entry.committing, r.in_sync) for r in records] == [(shown("ab"), frozenset("AB"))]
    assert told(effects) == {"a": True, "b": True}
    assert fed(effects) == []
    assert prepares.keys() == {"a", "b", "c"}


def test_the_publisher_is_answered_when_the_two_have_finished() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)

    first = finish(rendezvous, prepares["a"])
    second = finish(rendezvous, prepares["b"])

    assert sent_effects(first, TxOutcome) == []
    assert [(o.tx, o.pending) for o in sent_effects(second, TxOutcome)] == [("p.1.1", ())]
    assert not sent_effects(second, TxOutcomes)
    assert not any(isinstance(e, CancelTimer) for e in second), "the late one is not waited for without a bound"


@pytest.mark.parametrize("when", ["while the others finish", "after they have finished"])
def test_the_same_work_promised_late_is_committed_and_never_sent(when: str) -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)
    if when == "after they have finished":
        finish(rendezvous, prepares["a"])
        finish(rendezvous, prepares["b"])

    voted = rendezvous.vote(prepares["c"], rows=ROWS)
    finished = finish(rendezvous, prepares["c"])

    assert told(voted) == {"c": True}
    assert fed(voted) == fed(finished) == []
    assert rendezvous.core.epochs["set"].standing.in_sync == NAMES
    assert [e.record.in_sync for e in finished if isinstance(e, Note) and isinstance(e.record, InSyncChanged)] == [
        NAMES
    ]


def test_the_next_write_does_not_wait_for_it_and_does_not_ask_it() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)
    finish(rendezvous, prepares["a"])
    finish(rendezvous, prepares["b"])

    following, effects = decided_by_two(rendezvous, "p.1.2")
    caught_up = rendezvous.vote(prepares["c"], rows=ROWS) + finish(rendezvous, prepares["c"])

    assert following.keys() == {"a", "b"}
    assert told(effects) == {"a": True, "b": True}
    assert fed(effects) == []
    assert fed(caught_up) == [("C", 2)], "what it committed itself is left out"
    assert rendezvous.core.epochs["set"].standing.in_sync == {"A", "B"}, "number 2 is decided without it"


def test_another_number_of_rows_is_undone_and_alarms() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)

    effects = rendezvous.vote(prepares["c"], rows=((0,),))

    assert told(effects) == {"c": False}
    assert fed(effects) == [("C", 1)]
    assert [e.kind for e in effects if isinstance(e, Alarm)] == ["rows-differ"]


def test_a_late_no_is_undone_and_takes_the_entry_from_the_log() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)

    effects = rendezvous.vote(prepares["c"], TxId("p.1.1"))

    assert told(effects) == {"c": False}
    assert fed(effects) == [("C", 1)]
    assert not any(isinstance(e, Alarm) for e in effects)


@pytest.mark.parametrize("finished", [False, True])
def test_who_never_votes_is_told_to_undo_when_the_time_is_up(finished: bool) -> None:
    rendezvous = three_replicas()
    prepares, decided = decided_by_two(rendezvous)
    if finished:
        finish(rendezvous, prepares["a"])
        finish(rendezvous, prepares["b"])
    timer = next(e.key for e in decided if isinstance(e, SetTimer))

    effects = fire(rendezvous, timer)
    too_late = rendezvous.vote(prepares["c"], rows=ROWS)

    assert told(effects) == {"c": False}
    assert fed(effects) == [("C", 1)]
    assert told(too_late) == {}


def test_one_that_was_told_and_does_not_finish_is_sent_the_entry() -> None:
    rendezvous = three_replicas()
    prepares, decided = decided_by_two(rendezvous)
    rendezvous.vote(prepares["c"], rows=ROWS)
    timer = next(e.key for e in decided if isinstance(e, SetTimer))

    effects = fire(rendezvous, timer)

    assert "c" not in told(effects)
    assert ("C", 1) in fed(effects)


def test_one_that_asks_instead_of_voting_is_told_what_the_disk_says() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)
    prepare = prepares["c"]

    asked = GetEpochOutcome(epoch=prepare.epoch, digest=prepare.digest, voter="c")
    effects = rendezvous.deliver(asked, Address(ME, "c", 1))

    assert told(effects) == {"c": False}
    assert fed(effects) == [("C", 1)]


def test_one_that_is_lost_holds_nothing_up() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)

    effects = lose(rendezvous, "c")
    epochs = rendezvous.core.epochs["set"]

    assert told(effects) == {}
    assert voter_key("C", "c") not in epochs.late
    assert epochs.log is not None
    assert epochs.log.held_back == {}
    assert told(rendezvous.vote(prepares["c"], rows=ROWS)) == {}


def on_the_way(rendezvous: DrivenRendezvous) -> dict[str, PrepareEpoch]:
    """Number 3 is being voted on by all three; C was late for number 1 and takes number 2 from the log."""
    first, _ = decided_by_two(rendezvous)
    rendezvous.one_shot("p.1.2", TWO_OF_THREE)
    finish(rendezvous, first["a"])
    rendezvous.vote(first["c"], rows=ROWS)
    second = {p.voter: p for p in sent_effects(finish(rendezvous, first["b"]), PrepareEpoch)}
    finish(rendezvous, first["c"])
    rendezvous.vote(second["a"], rows=ROWS)
    rendezvous.vote(second["b"], rows=ROWS)
    rendezvous.one_shot("p.1.3", TWO_OF_THREE)
    finish(rendezvous, second["a"])
    third = {p.voter: p for p in sent_effects(finish(rendezvous, second["b"]), PrepareEpoch)}
    assert (set(second), set(third)) == ({"a", "b"}, {"a", "b", "c"})
    return third


def lose(rendezvous: DrivenRendezvous, voter: str) -> list[Effect]:
    """The broker of the voter, which is the coordinator itself, sees it go."""
    broker = Sender(ME, "broker", incarnation=1)
    return rendezvous.deliver(ParticipantLost(address=Address(ME, voter, 1)), Address(ME), broker)


def test_when_one_dies_the_one_that_was_late_takes_its_place() -> None:
    rendezvous = three_replicas()
    third = on_the_way(rendezvous)

    rendezvous.vote(third["b"], rows=ROWS)
    lost = lose(rendezvous, "a")
    effects = rendezvous.vote(third["c"], rows=ROWS)

    assert told(lost) == {}
    assert told(effects) == {"a": False, "b": True, "c": True}


def test_two_votes_are_enough_also_when_another_one_died_before_the_second() -> None:
    rendezvous = three_replicas()
    third = on_the_way(rendezvous)

    rendezvous.vote(third["c"], rows=ROWS)
    lose(rendezvous, "a")
    effects = rendezvous.vote(third["b"], rows=ROWS)

    assert told(effects) == {"a": False, "b": True, "c": True}


def test_one_that_is_late_is_asked_where_nobody_else_is_left() -> None:
    rendezvous = three_replicas()
    first, _ = decided_by_two(rendezvous)
    finish(rendezvous, first["a"])
    finish(rendezvous, first["b"])
    lose(rendezvous, "a")

    second = prepared(rendezvous, "p.1.2")
    rendezvous.vote(second["b"], rows=ROWS)
    rendezvous.vote(first["c"], rows=ROWS)
    finish(rendezvous, first["c"])
    effects = rendezvous.vote(second["c"], rows=ROWS)

    assert second.keys() == {"b", "c"}
    assert told(effects) == {"b": True, "c": True}


def second_without_the_late_one(
    rendezvous: DrivenRendezvous,
) -> tuple[PrepareEpoch, dict[str, PrepareEpoch], SetTimer]:
    """Number 2 is being voted on by A and B; C, still at number 1, was not asked. What C is at, what A and B are, and
    the time they have."""
    first, _ = decided_by_two(rendezvous)
    finish(rendezvous, first["a"])
    finish(rendezvous, first["b"])
    effects = rendezvous.one_shot("p.1.2", TWO_OF_THREE)
    second = {p.voter: p for p in sent_effects(effects, PrepareEpoch)}
    assert second.keys() == {"a", "b"}
    return first["c"], second, next(e for e in effects if isinstance(e, SetTimer))


@pytest.mark.parametrize("has_voted", [True, False])
def test_one_that_was_left_alone_is_asked_when_another_one_dies(has_voted: bool) -> None:
    rendezvous = three_replicas()
    late, second, _ = second_without_the_late_one(rendezvous)
    effects = rendezvous.vote(second["b"], rows=ROWS) if has_voted else []
    effects += lose(rendezvous, "a")
    effects += [] if has_voted else rendezvous.vote(second["b"], rows=ROWS)

    third = {p.voter: p for p in sent_effects(effects, PrepareEpoch)}
    assert told(effects) == {"a": False, "b": False}
    assert {p.epoch.number for p in third.values()} == {3}
    assert sent_effects(effects, TxOutcome) == []
    rendezvous.vote(third["b"], rows=ROWS)
    assert told(rendezvous.vote(late, rows=ROWS)) == {"c": True}
    finish(rendezvous, late)
    assert told(rendezvous.vote(third["c"], rows=ROWS)) == {"b": True, "c": True}
    effects = finish(rendezvous, third["b"]) + finish(rendezvous, third["c"])
    assert [(o.tx, o.outcome) for o in sent_effects(effects, TxOutcome)] == [("p.1.2", Outcome.COMMITTED)]


def test_one_that_was_left_alone_is_asked_when_another_one_does_not_vote_in_time() -> None:
    rendezvous = three_replicas()
    late, second, window = second_without_the_late_one(rendezvous)
    rendezvous.vote(late, rows=ROWS)
    finish(rendezvous, late)
    rendezvous.vote(second["b"], rows=ROWS)

    effects = fire(rendezvous, window.key)

    third = {p.voter: p for p in sent_effects(effects, PrepareEpoch)}
    assert third.keys() == {"a", "b", "c"}
    rendezvous.vote(third["b"], rows=ROWS)
    assert told(rendezvous.vote(third["c"], rows=ROWS)) == {"b": True, "c": True}


def test_with_nobody_left_to_ask_it_is_refused_at_once() -> None:
    rendezvous = three_replicas()
    _, second, _ = second_without_the_late_one(rendezvous)
    lose(rendezvous, "c")
    rendezvous.vote(second["b"], rows=ROWS)

    effects = lose(rendezvous, "a")

    assert sent_effects(effects, PrepareEpoch) == []
    assert [(o.tx, o.outcome) for o in sent_effects(effects, TxOutcome)] == [("p.1.2", Outcome.ABORTED)]


def test_the_late_one_is_asked_before_a_single_no_refuses() -> None:
    rendezvous = three_replicas()
    late, second, _ = second_without_the_late_one(rendezvous)
    rendezvous.vote(second["b"], TxId("p.1.2"))
    effects = rendezvous.vote(second["a"], rows=ROWS)

    third = {p.voter: p for p in sent_effects(effects, PrepareEpoch)}
    assert third.keys() == {"a", "b", "c"}
    assert sent_effects(effects, TxOutcome) == []
    rendezvous.vote(third["b"], TxId("p.1.2"))
    rendezvous.vote(third["a"], rows=ROWS)
    rendezvous.vote(late, rows=ROWS)
    finish(rendezvous, late)
    assert told(rendezvous.vote(third["c"], rows=ROWS)) == {"a": True, "b": False, "c": True}


def test_the_late_one_is_asked_once_and_then_the_votes_count() -> None:
    rendezvous = three_replicas()
    late, second, _ = second_without_the_late_one(rendezvous)
    rendezvous.vote(second["b"], rows=((0,),))
    third = {p.voter: p for p in sent_effects(rendezvous.vote(second["a"], rows=ROWS), PrepareEpoch)}
    rendezvous.vote(late, rows=ROWS)
    finish(rendezvous, late)
    rendezvous.vote(third["a"], rows=ROWS)
    rendezvous.vote(third["b"], rows=((0,),))

    effects = rendezvous.vote(third["c"], TxId("p.1.2"))

    assert [(o.tx, o.outcome) for o in sent_effects(effects, TxOutcome)] == [("p.1.2", Outcome.ABORTED)]


def test_what_those_who_were_asked_can_not_apply_is_refused_at_once() -> None:
    rendezvous = three_replicas()
    _, second, _ = second_without_the_late_one(rendezvous)
    rendezvous.vote(second["b"], TxId("p.1.2"))

    effects = rendezvous.vote(second["a"], TxId("p.1.2"))

    assert [(o.tx, o.outcome) for o in sent_effects(effects, TxOutcome)] == [("p.1.2", Outcome.ABORTED)]


def test_a_member_that_all_who_were_asked_accept_does_not_wait_for_one_that_needs_the_late_one() -> None:
    rendezvous = three_replicas()
    first, _ = decided_by_two(rendezvous)
    rendezvous.one_shots(TWO_OF_THREE, "p.1.2", "p.1.3")
    finish(rendezvous, first["a"])
    second = {p.voter: p for p in sent_effects(finish(rendezvous, first["b"]), PrepareEpoch)}
    rendezvous.vote(second["a"], rows=ROWS * 2)
    effects = rendezvous.vote(second["b"], TxId("p.1.2"), rows=ROWS * 2)

    without = {p.voter: p for p in sent_effects(effects, PrepareEpoch)}
    assert {(p.voter, p.epoch.attempt, *[m.tx for m in p.members]) for p in without.values()} == {
        ("a", 2, "p.1.3"),
        ("b", 2, "p.1.3"),
    }
    rendezvous.vote(without["a"], rows=ROWS)
    rendezvous.vote(without["b"], rows=ROWS)
    finish(rendezvous, without["a"])
    with_all = sent_effects(finish(rendezvous, without["b"]), PrepareEpoch)
    assert {(p.voter, *[m.tx for m in p.members]) for p in with_all} == {(key, "p.1.2") for key in "abc"}


def test_a_write_without_constraints_is_not_done_without_one_that_was_asked() -> None:
    rendezvous = three_replicas()
    first, _ = decided_by_two(rendezvous)
    finish(rendezvous, first["a"])
    finish(rendezvous, first["b"])
    second = {p.voter: p for p in sent_effects(rendezvous.one_shot("p.1.2", standing_only("set")), PrepareEpoch)}
    assert second.keys() == {"a", "b"}
    rendezvous.vote(second["b"], rows=ROWS)

    effects = lose(rendezvous, "a")

    assert sent_effects(effects, PrepareEpoch) == []
    assert [(o.tx, o.outcome) for o in sent_effects(effects, TxOutcome)] == [("p.1.2", Outcome.ABORTED)]


def test_rows_that_differ_alarm_although_the_late_one_is_asked_next() -> None:
    rendezvous = three_replicas()
    _, second, _ = second_without_the_late_one(rendezvous)
    rendezvous.vote(second["b"], rows=((0,),))

    effects = rendezvous.vote(second["a"], rows=ROWS)

    assert len(sent_effects(effects, PrepareEpoch)) == 3
    assert [e.kind for e in effects if isinstance(e, Alarm)] == ["rows-differ"]


def test_one_that_gave_up_is_not_counted_on() -> None:
    rendezvous = three_replicas()
    first, decided = decided_by_two(rendezvous)
    finish(rendezvous, first["a"])
    finish(rendezvous, first["b"])
    fire(rendezvous, next(e.key for e in decided if isinstance(e, SetTimer)))
    lose(rendezvous, "a")

    effects = rendezvous.one_shot("p.1.2", TWO_OF_THREE)

    assert [(o.tx, o.outcome) for o in sent_effects(effects, TxOutcome)] == [("p.1.2", Outcome.ABORTED)]


def test_one_that_finishes_behind_the_end_is_not_in_sync() -> None:
    rendezvous = three_replicas()
    first, _ = decided_by_two(rendezvous)
    for voter in "ab":
        finish(rendezvous, first[voter])
    second, _ = decided_by_two(rendezvous, "p.1.2")
    for voter in "ab":
        finish(rendezvous, second[voter])

    rendezvous.vote(first["c"], rows=ROWS)
    effects = finish(rendezvous, first["c"])

    assert rendezvous.core.epochs["set"].standing.in_sync == {"A", "B"}
    assert not any(isinstance(e, Note) for e in effects)


def test_a_participant_without_a_position_does_not_become_a_replica() -> None:
    rendezvous = DrivenRendezvous()
    for name in "ab":
        rendezvous.stand(name, "set", name.upper(), position=0)
        rendezvous.feed(name, name.upper(), 0)
    rendezvous.stand("c", "set", "C")
    prepares, _ = decided_by_two(rendezvous)
    finish(rendezvous, prepares["a"])
    finish(rendezvous, prepares["b"])

    rendezvous.vote(prepares["c"], rows=ROWS)
    finish(rendezvous, prepares["c"])

    standing = rendezvous.core.epochs["set"].standing
    assert not standing.registrations[voter_key("C", "c")].replica
    assert standing.in_sync == {"A", "B"}


@pytest.mark.parametrize("changed", ["attempt", "digest", "life", "number of rows"])
def test_a_late_vote_on_something_else_is_none(changed: str) -> None:
    rendezvous = three_replicas()
    prepare = decided_by_two(rendezvous)[0]["c"]
    other = msgspec.structs.replace
    attempt = other(prepare.epoch, attempt=2) if changed == "attempt" else prepare.epoch
    vote = EpochVoted(
        epoch=attempt,
        digest="another" if changed == "digest" else prepare.digest,
        voter="c",
        excluded={},
        rows=ROWS * 2 if changed == "number of rows" else ROWS,
    )

    effects = rendezvous.deliver(vote, Address(ME, "c", 2 if changed == "life" else 1))

    assert (told(effects), fed(effects)) == ({}, [])
    assert told(rendezvous.vote(prepare, rows=ROWS)) == {"c": True}


def test_a_late_vote_is_answered_once() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)

    first = rendezvous.vote(prepares["c"], rows=ROWS)
    again = rendezvous.vote(prepares["c"], TxId("p.1.1"))

    assert told(first) == {"c": True}
    assert (told(again), fed(again)) == ({}, [])


def test_what_is_said_about_another_epoch_releases_nothing() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)
    finish(rendezvous, prepares["a"])
    finish(rendezvous, prepares["b"])
    other = msgspec.structs.replace(prepares["c"].epoch, attempt=2)

    said = rendezvous.deliver(EpochFinished(epoch=other, voter="c", note=False), Address(ME, "c", 1))
    asked = rendezvous.deliver(GetEpochOutcome(epoch=other, digest="d", voter="c"), Address(ME, "c", 1))
    other_timer = fire(rendezvous, ("epoch", "set", 7))

    assert fed(said) == fed(asked) == fed(other_timer) == []
    assert voter_key("C", "c") in rendezvous.core.epochs["set"].late


def test_one_that_asks_after_the_others_have_finished_is_told_what_the_disk_says() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)
    finish(rendezvous, prepares["a"])
    finish(rendezvous, prepares["b"])
    prepare = prepares["c"]

    effects = rendezvous.deliver(
        GetEpochOutcome(epoch=prepare.epoch, digest=prepare.digest, voter="c"), Address(ME, "c", 1)
    )

    assert told(effects) == {"c": False}
    assert fed(effects) == [("C", 1)]


@pytest.mark.parametrize(("enough", "rejected"), [(1, True), (2, True), (3, False)])
def test_two_decisions_must_have_somebody_in_common(enough: int, rejected: bool) -> None:
    rendezvous = DrivenRendezvous()
    for name in "abcd":
        rendezvous.stand(name, "set", name.upper(), position=0)
    spec = msgspec.structs.replace(TWO_OF_THREE, constraints=(AtLeast(enough, frozenset("ABCD")),))

    effects = rendezvous.one_shot("p.1.1", spec)

    assert bool(sent_effects(effects, PrepareEpoch)) is not rejected
    assert ["more than half" in o.reason for o in sent_effects(effects, TxOutcome)] == [True] * rejected


def test_those_who_were_not_in_sync_do_not_decide_among_themselves() -> None:
    """Of a set that has grown two majorities need not meet: whoever the journal names must know of the decision."""
    rendezvous = three_replicas()
    first, _ = decided_by_two(rendezvous)
    rendezvous.vote(first["c"], TxId("p.1.1"))
    for name in "de":
        rendezvous.stand(name, "set", name.upper(), position=0)
    finish(rendezvous, first["a"])
    finish(rendezvous, first["b"])
    of_five = msgspec.structs.replace(TWO_OF_THREE, constraints=(AtLeast(3, frozenset("ABCDE")),))
    rendezvous.core.epochs["set"].standing.near = frozenset("C")
    second = {p.voter: p for p in sent_effects(rendezvous.one_shot("p.1.2", of_five), PrepareEpoch)}

    without = [rendezvous.vote(second[voter], rows=ROWS) for voter in "cde"]
    effects = rendezvous.vote(second["a"], rows=ROWS)

    assert [told(effects) for effects in without] == [{}, {}, {}]
    assert told(effects) == {"a": True, "c": True, "d": True, "e": True}


def test_votes_that_differ_wait_for_the_third() -> None:
    rendezvous = three_replicas()
    prepares = prepared(rendezvous, "p.1.1")

    rendezvous.vote(prepares["a"], rows=ROWS)
    differing = rendezvous.vote(prepares["b"], rows=((0,),))
    third = rendezvous.vote(prepares["c"], rows=ROWS)

    assert told(differing) == {}
    assert told(third) == {"a": True, "b": False, "c": True}


def test_without_the_wish_everybody_in_sync_is_waited_for() -> None:
    rendezvous = three_replicas()
    spec = standing_only("set", AtLeast(2, NAMES))
    prepares = {p.voter: p for p in sent_effects(rendezvous.one_shot("p.1.1", spec), PrepareEpoch)}

    rendezvous.vote(prepares["a"], rows=ROWS)
    second = rendezvous.vote(prepares["b"], rows=ROWS)
    third = rendezvous.vote(prepares["c"], rows=ROWS)

    assert told(second) == {}
    assert told(third) == {"a": True, "b": True, "c": True}


def test_one_member_that_wants_everybody_makes_all_of_its_epoch_wait() -> None:
    rendezvous = three_replicas()
    first, _ = decided_by_two(rendezvous)
    rendezvous.vote(first["c"], rows=ROWS)
    rendezvous.one_shot("p.1.2", TWO_OF_THREE)
    rendezvous.one_shot("p.1.3", standing_only("set", AtLeast(2, NAMES)))
    finish(rendezvous, first["c"])
    finish(rendezvous, first["a"])
    prepares = {p.voter: p for p in sent_effects(finish(rendezvous, first["b"]), PrepareEpoch)}
    rows = ((1,), (1,))

    rendezvous.vote(prepares["a"], rows=rows)
    second = rendezvous.vote(prepares["b"], rows=rows)

    assert [m.tx for m in prepares["a"].members] == ["p.1.2", "p.1.3"]
    assert told(second) == {}
