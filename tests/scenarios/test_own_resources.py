"""A publisher enlists its own resources in a transaction: they commit with it, or it does not commit."""

import pytest

from tests.scenarios.cluster import Cluster, Participant
from tops.model.constraints import MinParticipants
from tops.model.errors import InvalidTransaction, TransactionAborted
from tops.model.transactions import Access, LocalOutcome, Outcome, ScopeLimit, TxType
from tops.protocol.effects import CommitTxCall, Effect


def cluster_with_own(*, compensatable: bool = False) -> tuple[Cluster, Participant, Participant]:
    cluster = Cluster("P", "S")
    cluster["P"].advertise("plain", "log")
    return cluster, cluster["P"].enlist(compensatable=compensatable), cluster["S"].subscribe("plain")


def test_own_resources_see_every_event_and_commit_with_the_others() -> None:
    cluster, own, s = cluster_with_own()

    tx = cluster["P"].begin("plain", own=own)
    for mark in ("one", "two"):
        cluster["P"].publish("plain", mark, tx=tx)
    outcome = cluster["P"].commit(tx)
    cluster.settle()

    assert outcome.outcome is Outcome.COMMITTED
    assert own.committed(tx) == s.committed(tx) == ("one", "two")
    cluster.check()


def test_own_resources_that_cannot_prepare_abort_the_transaction_whatever_the_constraints_allow() -> None:
    cluster, own, s = cluster_with_own()
    own.rejects_prepare = True

    tx = cluster["P"].begin("plain", own=own, constraints=(MinParticipants(1),))
    cluster["P"].publish("plain", "one", tx=tx)
    with pytest.raises(TransactionAborted):
        cluster["P"].commit(tx)
    cluster.settle()

    assert own.committed(tx) is s.committed(tx) is None
    cluster.check()


def test_an_event_that_own_resources_cannot_take_aborts_the_transaction_at_once() -> None:
    cluster, own, s = cluster_with_own()
    own.rejects.add("one")

    tx = cluster["P"].begin("plain", own=own)
    cluster["P"].publish("plain", "one", tx=tx)
    cluster.settle()

    assert cluster["P"].told(tx) == [False]
    assert own.asked("AbortTxCall", tx) == s.asked("AbortTxCall", tx) == 1
    cluster.check()


def test_own_resources_are_undone_when_the_transaction_aborts_before_its_commit() -> None:
    cluster, own, _ = cluster_with_own()

    tx = cluster["P"].begin("plain", own=own)
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].abort(tx)
    cluster.settle()

    assert own.asked("AbortTxCall", tx) == 1
    assert own.committed(tx) is None
    cluster.check()


def test_own_resources_are_compensated_when_another_participant_cannot_prepare() -> None:
    cluster, own, s = cluster_with_own(compensatable=True)
    s.rejects_prepare = True

    tx = cluster["P"].begin("plain", own=own)
    for mark in ("one", "two"):
        cluster["P"].publish("plain", mark, tx=tx)
    with pytest.raises(TransactionAborted):
        cluster["P"].commit(tx)
    cluster.settle()

    assert own.committed(tx) is None
    cluster.check()


def test_own_resources_that_promised_before_a_crash_of_their_site_commit_after_it() -> None:
    cluster, own, s = cluster_with_own()
    tx = cluster["P"].begin("plain", own=own)
    cluster["P"].publish("plain", "one", tx=tx)

    def commits(effect: Effect) -> bool:
        return isinstance(effect, CommitTxCall) and effect.subscription == own.number

    cluster.kill_when("P", commits)
    cluster["P"].commit_soon(tx)
    cluster.run(1.0)
    assert own.prepared()
    cluster.restart("P")
    cluster.settle()

    assert own.committed(tx) == s.committed(tx) == ("one",)
    cluster.check()


def test_a_publisher_that_subscribes_as_well_takes_part_twice_and_sees_each_event_once_in_each_role() -> None:
    cluster, own, _ = cluster_with_own()
    also = cluster["P"].subscribe("plain")

    tx = cluster["P"].begin("plain", own=own)
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].commit(tx)
    cluster.settle()

    assert own.seen(tx) == also.seen(tx) == ["one"]
    assert own.committed(tx) == also.committed(tx) == ("one",)
    cluster.check()


def test_own_resources_take_part_in_a_transaction_that_goes_to_a_log() -> None:
    cluster, own, _ = cluster_with_own()
    cluster["S"].subscribe("log", standing=True, durable="reader")

    tx = cluster["P"].begin("log", own=own, local_outcome=LocalOutcome.FOLLOWS, limit=ScopeLimit.LOCAL)
    cluster["P"].publish("log", "one", tx=tx)
    outcome = cluster["P"].commit(tx)
    cluster.settle()

    assert outcome.log_number is not None
    assert own.committed(tx) == ("one",)


def test_own_resources_are_refused_where_they_make_no_sense() -> None:
    cluster, own, _ = cluster_with_own()
    p = cluster["P"]

    local = p.begin_soon("plain", TxType.LOCAL, own=own)
    public = p.begin_soon("plain", access=Access.PUBLIC, own=own)
    p.node.act(p.node.core.dismiss, own.number)
    dismissed = p.begin_soon("plain", own=own)

    assert all(isinstance(pending.failure(), InvalidTransaction) for pending in (local, public, dismissed))
