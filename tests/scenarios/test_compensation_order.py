"""What a compensatable participant commits early can be undone: nothing later is committed on top of it."""

import pytest

from tests.scenarios.cluster import Cluster, Participant
from tops.model.errors import TransactionAborted
from tops.model.ids import TxId
from tops.model.transactions import Outcome


def cluster_with_early() -> tuple[Cluster, Participant, Participant]:
    """A compensatable participant, and another one that takes its time with the first transaction."""
    cluster = Cluster("P", "Q", "early", "slow")
    for name in ("P", "Q"):
        cluster[name].advertise("plain", "other")
    return cluster, cluster["early"].subscribe("plain", compensatable=True), cluster["slow"].subscribe("plain")


def begin(cluster: Cluster, publisher: str, mark: str) -> TxId:
    tx = cluster[publisher].begin("plain", vote_timeout_s=30.0)
    cluster[publisher].publish("plain", mark, tx=tx)
    return tx


def test_a_compensatable_participant_prepares_nothing_before_what_it_committed_early_is_decided() -> None:
    cluster, early, slow = cluster_with_early()
    slow.holds.add("PrepareTx")
    first, second = begin(cluster, "P", "one"), begin(cluster, "Q", "two")
    ending = cluster["P"].commit_soon(first)
    cluster.run(1.0)
    following = cluster["Q"].commit_soon(second)
    cluster.run(1.0)

    before = (early.asked("PrepareTx", first), early.asked("PrepareTx", second))
    slow.release()
    assert ending.result().outcome is following.result().outcome is Outcome.COMMITTED
    cluster.settle()

    assert before == (1, 0)
    assert (early.committed(first), early.committed(second)) == (("one",), ("two",))


def test_what_is_compensated_lies_under_nothing_that_stays() -> None:
    cluster, early, slow = cluster_with_early()
    slow.holds.add("PrepareTx")
    slow.rejects_prepare = True
    first, second = begin(cluster, "P", "one"), begin(cluster, "Q", "two")
    ending = cluster["P"].commit_soon(first)
    cluster.run(1.0)
    following = cluster["Q"].commit_soon(second)
    cluster.run(1.0)
    slow.holds.clear()

    cluster["slow"].give_up(slow, second)  # it is the first one alone that this participant refuses
    slow.release()

    assert isinstance(ending.failure(), TransactionAborted)
    assert isinstance(following.failure(), TransactionAborted)
    cluster.settle()
    assert early.compensated(first) == ("one",)
    assert early.committed(first) is early.committed(second) is None


def test_one_shots_that_were_committed_early_together_are_compensated_latest_first() -> None:
    cluster = Cluster("P", "early", "slow")
    cluster["P"].advertise("other")
    early = cluster["early"].subscribe("other", standing=True, compensatable=True)
    slow = cluster["slow"].subscribe("other", standing=True)
    slow.holds.add("PrepareTx")
    slow.rejects_prepare = True
    pending = [cluster["P"].execute_soon("other", [mark], census=None) for mark in ("zero", "one", "two")]
    cluster.run(1.0)

    slow.release()
    for each in pending:
        with pytest.raises(TransactionAborted):
            each.result()
    cluster.settle()

    alone, *together = [str(tx) for kind, tx in early.calls if kind == "AbortTxCall"]
    assert alone.endswith(".1")
    assert together == sorted(together, reverse=True)  # an epoch's order is that of its members' ids here
    assert len(together) == 2


def test_an_epoch_that_finds_a_later_one_at_work_is_declined_so_that_nobody_waits_in_a_circle() -> None:
    cluster = Cluster("P", "slow")
    cluster["P"].advertise("plain", "other")
    own = cluster["P"].enlist(compensatable=True)
    slow = cluster["slow"].subscribe("plain")
    cluster["slow"].subscribe("other")
    slow.holds.add("PrepareTx")
    first = cluster["P"].begin("plain", own=own, vote_timeout_s=30.0)
    second = cluster["P"].begin("other", own=own, vote_timeout_s=30.0)  # comes before "plain" in everybody's order
    ending = cluster["P"].commit_soon(first)
    cluster.run(1.0)

    declined = cluster["P"].commit_soon(second).failure()
    slow.release()

    assert "another epoch" in str(declined)
    assert ending.result().outcome is Outcome.COMMITTED
    assert own.asked("PrepareTx", second) == 0
    cluster.check()
