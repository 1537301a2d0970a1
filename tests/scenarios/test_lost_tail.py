"""A coordinator whose journal lost its end asks its replicas before it presumes anything of what was there."""

from tests.scenarios.cluster import Pending, letter_of
from tests.scenarios.test_replica_set import ReplicaSet, logs
from tops.core.rendezvous import RendezvousOptions
from tops.errors import TransactionAborted
from tops.ids import NodeId
from tops.messages import EpochDecided, LinkMessage
from tops.records import LogAppended
from tops.transactions import Outcome


def lose_from(replica_set: ReplicaSet, number: int) -> None:
    """The coordinator dies, and its disk lied: it forgot a number of the log, and what was written after it."""
    broker = replica_set.cluster.broker(replica_set.coordinator)
    replica_set.cluster.kill(replica_set.coordinator)
    lost = [
        place
        for place, record in enumerate(broker.disk.records)
        if isinstance(record, LogAppended) and record.event_type == "set" and record.entry.number >= number
    ]
    broker.disk.cut(lost[0])


def commit_at_one(replica_set: ReplicaSet, name: str) -> Pending:
    """A second write is decided, and one replica alone hears of it."""

    def decision_for_another(_: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        return peer in replica_set.databases and peer != name and isinstance(letter_of(message), EpochDecided)

    replica_set.cluster.lose(decision_for_another)
    pending = replica_set.write_soon("two")
    replica_set.cluster.until(lambda: replica_set.databases[name].position == 2, f"{name} did not commit")
    return pending


def alarms(replica_set: ReplicaSet, kind: str) -> list[str]:
    return [text for _, k, text in replica_set.cluster.world.alarms if k == kind]


def everybody_holds(replica_set: ReplicaSet, *marks: str) -> bool:
    return all(d.rows.get("a") == list(marks) for d in replica_set.databases.values())


def finish(replica_set: ReplicaSet, pending: Pending, *marks: str) -> None:
    assert pending.result().outcome is Outcome.COMMITTED
    replica_set.cluster.until(lambda: everybody_holds(replica_set, *marks), f"not everybody holds {marks}")


def test_a_number_that_replicas_have_applied_is_not_given_out_again() -> None:
    replica_set = ReplicaSet()
    replica_set.write("one")
    replica_set.write("two")
    lost = replica_set.cluster["P"].last_tx()
    replica_set.cluster.run(2.0)
    assert {d.position for d in replica_set.databases.values()} == {2}

    lose_from(replica_set, 2)
    replica_set.cluster.restart(replica_set.coordinator)
    finish(replica_set, replica_set.write_soon("three"), "one", "two", "three")

    assert {d.position for d in replica_set.databases.values()} == {3}
    assert replica_set.log()[-1].number == 3
    assert ["A, B, C applied set up to 2" in text for text in alarms(replica_set, "ahead-of-log")] == [True]
    assert replica_set.cluster["P"].outcome(lost).outcome is Outcome.COMMITTED


def test_no_abort_is_presumed_of_what_one_replica_has_committed() -> None:
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    replica_set.write("one")
    cluster.run(2.0)

    pending = commit_at_one(replica_set, "A")
    assert replica_set.databases["B"].prepared is not None
    lose_from(replica_set, 2)
    cluster.lose_nothing()
    cluster.restart(replica_set.coordinator)

    finish(replica_set, pending, "one", "two")
    cluster.until(lambda: len(replica_set.epochs.standing.in_sync) == 3, "B and C are not in sync again")
    finish(replica_set, replica_set.write_soon("three"), "one", "two", "three")
    assert alarms(replica_set, "ahead-of-log")


def two_of_three_go_on(replica_set: ReplicaSet) -> None:
    """C is away, and A and B alone are no reason to go on before it had the time to tell."""
    cluster = replica_set.cluster
    cluster.restart(replica_set.coordinator)
    pending = replica_set.write_soon("three")
    cluster.run(RendezvousOptions().tail_wait_s / 2)
    held_back = not pending.done
    cluster.kill(replica_set.coordinator)  # that its journal was cut off once is not forgotten
    cluster.restart(replica_set.coordinator)
    later = replica_set.write_soon("four")
    cluster.run(RendezvousOptions().tail_wait_s / 2)
    assert held_back and not later.done
    assert all("waiting to hear from A, B, C" in text for text in alarms(replica_set, "tail-lost"))
    assert later.result().outcome is Outcome.COMMITTED
    assert ["C did not tell in time" in text for text in alarms(replica_set, "tail-lost")][-1]


def test_who_is_gone_is_not_waited_for_without_end_and_comes_back() -> None:
    replica_set = ReplicaSet()
    replica_set.write("one")
    replica_set.cluster.run(2.0)
    replica_set.cluster.kill("C")
    replica_set.cluster.kill(replica_set.coordinator)
    replica_set.cluster.broker(replica_set.coordinator).disk.torn = True

    two_of_three_go_on(replica_set)
    replica_set.cluster.restart("C")

    replica_set.converge()
    assert replica_set.epochs.standing.in_sync == {"A", "B", "C"}
    assert not alarms(replica_set, "ahead-of-log")


def test_who_was_not_heard_and_was_ahead_takes_no_part() -> None:
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    replica_set.write("one")
    cluster.run(2.0)

    commit_at_one(replica_set, "C")
    cluster.kill("C")
    lose_from(replica_set, 2)
    cluster.lose_nothing()

    two_of_three_go_on(replica_set)
    cluster.restart("C")
    cluster.until(lambda: bool(alarms(replica_set, "ahead-of-log")), "nobody noticed that C was ahead")
    finish_without_c = replica_set.write_soon("five")

    assert finish_without_c.result().outcome is Outcome.COMMITTED
    assert replica_set.databases["C"].rows["a"] == ["one", "two"]
    assert replica_set.epochs.standing.in_sync == {"A", "B"}


def test_what_was_never_decided_is_aborted_once_everybody_has_told() -> None:
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    replica_set.write("one")
    cluster.run(2.0)
    broker = cluster.broker(replica_set.coordinator)
    cluster.kill_when(replica_set.coordinator, logs)
    pending = replica_set.write_soon("two")
    cluster.until(lambda: not broker.up, "the coordinator was not killed")
    assert all(d.prepared is not None for d in replica_set.databases.values())
    broker.disk.torn = True
    cluster.restart(replica_set.coordinator)

    assert isinstance(pending.failure(), TransactionAborted)
    finish(replica_set, replica_set.write_soon("three"), "one", "three")

    replica_set.converge()
    assert not alarms(replica_set, "ahead-of-log")
    assert {d.position for d in replica_set.databases.values()} == {2}
