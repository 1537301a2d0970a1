"""Journals and databases of an earlier time, at random: nobody who counts as in sync is deceived."""

from collections.abc import Callable

import pytest

from tests.scenarios.test_replica_set import ReplicaSet
from tops.sim.faults import Faults
from tops.sim.runner import run_seed
from tops.sim.travel_checkers import (
    TRAVEL,
    check_acknowledged_is_not_lost_silently,
    check_differing_replicas_are_named,
    check_in_sync_replicas_are_equal,
    check_machines_survive_time_travel,
)

FAULTS = {"journals": Faults.restored_journals(), "databases": Faults.restored_databases()}


@pytest.mark.parametrize("what", FAULTS)
def test_nothing_is_lost_silently_whatever_is_restored(what: str) -> None:
    bad, restored = {}, 0

    for seed in range(60):
        result, world = run_seed(seed, FAULTS[what])
        restored += world.nemesis.restores
        if result.violations:
            bad[seed] = result.violations[:3]

    assert bad == {}
    assert restored > 50


@pytest.mark.long
@pytest.mark.parametrize("what", FAULTS)
def test_nothing_is_lost_silently_in_many_runs(what: str) -> None:
    bad = {seed: found for seed in range(1_000, 6_000) if (found := run_seed(seed, FAULTS[what])[0].violations)}

    assert bad == {}


def differ(replica_set: ReplicaSet) -> None:
    replica_set.databases["B"].hashes[1] = "something else"


def lose(replica_set: ReplicaSet) -> None:
    database = replica_set.databases["B"]
    del database.applied[next(iter(database.applied))]


def break_a_machine(replica_set: ReplicaSet) -> None:
    replica_set.cluster.world.history.machine_faults.append("B: the machine raised ValueError")


PLANTED: dict[Callable[..., list[str]], Callable[[ReplicaSet], None]] = {
    check_in_sync_replicas_are_equal: differ,
    check_differing_replicas_are_named: differ,
    check_acknowledged_is_not_lost_silently: lose,
    check_machines_survive_time_travel: break_a_machine,
}


def written() -> ReplicaSet:
    replica_set = ReplicaSet()
    replica_set.write("one")
    replica_set.write("two")
    replica_set.cluster.run(2.0)
    return replica_set


@pytest.mark.parametrize("checker", TRAVEL)
def test_a_checker_finds_what_is_planted_and_nothing_else(checker: Callable[..., list[str]]) -> None:
    replica_set = written()

    before = checker(replica_set.cluster.world)
    PLANTED[checker](replica_set)

    assert before == []
    assert checker(replica_set.cluster.world) != []
