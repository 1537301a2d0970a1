"""Serializable means serializable: histories under contention have no cycles, and would have without the read locks."""

import time
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from tests.integration.replication import serializable_runs
from tests.integration.replication.clusters import running
from tests.integration.replication.history import anomalies
from tests.integration.replication.inprocess import small_cluster
from tests.integration.replication.list_append import Run
from tests.integration.replication.serializable_runs import FAULTS, Result

SERIALIZABLE = 'policy = "serializable"'


async def test_a_history_under_contention_is_serializable(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, SERIALIZABLE, brokers=2) as cluster:
        run = Run(1)
        await run.start(cluster, 500)
        problems = await run.settle(cluster)

        assert run.aborted >= len(run.history) * 0.05, "there was no contention to speak of"
        assert run.committed >= 100
        assert problems + anomalies(run.history) == []


async def test_a_history_is_serializable_while_a_replica_is_away(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, SERIALIZABLE, brokers=2) as cluster:
        run = Run(2)
        writing = run.start(cluster, 300)
        await run.reached(50, writing)
        await cluster.stop("r2")
        await run.reached(100, writing)
        await cluster.start("r2")
        await writing
        problems = await run.settle(cluster)

        assert run.aborted >= len(run.history) * 0.05
        assert problems + anomalies(run.history) == []


async def test_without_the_read_locks_the_checker_finds_cycles(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, SERIALIZABLE) as cluster:
        run = Run(7, locks=False)
        await run.start(cluster, 200)

        assert anomalies(run.history) != []


async def test_peer_to_peer_is_not_serializable(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "peer-to-peer"') as cluster:
        run = Run(9)
        await run.start(cluster, 200)

        assert anomalies(run.history) != []


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
async def test_ten_histories_of_real_processes_are_serializable(fault: str, folder: Path) -> None:
    seeds = range(100 + 10 * list(FAULTS).index(fault), 110 + 10 * list(FAULTS).index(fault))
    results: list[Result] = []
    async with running(folder, {"shop": SERIALIZABLE}) as cluster:
        for seed in seeds:
            began, run = time.monotonic(), Run(seed)
            faults = await serializable_runs.write_with_faults(cluster, run, fault)
            problems = await run.settle(cluster) + anomalies(run.history)
            results.append(Result.of(run, fault, faults, problems, time.monotonic() - began))
            serializable_runs.record(results[-1])

    assert [result for result in results if result.problems] == []
    assert [result for result in results if result.transactions < 2_000 or result.abort_share < 0.05] == []
