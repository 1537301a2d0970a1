"""Epochs, votes and the log of a replica set: what keeps every replica a prefix of one history."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.scenarios.cluster import Cluster, Participant, Pending, content_of
from tops.core.commit.epochs import EpochCoordinator
from tops.model.constraints import AtLeast, MinParticipants
from tops.model.errors import InvalidEventType, TransactionAborted
from tops.model.transactions import LocalOutcome, Outcome, Scope, ScopeLimit
from tops.protocol.effects import BatchPrepared, Effect, Persist, SendOnLink
from tops.protocol.messages import Dissemination, EpochDecided, EpochVoted, LogEntry, Sender
from tops.protocol.records import LogAppended
from tops.sim.databases import CallbackDatabase, ReplicaDatabase

REPLICAS = frozenset("ABC")


class ReplicaSet:
    """Three replicas of one set, and a publisher."""

    def __init__(self) -> None:
        self.cluster = Cluster("P", "A", "B", "C")
        self.cluster["P"].advertise("set", "log")
        self.at = {name: self.cluster[name].replicate("set") for name in "ABC"}
        self.databases = {name: _database(p) for name, p in self.at.items()}
        self.coordinator = self.cluster.rendezvous("set")

    def write_soon(self, *marks: str, enough: int = 2, **body: Any) -> Pending:
        return self.cluster["P"].execute_soon("set", marks, **_properties(enough), with_body=body)

    def write(self, *marks: str, enough: int = 2, **body: Any) -> Any:
        return self.cluster["P"].execute("set", marks, **_properties(enough), with_body=body)

    @property
    def epochs(self) -> EpochCoordinator:
        return self.cluster.broker(self.coordinator).core.rendezvous.epochs["set"]

    def records(self) -> list[LogAppended]:
        """What the coordinator's disk holds."""
        records = self.cluster.broker(self.coordinator).disk.records
        return [r for r in records if isinstance(r, LogAppended) and r.event_type == "set"]

    def log(self) -> list[LogEntry]:
        return [r.entry for r in self.records()]

    def in_sync_after(self, number: int) -> set[str]:
        """Who was in sync with this number, as its own record says."""
        return set(next(r.in_sync or () for r in self.records() if r.entry.number == number))

    def converge(self) -> None:
        """Everyone holds the same, and every promise was kept."""
        self.cluster.check()
        rows = [d.rows for d in self.databases.values()]
        assert rows[0] == rows[1] == rows[2]


def _database(participant: Participant) -> ReplicaDatabase:
    assert isinstance(participant.database, ReplicaDatabase)
    return participant.database


def _properties(enough: int) -> dict[str, Any]:
    return {
        "constraints": (AtLeast(enough, REPLICAS),),
        "limit": ScopeLimit.LOCAL,
        "local_outcome": LocalOutcome.FOLLOWS,
        "census": None,
    }


def decides(effect: Effect) -> bool:
    return isinstance(effect, SendOnLink) and isinstance(content_of(effect.message), EpochDecided)


def logs(effect: Effect) -> bool:
    return isinstance(effect, Persist) and isinstance(effect.record, LogAppended)


# ---------------------------------------------------------------------------------------------------- log and numbers


def test_an_aborted_number_is_void_in_the_log_and_the_replicas_count_past_it() -> None:
    """Without the void entry the log would end at the gap and no replica would ever be in sync again."""
    replicas = ReplicaSet()

    with pytest.raises(TransactionAborted, match="violates a constraint"):
        replicas.write("bad one", bad=True)
    outcome = replicas.write("good one")
    replicas.cluster.settle()

    assert outcome.log_number == 2
    assert [(e.number, len(e.transactions)) for e in replicas.log()] == [(1, 0), (2, 1)]
    assert {d.position for d in replicas.databases.values()} == {2}
    replicas.converge()


@pytest.mark.parametrize(("moment", "commits"), [(logs, False), (decides, True)], ids=["before", "after"])
def test_decision_and_log_entry_are_one_record_so_a_crash_leaves_both_or_none(
    moment: Callable[[Effect], bool], commits: bool
) -> None:
    """As two records, a crash between them would leave a commit that no replica could be sent, or the reverse."""
    replicas = ReplicaSet()
    replicas.cluster.kill_when(replicas.coordinator, moment)

    pending = replicas.write_soon("one")
    tx = replicas.cluster["P"].last_tx()
    replicas.cluster.run(0.5)
    replicas.cluster.restart(replicas.coordinator)

    if commits:
        assert pending.result().outcome is Outcome.COMMITTED
    else:
        assert isinstance(pending.failure(), TransactionAborted)
    replicas.cluster.settle()
    assert [p.committed(tx) for p in replicas.at.values()] == [("one",) if commits else None] * 3
    entries = [e for e in replicas.log() if e.transactions]
    assert [(e.epoch is not None, len(e.committing)) for e in entries] == ([(True, 3)] if commits else [])
    replicas.converge()


def test_a_replica_that_was_away_is_a_prefix_of_the_log_and_catches_up() -> None:
    replicas = ReplicaSet()
    replicas.write("one")
    replicas.cluster.kill("C")
    replicas.cluster.run(1.0)
    for mark in ("two", "three", "four"):
        replicas.write(mark)

    before = dict(replicas.databases["C"].hashes)
    replicas.cluster.restart("C")
    replicas.cluster.settle()

    assert max(before) == 1
    assert replicas.databases["C"].position == 4
    assert replicas.databases["C"].hashes == replicas.databases["A"].hashes
    assert before.items() <= replicas.databases["C"].hashes.items()
    replicas.converge()


def most_in_flight(replicas: ReplicaSet) -> int:
    """How many epochs are out at once while a replica is slow."""
    replicas.at["C"].holds = {"PrepareBatch"}
    writes = [replicas.write_soon(mark) for mark in ("one", "two", "three")]
    most = 0
    for _ in range(8):
        replicas.cluster.run(0.1)
        most = max(most, len(replicas.epochs.in_flight))
    replicas.at["C"].release()
    replicas.cluster.until(lambda: all(w.done for w in writes), "a write was not answered")
    return most


def test_one_epoch_of_a_replica_set_is_in_flight_and_what_waits_shares_the_next() -> None:
    replicas = ReplicaSet()

    assert most_in_flight(replicas) == 1
    assert [len(e.transactions) for e in replicas.log()] == [1, 2]
    replicas.converge()


def test_without_the_limit_of_one_a_second_epoch_would_be_prepared_on_an_undecided_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EpochCoordinator, "_may_form", lambda self: True)

    assert most_in_flight(ReplicaSet()) > 1


def with_other_rows(replicas: ReplicaSet, name: str) -> None:
    """This replica changes another number of rows than the others: it has diverged."""
    database = replicas.databases[name]
    honest = database.prepare

    def prepare(*arguments: Any) -> BatchPrepared:
        done = honest(*arguments)
        return BatchPrepared(done.excluded, tuple((7,) for _ in done.rows))

    database.prepare = prepare  # type: ignore[method-assign,assignment]


def test_a_replica_that_changes_other_rows_is_left_out_and_an_alarm_is_raised() -> None:
    replicas = ReplicaSet()
    with_other_rows(replicas, "C")

    outcome = replicas.write("one")

    assert outcome.rows == (1,)
    assert [kind for _, kind, _ in replicas.cluster.world.alarms] == ["rows-differ"]
    assert replicas.in_sync_after(1) == {"A", "B"}
    assert len(replicas.log()[0].committing) == 2
    replicas.converge()


def test_without_comparing_rows_the_divergent_replica_would_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EpochCoordinator.on_voted

    def blind(self: EpochCoordinator, voted: EpochVoted, sender: Sender) -> list[Effect]:
        return honest(self, msgspec.structs.replace(voted, rows=()), sender)

    monkeypatch.setattr(EpochCoordinator, "on_voted", blind)
    replicas = ReplicaSet()
    with_other_rows(replicas, "C")

    replicas.write("one")

    assert len(replicas.log()[0].committing) == 3


# -------------------------------------------------------------------------------------- exclusions, dropping, joining


def behind_a_slow_epoch(replicas: ReplicaSet, *writes: Callable[[], Pending]) -> list[Pending]:
    """These writes wait behind one epoch and go out together."""
    replicas.at["C"].holds = {"PrepareBatch"}
    first = replicas.write_soon("first")
    replicas.cluster.run(0.2)
    pending = [write() for write in writes]
    replicas.cluster.run(0.2)
    replicas.at["C"].release()
    first.result()
    return pending


def test_members_that_every_voter_excludes_are_left_out_and_the_others_commit_at_once() -> None:
    replicas = ReplicaSet()

    good, bad, better = behind_a_slow_epoch(
        replicas,
        lambda: replicas.write_soon("good"),
        lambda: replicas.write_soon("bad", bad=True),
        lambda: replicas.write_soon("better"),
    )

    assert good.result().log_number == better.result().log_number == 2
    assert "violates a constraint" in str(bad.failure())
    entry = replicas.log()[1]
    assert entry.epoch is not None
    assert (entry.epoch.attempt, len(entry.transactions), len(entry.committing)) == (1, 2, 3)
    replicas.converge()


def test_a_replica_that_alone_refuses_is_dropped_where_the_constraints_can_do_without_it() -> None:
    """Excluding the member instead would let one sick disk stop every write of the set."""
    replicas = ReplicaSet()
    replicas.databases["C"].failing_keys = {"a"}

    outcome = replicas.write("one", enough=2)

    assert outcome.outcome is Outcome.COMMITTED
    assert len(replicas.log()[0].committing) == 2
    assert replicas.in_sync_after(1) == {"A", "B"}
    replicas.converge()


def test_a_replica_that_cannot_be_spared_excludes_the_member_and_the_rest_is_tried_again() -> None:
    replicas = ReplicaSet()
    replicas.databases["C"].failing_keys = {"b"}

    stuck, fine = behind_a_slow_epoch(
        replicas,
        lambda: replicas.write_soon("stuck", enough=3, key="b"),
        lambda: replicas.write_soon("fine", enough=3),
    )

    assert "disk fails" in str(stuck.failure())
    assert fine.result().log_number == 2
    entry = replicas.log()[1]
    assert entry.epoch is not None
    assert (entry.epoch.attempt, len(entry.committing)) == (2, 3)
    replicas.converge()


def test_a_replica_that_does_not_vote_in_time_is_dropped_rolls_back_and_follows_the_log() -> None:
    replicas = ReplicaSet()
    slow = replicas.at["C"]
    slow.holds = {"PrepareBatch"}

    outcome = replicas.write("one")
    tx = replicas.cluster["P"].last_tx()
    assert outcome.outcome is Outcome.COMMITTED
    assert slow.committed(tx) is None
    slow.release()
    replicas.cluster.settle()

    called = [kind for kind, _ in slow.calls]
    assert called.index("PrepareBatch") < called.index("FinishBatch") < called.index("ApplyEntries")
    assert slow.committed(tx) == ("one",)
    assert not slow.prepared()
    replicas.converge()


def test_the_in_sync_set_shrinks_in_the_record_of_the_first_commit_without_a_replica() -> None:
    """Journaled later, a crash in between would let a replica vote that lacks a committed write."""
    replicas = ReplicaSet()
    replicas.write("one")
    replicas.cluster.kill("C")
    replicas.cluster.run(1.0)
    replicas.write("two")

    assert replicas.in_sync_after(2) == {"A", "B"}
    replicas.cluster.kill(replicas.coordinator)
    replicas.cluster.restart(replicas.coordinator)
    assert replicas.epochs.standing.in_sync == {"A", "B"}
    replicas.cluster.restart("C")
    replicas.converge()


def test_a_replica_is_in_sync_again_only_when_its_position_meets_the_log() -> None:
    replicas = ReplicaSet()
    replicas.cluster.kill("C")
    replicas.cluster.run(1.0)
    replicas.write("one")
    replicas.at["C"].holds = {"ApplyEntries"}
    replicas.cluster.restart("C")
    replicas.cluster.run(2.0)

    rejected = replicas.write_soon("needs all", enough=3)

    assert "2 of at least 3" in str(rejected.failure())
    replicas.at["C"].release()
    replicas.cluster.settle()
    replicas.cluster.run(2.0)
    assert replicas.write("all again", enough=3).outcome is Outcome.COMMITTED
    replicas.converge()


def test_committed_is_answered_with_the_names_of_those_who_have_not_finished() -> None:
    replicas = ReplicaSet()
    replicas.at["C"].holds = {"FinishBatch"}

    outcome = replicas.write("one")

    assert outcome.outcome is Outcome.COMMITTED
    assert outcome.pending == ("C",)
    assert replicas.epochs.standing.in_sync == {"A", "B"}
    replicas.at["C"].release()
    replicas.cluster.settle()
    replicas.converge()


def test_committed_is_answered_without_names_when_all_have_finished() -> None:
    replicas = ReplicaSet()

    outcome = replicas.write("one")

    assert outcome.pending == ()
    tx = replicas.cluster["P"].last_tx()
    assert [p.committed(tx) for p in replicas.at.values()] == [("one",)] * 3
    replicas.converge()


# -------------------------------------------------------------------------------------------------- following the log


def test_a_local_subscriber_of_a_replica_set_gets_what_was_decided_and_nothing_else() -> None:
    replicas = ReplicaSet()
    reader = replicas.cluster.join("reader", "b1")
    follower = reader.subscribe("set", Scope.LOCAL, durable="follower", start="oldest")
    replicas.at["C"].holds = {"PrepareBatch"}

    with pytest.raises(TransactionAborted):
        replicas.write("never", bad=True, enough=2)
    aborted = replicas.cluster["P"].last_tx()
    pending = replicas.write_soon("one")
    tx = replicas.cluster["P"].last_tx()
    replicas.cluster.run(0.3)
    assert follower.seen(tx) == []  # not before the decision
    replicas.at["C"].release()
    pending.result()
    replicas.cluster.settle()

    assert follower.committed(tx) == ("one",)
    assert follower.seen(aborted) == []
    replicas.converge()


def test_on_a_durable_type_local_subscribers_cannot_go_before_the_log() -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("log")

    begun = cluster["P"].begin_soon("log", limit=ScopeLimit.NONE, local_outcome=LocalOutcome.INDEPENDENT)

    assert "follows" in str(begun.failure())


def test_only_replicas_on_the_list_take_part_in_a_write() -> None:
    replicas = ReplicaSet()
    stranger = replicas.cluster.join("stranger", "b2")
    participant = stranger.subscribe("set", Scope.LOCAL)

    replicas.write("one")

    assert participant.asked("PrepareTx") == 0
    assert len(replicas.log()[0].committing) == 3
    replicas.converge()


def test_what_a_durable_subscription_gets_comes_from_the_log_and_never_early() -> None:
    cluster = Cluster("P", "D", "S")
    cluster["P"].advertise("log", "plain")
    durable = cluster["D"].subscribe("log", durable="reader")
    ordinary = cluster["S"].subscribe("log")
    early: dict[str, bool] = {}

    def look(owner: object, peer: object, message: object) -> bool:
        if isinstance(message, Dissemination) and message.upward and hasattr(message.publication, "event"):
            early[message.publication.event.type] = message.early
        return False

    cluster.lose(look)
    number = cluster["P"].publish("log", "one")
    cluster["P"].publish("plain", "two")
    cluster.settle()

    assert early == {"log": False, "plain": True}
    assert isinstance(durable.database, CallbackDatabase)
    assert (number, durable.database.taken) == (1, [1])
    assert durable.seen() == ordinary.seen() == ["one"]
    assert durable.asked("TakeEvent") == 1
    cluster.check()


@pytest.mark.parametrize(("start", "expected"), [("now", [4]), ("oldest", [1, 2, 3, 4]), ("3", [3, 4])])
def test_a_new_durable_subscription_starts_now_at_the_oldest_or_at_a_number(start: str, expected: list[int]) -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("log")
    for mark in ("one", "two", "three"):
        cluster["P"].publish("log", mark)
    reader = cluster["S"].subscribe("log", durable="reader", start=start)
    cluster.settle()

    cluster["P"].publish("log", "four")
    cluster.run(1.0)

    assert isinstance(reader.database, CallbackDatabase)
    assert reader.database.taken == expected


def test_a_durable_subscription_survives_its_site_and_the_broker_and_misses_nothing() -> None:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("log")
    reader = cluster["S"].subscribe("log", durable="reader")
    cluster["P"].publish("log", "one")
    cluster.settle()

    cluster.kill("S")
    cluster["P"].publish("log", "two")
    cluster.kill(cluster.rendezvous("log"))
    cluster.restart(cluster.rendezvous("log"))
    cluster.run(3.0)
    cluster["P"].publish("log", "three")
    cluster.restart("S")
    cluster.run(3.0)

    assert isinstance(reader.database, CallbackDatabase)
    assert reader.database.taken == [1, 2, 3]
    cluster.check()


def test_durable_subscriptions_exist_on_durable_types_only() -> None:
    cluster = Cluster("S")

    with pytest.raises(InvalidEventType, match="needs a durable event type"):
        cluster["S"].subscribe("plain", durable="reader")
    with pytest.raises(InvalidEventType, match="durable name"):
        cluster["S"]._subscribe(
            msgspec.structs.replace(cluster["S"].subscribe("set").app.subscriptions[1].wish, replica=0),
            ReplicaDatabase(),
            Scope.DISTRIBUTED,
        )


def test_a_transaction_without_constraints_on_a_set_needs_every_replica_in_sync() -> None:
    replicas = ReplicaSet()
    replicas.databases["C"].failing_keys = {"a"}

    properties = {**_properties(1), "constraints": ()}
    rejected = replicas.cluster["P"].execute_soon("set", ["one"], **properties)

    assert "disk fails" in str(rejected.failure())
    properties["constraints"] = (MinParticipants(1),)
    assert replicas.cluster["P"].execute("set", ["two"], **properties).outcome is Outcome.COMMITTED
    replicas.converge()
