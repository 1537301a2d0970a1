"""Constraints: tested when the census closes, at a drop-out, before prepare and after the votes."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.scenarios.cluster import Cluster, Participant
from tops.model.constraints import (
    AnyConstraint,
    AtLeast,
    Deadline,
    MaxParticipants,
    MinParticipants,
    Named,
    OnlyFrom,
    Required,
    unmet,
)
from tops.model.errors import CensusUnfulfilled, InvalidTransaction, TransactionAborted
from tops.model.transactions import Access, LocalOutcome, Outcome, Scope, ScopeLimit, TxType


def cluster_of(*names: str) -> tuple[Cluster, dict[str, Participant]]:
    cluster = Cluster("P", *names)
    cluster["P"].advertise("plain")
    return cluster, {name: cluster[name].subscribe("plain") for name in names}


# ----------------------------------------------------------------------------------------- the four points of testing


def test_when_the_census_closes_unmet_constraints_end_the_transaction_before_any_event() -> None:
    cluster, at = cluster_of("A", "B")

    begun = cluster["P"].begin_soon("plain", constraints=(Required(frozenset({"A", "C"})),))

    assert isinstance(begun.failure(), CensusUnfulfilled)
    assert "required participants missing: C" in str(begun.failure())
    assert not any(p.asked("NotifyTx") or p.asked("PrepareTx") for p in at.values())
    cluster.check()


@pytest.mark.parametrize(("needed", "goes_on"), [(2, True), (3, False)])
def test_when_a_participant_drops_out_the_constraints_decide_before_commit_is_asked_for(
    needed: int, goes_on: bool
) -> None:
    cluster, at = cluster_of("A", "B", "C")
    tx = cluster["P"].begin("plain", constraints=(MinParticipants(needed),), limit=ScopeLimit.DISTRIBUTED)

    cluster["A"].give_up(at["A"], tx, "the calendar is full")

    if goes_on:
        cluster.run(0.3)
        assert cluster["P"].told(tx) == []
        cluster["P"].commit(tx)
        assert at["B"].committed(tx) == at["C"].committed(tx) == ()
    else:
        cluster.within(0.3, lambda: cluster["P"].told(tx) == [False], "the publisher was not told")
        with pytest.raises(TransactionAborted, match="the calendar is full: 2 of at least 3"):
            cluster["P"].commit(tx)
        assert not any(p.asked("PrepareTx") for p in at.values())
    assert at["A"].committed(tx) is None
    cluster.check()


@pytest.mark.parametrize(("needed", "commits"), [(2, True), (3, False)])
def test_before_prepare_a_replica_that_has_fallen_behind_since_the_census_no_longer_counts(
    needed: int, commits: bool
) -> None:
    """The census of the second transaction counted three; the epoch before it drops one; nothing else tells."""
    cluster = Cluster("P", "A", "B", "C")
    cluster["P"].advertise("set")
    at = {name: cluster[name].replicate("set") for name in "ABC"}
    properties: dict[str, Any] = {"limit": ScopeLimit.LOCAL, "local_outcome": LocalOutcome.FOLLOWS}
    second = cluster["P"].begin("set", constraints=(MinParticipants(needed),), **properties)
    at["C"].holds = {"PrepareBatch"}
    first = cluster["P"].execute_soon("set", ["one"], constraints=(MinParticipants(2),), census=None, **properties)
    cluster.run(0.2)

    ending = cluster["P"].commit_soon(second)
    assert first.result().outcome is Outcome.COMMITTED

    if commits:
        assert ending.result().outcome is Outcome.COMMITTED
    else:
        assert "2 of at least 3" in str(ending.failure())
        assert at["A"].asked("PrepareBatch") == 1  # nobody was asked to prepare the second
    at["C"].release()
    cluster.settle()
    assert [p.committed(second) for p in at.values()] == [() if commits else None] * 3
    cluster.check()


@pytest.mark.parametrize(("needed", "commits"), [(2, True), (3, False)])
def test_after_the_votes_the_constraints_decide_among_those_who_said_yes(needed: int, commits: bool) -> None:
    cluster, at = cluster_of("A", "B", "C")
    at["A"].rejects_prepare = True
    tx = cluster["P"].begin("plain", constraints=(MinParticipants(needed),))

    ending = cluster["P"].commit_soon(tx)
    ending.wait()
    cluster.settle()

    assert all(p.asked("PrepareTx") == 1 for p in at.values())
    if commits:
        assert ending.result().outcome is Outcome.COMMITTED
        assert at["B"].committed(tx) == at["C"].committed(tx) == ()
    else:
        assert "can't prepare" in str(ending.failure())
        assert at["B"].committed(tx) is at["C"].committed(tx) is None
    assert at["A"].committed(tx) is None
    cluster.check()


def test_without_constraints_whoever_joined_must_commit() -> None:
    cluster, at = cluster_of("A", "B", "C")
    at["A"].rejects_prepare = True
    tx = cluster["P"].begin("plain")

    with pytest.raises(TransactionAborted):
        cluster["P"].commit(tx)
    cluster.settle()

    assert [p.committed(tx) for p in at.values()] == [None] * 3
    cluster.check()


def test_only_a_ceiling_on_participants_does_not_excuse_one_who_drops_out() -> None:
    cluster, at = cluster_of("A", "B")
    at["A"].rejects_prepare = True
    tx = cluster["P"].begin("plain", constraints=(MaxParticipants(5),))

    with pytest.raises(TransactionAborted):
        cluster["P"].commit(tx)
    cluster.settle()

    assert at["B"].committed(tx) is None
    cluster.check()


# ---------------------------------------------------------------------------------------------------------- each kind

ABC = frozenset("ABC")


@pytest.mark.parametrize(
    ("constraint", "who", "holds"),
    [
        (MinParticipants(2), "AB", True),
        (MinParticipants(2), "A", False),
        (MinParticipants(0), "", True),
        (MaxParticipants(2), "AB", True),
        (MaxParticipants(1), "AB", False),
        (Required(frozenset("AB")), "ABC", True),
        (Required(frozenset("AB")), "AC", False),
        (OnlyFrom(frozenset("AB")), "A", True),
        (OnlyFrom(frozenset("AB")), "AC", False),
        (AtLeast(2, ABC), "AC", True),
        (AtLeast(2, ABC), "AD", False),
        (Named("odd"), "A", True),
        (Named("odd"), "AB", False),
        (Named("nobody knows it"), "A", False),
        (Deadline(1.0), "", True),
    ],
)
def test_a_constraint_holds_for_exactly_those_participants(constraint: AnyConstraint, who: str, holds: bool) -> None:
    lacking = unmet([constraint], list(who), {"odd": lambda ids, arguments: len(ids) % 2 == 1})

    assert (lacking is None) is holds


def test_at_most_n_join_and_the_others_are_turned_away() -> None:
    cluster, at = cluster_of("A", "B", "C")
    at["C"].holds = {"JoinTx"}

    begun = cluster["P"].begin_soon("plain", constraints=(MaxParticipants(2),))
    cluster.run(0.2)
    at["C"].release()
    tx = begun.result()
    cluster["P"].remember(tx, cluster["P"].node.core.transactions[tx].spec)
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].commit(tx)
    cluster.settle()

    assert at["A"].committed(tx) == at["B"].committed(tx) == ("one",)
    assert at["C"].committed(tx) is None
    assert at["C"].seen(tx) == []
    cluster.check()


def test_only_those_on_the_list_may_join() -> None:
    cluster, at = cluster_of("A", "B", "C")

    tx = cluster["P"].begin("plain", constraints=(OnlyFrom(frozenset("AB")),))
    cluster["P"].publish("plain", "one", tx=tx)
    cluster["P"].commit(tx)
    cluster.settle()

    assert {n for n, p in at.items() if p.committed(tx) == ("one",)} == {"A", "B"}
    assert at["C"].seen(tx) == []
    cluster.check()


@pytest.mark.parametrize(
    ("constraints", "fails", "commits"),
    [
        ((Required(frozenset("A")),), "A", False),
        ((Required(frozenset("A")),), "B", True),
        ((AtLeast(1, frozenset("AB")),), "A", True),
        ((AtLeast(2, frozenset("AB")),), "A", False),
        ((AtLeast(2, frozenset("AB")),), "C", True),
    ],
)
def test_who_fails_matters_where_constraints_name_participants(
    constraints: Sequence[AnyConstraint], fails: str, commits: bool
) -> None:
    cluster, at = cluster_of("A", "B", "C")
    at[fails].rejects_prepare = True
    tx = cluster["P"].begin("plain", constraints=tuple(constraints))

    ending = cluster["P"].commit_soon(tx)
    ending.wait()
    cluster.settle()

    assert (ending.error is None) is commits
    assert [p.committed(tx) is not None for p in at.values()] == [commits and n != fails for n in at]
    cluster.check()


def test_a_predicate_registered_by_name_at_the_coordinator_decides_with_its_arguments() -> None:
    cluster, at = cluster_of("A", "B")
    cluster.world.predicates["includes"] = lambda ids, arguments: set(arguments) <= set(ids)

    tx = cluster["P"].begin("plain", constraints=(Named("includes", ("A",)),))
    rejected = cluster["P"].begin_soon("plain", constraints=(Named("includes", ("Z",)),))
    unknown = cluster["P"].begin_soon("plain", constraints=(Named("unregistered"),))

    assert "'includes' does not hold" in str(rejected.failure())
    assert "no predicate 'unregistered' is registered" in str(unknown.failure())
    cluster["P"].commit(tx)
    assert at["A"].committed(tx) == at["B"].committed(tx) == ()
    cluster.check()


def test_a_predicate_is_tested_again_when_somebody_fails() -> None:
    cluster, at = cluster_of("A", "B", "C")
    cluster.world.predicates["odd"] = lambda ids, arguments: len(ids) % 2 == 1
    at["A"].rejects_prepare = True
    tx = cluster["P"].begin("plain", constraints=(Named("odd"),))

    with pytest.raises(TransactionAborted):
        cluster["P"].commit(tx)
    cluster.settle()

    assert [p.committed(tx) for p in at.values()] == [None] * 3
    cluster.check()


@pytest.mark.parametrize("stage", ["active", "voting"])
def test_a_deadline_that_passes_aborts_the_transaction_wherever_it_is(stage: str) -> None:
    cluster, at = cluster_of("A", "B")
    tx = cluster["P"].begin("plain", constraints=(MinParticipants(1), Deadline(2.0)), limit=ScopeLimit.DISTRIBUTED)
    cluster["P"].publish("plain", "one", tx=tx)
    at["A"].holds = {"PrepareTx"}
    ending = cluster["P"].commit_soon(tx) if stage == "voting" else None

    cluster.within(2.5, lambda: cluster["P"].told(tx) == [False], "the publisher was not told")

    if ending is not None:
        assert "not decided in time" in str(ending.failure())
    at["A"].release()
    cluster.settle()
    assert at["A"].committed(tx) is at["B"].committed(tx) is None
    cluster.check()


def test_a_decision_before_the_deadline_stands() -> None:
    cluster, at = cluster_of("A")
    tx = cluster["P"].begin("plain", constraints=(MinParticipants(1), Deadline(2.0)))

    cluster["P"].commit(tx)
    cluster.run(5.0)

    assert at["A"].committed(tx) == ()
    assert cluster["P"].told(tx) == [True]
    cluster.check()


def test_constraints_count_distributed_participants_only() -> None:
    cluster, at = cluster_of("A", "B")
    at["A"].scope = Scope.LOCAL

    begun = cluster["P"].begin_soon("plain", constraints=(MinParticipants(2),))

    assert "1 of at least 2" in str(begun.failure())
    cluster.check()


# --------------------------------------------------------------------------------------------------- refused at begin


@pytest.mark.parametrize(
    "constraints",
    [
        (MinParticipants(3), MaxParticipants(2)),
        (MinParticipants(-1),),
        (MaxParticipants(-1),),
        (AtLeast(3, frozenset("AB")),),
        (AtLeast(-1, frozenset("AB")),),
        (Required(frozenset("AB")), MaxParticipants(1)),
        (Required(frozenset("AB")), OnlyFrom(frozenset("B"))),
        (AtLeast(2, ABC), OnlyFrom(frozenset("AD"))),
        (MinParticipants(3), OnlyFrom(frozenset("AB"))),
        (MinParticipants(1), OnlyFrom(frozenset("AB")), OnlyFrom(frozenset("CD"))),
        (Deadline(0.0),),
        (Deadline(-1.0),),
        (Deadline(float("nan")),),
    ],
    ids=repr,
)
@pytest.mark.parametrize("access", Access)
def test_contradictory_constraints_are_refused_at_begin_and_nothing_is_started(
    constraints: tuple[AnyConstraint, ...], access: Access
) -> None:
    cluster, at = cluster_of("A")

    begun = cluster["P"].begin_soon("plain", constraints=constraints, access=access)

    assert isinstance(begun.failure(), InvalidTransaction)
    cluster.run(1.0)
    assert at["A"].calls == []
    assert cluster["P"].node.core.transactions == {}


def test_a_local_transaction_takes_no_constraint_on_participants_but_a_deadline() -> None:
    cluster, at = cluster_of("A")
    at["A"].scope = Scope.LOCAL

    rejected = cluster["P"].begin_soon("plain", TxType.LOCAL, constraints=(MinParticipants(1),))
    tx = cluster["P"].begin("plain", TxType.LOCAL, constraints=(Deadline(1.0),))
    cluster.run(1.5)

    assert isinstance(rejected.failure(), InvalidTransaction)
    with pytest.raises(TransactionAborted, match="not decided in time"):
        cluster["P"].commit(tx)
    cluster.check()
