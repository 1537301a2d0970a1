"""A write that needs two of three is decided with two votes; the third replica keeps its promise or follows the log."""

import msgspec
import pytest

from tests.core.driven_rendezvous import ME, DrivenRendezvous, posts, standing_only
from tops.constraints import AtLeast
from tops.effects import Alarm, CancelTimer, Effect, Note, Persist, SetTimer
from tops.ids import TxId, hashed
from tops.messages import (
    Address,
    AskEpoch,
    EpochDecided,
    EpochFinished,
    LogDelivered,
    ParticipantLost,
    PrepareEpoch,
    TxOutcome,
    TxOutcomes,
)
from tops.records import InSyncChanged, LogAppended

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
    return {p.voter: p for p in posts(rendezvous.one_shot(tx, TWO_OF_THREE), PrepareEpoch)}


def finish(rendezvous: DrivenRendezvous, prepare: PrepareEpoch) -> list[Effect]:
    finished = EpochFinished(epoch=prepare.epoch, voter=prepare.voter, note=False)
    return rendezvous.hear(finished, Address(ME, prepare.voter, 1))


def fed(effects: list[Effect]) -> list[tuple[str, int]]:
    """Who gets entries of the log up to which number."""
    return [(d.name, d.upto) for d in posts(effects, LogDelivered)]


def told(effects: list[Effect]) -> dict[str, bool]:
    """Who hears a decision, and whether it commits."""
    return {d.voter: hashed(d.voter) in d.committing for d in posts(effects, EpochDecided)}


def decided_by_two(rendezvous: DrivenRendezvous, tx: str = "p.1.1") -> tuple[dict[str, PrepareEpoch], list[Effect]]:
    prepares = prepared(rendezvous, tx)
    rendezvous.vote(prepares["a"], rows=ROWS)
    return prepares, rendezvous.vote(prepares["b"], rows=ROWS)


def test_two_votes_decide_and_the_third_hears_nothing_yet() -> None:
    rendezvous = three_replicas()

    prepares, effects = decided_by_two(rendezvous)

    records = [e.record for e in effects if isinstance(e, Persist) and isinstance(e.record, LogAppended)]
    assert [(r.entry.committing, r.in_sync) for r in records] == [({"a", "b"}, {"A", "B"})]
    assert told(effects) == {"a": True, "b": True}
    assert fed(effects) == []
    assert prepares.keys() == {"a", "b", "c"}


def test_the_publisher_is_answered_when_the_two_have_finished() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)

    first = finish(rendezvous, prepares["a"])
    second = finish(rendezvous, prepares["b"])

    assert posts(first, TxOutcome) == []
    assert [(o.tx, o.pending) for o in posts(second, TxOutcome)] == [("p.1.1", ())]
    assert not posts(second, TxOutcomes)
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

    effects = rendezvous.core.on_timer(timer, 3.0)
    too_late = rendezvous.vote(prepares["c"], rows=ROWS)

    assert told(effects) == {"c": False}
    assert fed(effects) == [("C", 1)]
    assert told(too_late) == {}


def test_one_that_was_told_and_does_not_finish_is_sent_the_entry() -> None:
    rendezvous = three_replicas()
    prepares, decided = decided_by_two(rendezvous)
    rendezvous.vote(prepares["c"], rows=ROWS)
    timer = next(e.key for e in decided if isinstance(e, SetTimer))

    effects = rendezvous.core.on_timer(timer, 3.0)

    assert "c" not in told(effects)
    assert ("C", 1) in fed(effects)


def test_one_that_asks_instead_of_voting_is_told_what_the_disk_says() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)
    prepare = prepares["c"]

    asked = AskEpoch(epoch=prepare.epoch, digest=prepare.digest, voter="c")
    effects = rendezvous.hear(asked, Address(ME, "c", 1))

    assert told(effects) == {"c": False}
    assert fed(effects) == [("C", 1)]


def test_one_that_is_lost_holds_nothing_up() -> None:
    rendezvous = three_replicas()
    prepares, _ = decided_by_two(rendezvous)

    effects = rendezvous.hear(ParticipantLost(handles=("c",)), Address(ME))
    epochs = rendezvous.core.epochs["set"]

    assert told(effects) == {}
    assert "c" not in epochs.late
    assert epochs.log is not None
    assert epochs.log.held_back == {}
    assert told(rendezvous.vote(prepares["c"], rows=ROWS)) == {}


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
    prepares = {p.voter: p for p in posts(rendezvous.one_shot("p.1.1", spec), PrepareEpoch)}

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
    prepares = {p.voter: p for p in posts(finish(rendezvous, first["b"]), PrepareEpoch)}
    rows = ((1,), (1,))

    rendezvous.vote(prepares["a"], rows=rows)
    second = rendezvous.vote(prepares["b"], rows=rows)

    assert [m.tx for m in prepares["a"].members] == ["p.1.2", "p.1.3"]
    assert told(second) == {}
