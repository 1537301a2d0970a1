"""A replica that was behind comes into sync again: asked, not counted, and counted from its first timely YES on."""

from tests.core.driven_rendezvous import ME, DrivenRendezvous, sent_effects, standing_only
from tests.core.machines import shown
from tops.protocol.effects import Effect, Persist
from tops.protocol.messages import Address, EpochFinished, PrepareEpoch
from tops.protocol.records import LogAppended


def decided(effects: list[Effect]) -> LogAppended | None:
    records = [e.record for e in effects if isinstance(e, Persist)]
    return next((r for r in records if isinstance(r, LogAppended) and r.entry.transactions), None)


def commit(rendezvous: DrivenRendezvous, tx: str) -> list[PrepareEpoch]:
    """A write that everybody who is asked agrees to and finishes."""
    prepares = sent_effects(rendezvous.one_shot(tx, standing_only("set")), PrepareEpoch)
    for prepare in prepares:
        rendezvous.vote(prepare)
    for prepare in prepares:
        finished = EpochFinished(epoch=prepare.epoch, voter=prepare.voter, note=False)
        rendezvous.deliver(finished, Address(ME, prepare.voter, 1))
    return prepares


def two_in_sync_and_one_behind() -> DrivenRendezvous:
    rendezvous = DrivenRendezvous()
    for name in "ab":
        rendezvous.stand(name, "set", name.upper(), position=0)
    commit(rendezvous, "p.1.1")
    rendezvous.stand("c", "set", "C", position=0)  # it has missed number 1
    return rendezvous


def test_a_joining_replica_is_asked_and_not_waited_for() -> None:
    rendezvous = two_in_sync_and_one_behind()

    prepares = {p.voter: p for p in sent_effects(rendezvous.one_shot("p.1.2", standing_only("set")), PrepareEpoch)}
    before = decided(rendezvous.vote(prepares["a"]))
    record = decided(rendezvous.vote(prepares["b"]))

    assert prepares.keys() == {"a", "b", "c"}
    assert before is None
    assert record is not None
    assert record.entry.committing == shown("ab")
    assert rendezvous.core.epochs["set"].standing.in_sync == {"A", "B"}


def test_a_joining_replicas_no_stands_in_nobodys_way() -> None:
    rendezvous = two_in_sync_and_one_behind()
    prepares = {p.voter: p for p in sent_effects(rendezvous.one_shot("p.1.2", standing_only("set")), PrepareEpoch)}

    rendezvous.vote(prepares["c"], prepares["c"].members[0].tx)
    rendezvous.vote(prepares["a"])
    record = decided(rendezvous.vote(prepares["b"]))

    assert record is not None
    assert record.entry.committing == shown("ab")


def test_a_replica_is_in_sync_with_its_first_timely_yes_and_the_same_record_says_so() -> None:
    rendezvous = two_in_sync_and_one_behind()
    prepares = {p.voter: p for p in sent_effects(rendezvous.one_shot("p.1.2", standing_only("set")), PrepareEpoch)}

    for voter in "ca":
        rendezvous.vote(prepares[voter])
    record = decided(rendezvous.vote(prepares["b"]))

    assert record is not None
    assert record.entry.committing == shown("abc")
    assert record.in_sync == frozenset("ABC")


def test_a_replica_that_is_far_behind_is_not_asked_before_it_has_caught_up() -> None:
    rendezvous = DrivenRendezvous()
    rendezvous.stand("a", "set", "A", position=0)
    for number in range(1, 67):
        commit(rendezvous, f"p.1.{number}")
    rendezvous.stand("b", "set", "B", position=0)

    far = {p.voter for p in commit(rendezvous, "p.1.67")}
    rendezvous.stand("b", "set", "B", position=3)
    near = {p.voter for p in commit(rendezvous, "p.1.68")}

    assert (far, near) == ({"a"}, {"a", "b"})
