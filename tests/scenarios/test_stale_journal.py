"""A coordinator on an older copy of its journal gives out nothing, until an operator lets its log go on."""

from tests.scenarios.cluster import content_of
from tests.scenarios.test_replica_set import ReplicaSet, logs
from tops.core.coordinator.rendezvous import RendezvousOptions
from tops.model.errors import JournalStale, TransactionAborted
from tops.model.ids import NodeId
from tops.model.transactions import Outcome
from tops.protocol.messages import EpochDecided, LinkMessage, LogRecovered, RecoverLog
from tops.protocol.records import LogAppended


def restore(replica_set: ReplicaSet, end: int) -> None:
    """The coordinator dies, and comes back with a copy of its journal that was taken when the log ended there."""
    broker = replica_set.cluster.broker(replica_set.coordinator)
    replica_set.cluster.kill(replica_set.coordinator)
    beyond = [
        place
        for place, record in enumerate(broker.disk.records)
        if isinstance(record, LogAppended) and record.event_type == "set" and record.entry.number > end
    ]
    broker.disk.cut(beyond[0])


def commit_at_one(replica_set: ReplicaSet, name: str, mark: str) -> None:
    """A write is decided, and one replica alone hears of it."""

    def decision_for_another(_: NodeId, peer: NodeId, message: LinkMessage) -> bool:
        return peer in replica_set.databases and peer != name and isinstance(content_of(message), EpochDecided)

    before = replica_set.databases[name].position
    replica_set.cluster.lose(decision_for_another)
    replica_set.write_soon(mark)
    replica_set.cluster.until(lambda: replica_set.databases[name].position > before, f"{name} did not commit")


def alarms(replica_set: ReplicaSet, kind: str) -> list[str]:
    return [text for _, k, text in replica_set.cluster.world.alarms if k == kind]


def recover(replica_set: ReplicaSet, *replicas: str, needed: int = 3, accept_loss: bool = False) -> LogRecovered:
    cluster = replica_set.cluster
    core = cluster["P"].node.core
    answer: LogRecovered = (
        cluster["P"].request(lambda request: core.recover_log(request, "set", replicas, needed, accept_loss)).result()
    )
    assert isinstance(answer, LogRecovered), RecoverLog
    return answer


def is_stale(replica_set: ReplicaSet) -> bool:
    return bool(alarms(replica_set, "journal-stale"))


def written(replica_set: ReplicaSet, *marks: str) -> None:
    for mark in marks:
        replica_set.write(mark)
    replica_set.cluster.run(2.0)


def test_an_index_that_replicas_have_applied_is_not_given_out_again() -> None:
    replica_set = ReplicaSet()
    written(replica_set, "one", "two", "three")
    restore(replica_set, 1)
    replica_set.cluster.restart(replica_set.coordinator)

    failure = replica_set.write_soon("four").failure()

    assert isinstance(failure, JournalStale)
    assert (failure.code, failure.event_type, failure.index, failure.replica_index) == ("journal-stale", "set", 1, 3)
    assert failure.replica in ("A", "B", "C")
    assert {d.position for d in replica_set.databases.values()} == {3}


def test_the_newer_journal_put_back_opens_the_log_again() -> None:
    replica_set = ReplicaSet()
    written(replica_set, "one", "two")
    disk = replica_set.cluster.broker(replica_set.coordinator).disk
    newest = list(disk.records)
    restore(replica_set, 1)
    replica_set.cluster.restart(replica_set.coordinator)
    replica_set.cluster.until(lambda: is_stale(replica_set), "nobody noticed")

    replica_set.cluster.kill(replica_set.coordinator)
    disk.records, disk.synced = newest, len(newest)
    replica_set.cluster.restart(replica_set.coordinator)

    assert replica_set.write_soon("three").result().outcome is Outcome.COMMITTED
    replica_set.converge()


def test_a_new_history_goes_on_where_the_replicas_are() -> None:
    replica_set = ReplicaSet()
    written(replica_set, "one", "two", "three")
    lost = replica_set.cluster["P"].last_tx()
    restore(replica_set, 1)
    replica_set.cluster.restart(replica_set.coordinator)
    replica_set.cluster.until(lambda: is_stale(replica_set), "nobody noticed")
    replica_set.cluster.run(2.0)

    recovered = recover(replica_set, "A", "B", "C")

    assert (recovered.problem, recovered.following) == ("", ("A", "B", "C"))
    assert replica_set.write_soon("four").result().outcome is Outcome.COMMITTED
    everybody = replica_set.databases.values()
    replica_set.cluster.until(lambda: all(d.position == 4 for d in everybody), "not everybody goes on")
    assert {d.point.digest for d in everybody} == {replica_set.databases["A"].point.digest}
    assert replica_set.databases["A"].rows["a"] == ["one", "two", "three", "four"]
    assert replica_set.cluster["P"].outcome(lost).outcome is Outcome.COMMITTED


def test_a_new_history_needs_everybody_who_may_hold_what_was_acknowledged() -> None:
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    written(replica_set, "one", "two")
    cluster.kill("C")
    restore(replica_set, 1)
    cluster.restart(replica_set.coordinator)
    cluster.until(lambda: is_stale(replica_set), "nobody noticed")
    cluster.run(2.0)

    rejected = recover(replica_set, "A", "B", "C")
    accepted = recover(replica_set, "A", "B", "C", accept_loss=True)

    assert "may be at C alone" in rejected.problem
    assert (accepted.problem, accepted.following, accepted.silent) == ("", ("A", "B"), ("C",))


def test_a_replica_that_holds_more_than_the_new_history_takes_no_part() -> None:
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    written(replica_set, "one", "two")
    commit_at_one(replica_set, "C", "three")
    cluster.kill("C")
    restore(replica_set, 1)
    cluster.lose_nothing()
    cluster.restart(replica_set.coordinator)
    cluster.until(lambda: is_stale(replica_set), "nobody noticed")
    cluster.run(2.0)

    recover(replica_set, "A", "B", "C", accept_loss=True)
    assert replica_set.write_soon("four").result().outcome is Outcome.COMMITTED
    cluster.restart("C")
    cluster.until(lambda: bool(alarms(replica_set, "other-history")), "nobody noticed that C holds something else")

    assert replica_set.write_soon("five").result().outcome is Outcome.COMMITTED
    assert replica_set.databases["C"].rows["a"] == ["one", "two", "three"]
    assert replica_set.epochs.standing.in_sync == {"A", "B"}


def two_of_three_go_on(replica_set: ReplicaSet) -> None:
    """C is away, and A and B alone are no reason to go on before it had the time to tell."""
    cluster = replica_set.cluster
    cluster.restart(replica_set.coordinator)
    pending = replica_set.write_soon("three")
    cluster.run(RendezvousOptions().tail_wait_s / 2)
    assert not pending.done
    assert pending.result().outcome is Outcome.COMMITTED
    assert ["C did not report" in text for text in alarms(replica_set, "replicas-silent")][-1]


def test_who_is_gone_is_not_waited_for_without_end_and_comes_back() -> None:
    replica_set = ReplicaSet()
    written(replica_set, "one")
    replica_set.cluster.kill("C")
    replica_set.cluster.kill(replica_set.coordinator)

    two_of_three_go_on(replica_set)
    replica_set.cluster.restart("C")

    replica_set.converge()
    assert replica_set.epochs.standing.in_sync == {"A", "B", "C"}
    assert not alarms(replica_set, "ahead-of-log")


def test_who_was_not_heard_and_was_ahead_takes_no_part() -> None:
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    written(replica_set, "one")
    commit_at_one(replica_set, "C", "two")
    cluster.kill("C")
    restore(replica_set, 1)
    cluster.lose_nothing()

    two_of_three_go_on(replica_set)
    cluster.restart("C")
    cluster.until(lambda: bool(alarms(replica_set, "ahead-of-log")), "nobody noticed that C was ahead")

    assert replica_set.write_soon("five").result().outcome is Outcome.COMMITTED
    assert replica_set.databases["C"].rows["a"] == ["one", "two"]
    assert replica_set.epochs.standing.in_sync == {"A", "B"}


def test_what_was_never_decided_is_aborted_once_everybody_has_told() -> None:
    replica_set = ReplicaSet()
    cluster = replica_set.cluster
    written(replica_set, "one")
    broker = cluster.broker(replica_set.coordinator)
    cluster.kill_when(replica_set.coordinator, logs)
    pending = replica_set.write_soon("two")
    cluster.until(lambda: not broker.up, "the coordinator was not killed")
    assert all(d.prepared is not None for d in replica_set.databases.values())
    cluster.restart(replica_set.coordinator)

    assert isinstance(pending.failure(), TransactionAborted)
    assert replica_set.write_soon("three").result().outcome is Outcome.COMMITTED

    replica_set.converge()
    assert not is_stale(replica_set)
    assert {d.position for d in replica_set.databases.values()} == {2}
