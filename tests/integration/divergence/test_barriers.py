"""Barriers and repairs of running sets, without Spark: what the snapshots hold, and what a repair leaves."""

from pathlib import Path
from typing import Any

import pytest

from adapters import EmbeddedPostgres
from replication.divergence.explain.leads import SetKnowledge
from replication.divergence.explain.set_barrier import SetBarrier
from replication.divergence.read.sets import load_set
from replication.divergence.repair.repair import Planner, Strategy
from replication.divergence.repair.set_repair import SetRepair
from replication.divergence.results.model import Basis, Difference, Kind
from replication.tables.catalog import describe, postgres_at
from replication.tables.endpoints import Key, SnapshotHandle
from replication.tables.schema import CommonTable, common_table
from tests.integration.divergence.sets import CheckedSet, Writers, checked_set, writing
from tests.support.polling import eventually

POLICIES = {
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "write-all": 'policy = "write-all"',
    "combined": 'policy = "combined"\nsync = ["r1", "r2"]',
    "peer-to-peer": 'policy = "peer-to-peer"',
    "ordered": 'policy = "peer-to-peer"\norder = "ordered"',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "serializable": 'policy = "serializable"',
}
BARRIERS = 3
TIMEOUT_S = 240.0  # on a machine that is busy with other things


async def rows_at(handle: SnapshotHandle) -> dict[Key, tuple[Any, ...]]:
    async with postgres_at(handle) as connection:
        return {(str(row["id"]),): tuple(row) for row in await connection.fetch("SELECT * FROM t")}


async def table_of(checked: CheckedSet) -> CommonTable:
    endpoints = load_set(str(checked.small.cluster.path), "shop").endpoints
    return common_table("t", {endpoint.name: await describe(endpoint, "t") for endpoint in endpoints}, False)


def found_at(replica: str, key: int) -> Difference:
    """A difference as a check reports it; a repair looks for itself what it is."""
    return Difference("t", (str(key),), 0, replica, Kind.CHANGED, (), None, None, (), Basis.MAJORITY, 2, True)


@pytest.mark.parametrize(
    "policy",
    [
        *("quorum", "peer-to-peer", "primary-site", "serializable"),
        *(pytest.param(policy, marks=pytest.mark.long) for policy in ("write-all", "combined", "ordered")),
    ],
)
async def test_snapshots_at_a_barrier_hold_the_same_rows_and_repairs_are_ordered_with_writes(
    cluster_server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with checked_set(cluster_server, folder, None, POLICIES[policy], rows=300) as checked:
        endpoints = load_set(str(checked.small.cluster.path), "shop").endpoints
        table, knowledge = await table_of(checked), SetKnowledge(checked.link)
        positions, unexplained = [], []
        async with writing(checked, (101, 300), rate=50, writers=2) as writers:
            for _ in range(BARRIERS):
                barrier = SetBarrier(checked.link, TIMEOUT_S)
                try:
                    handles = await barrier.open(endpoints)
                    rows = {name: await rows_at(handle) for name, handle in handles.items()}
                    leads = await knowledge.leads(table, handles)
                finally:
                    await barrier.release()
                positions.append({handle.position for handle in handles.values()})
                led = {key for lead in leads.values() for key in lead.rows}
                keys = set().union(*rows.values())
                unexplained += [k for k in keys if len({r.get(k) for r in rows.values()}) > 1 and k not in led]
            await checked.on("r2", "UPDATE t SET v = -5 WHERE id = 10", "DELETE FROM t WHERE id = 11")
            await checked.on("r3", "INSERT INTO t (id, v) VALUES (-7, 1)", "UPDATE t SET label = NULL WHERE id = 12")
            planner = Planner(["r1", "r2", "r3"], Strategy.MAJORITY)
            planted = [found_at("r2", 10), found_at("r2", 11), found_at("r3", 12), found_at("r3", -7)]
            done = await SetRepair(checked.link, endpoints, planner, TIMEOUT_S).run(planted)
        async with checked.small.connect() as shop:
            await shop.wait_in_sync()
        left = {r: [tuple(x) for x in await checked.small.sql(r, "select * from t order by id")] for r in rows}
        log = [key async for key in checked.logged_keys()]

    assert all(one.written > 0 for one in writers)
    assert [reason for one in writers for reason in one.rejected] == []
    assert [len(each) for each in positions] == [1] * BARRIERS
    assert sorted(each.pop() or 0 for each in positions)[0] > 0
    assert unexplained == []
    assert (done.written, done.moved) == (4, 0)
    assert left["r1"] == left["r2"] == left["r3"]
    assert {row[0]: row[1:3] for row in left["r1"] if row[0] < 13} == {key: (0, f"label {key}") for key in range(1, 13)}
    assert {key.split("|")[1] for key in log if key.startswith("tops-repair")} == {"shop/r2", "shop/r3"}


@pytest.mark.parametrize("policy", ["quorum", "peer-to-peer"])
async def test_nobody_waits_for_snapshots_that_are_held_nor_for_a_repair_under_way(
    cluster_server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    """Check and repair stand still until all writers have gone on: one that waits for them ends the test."""

    async def gone_on(writers: list[Writers], more: int = 25) -> None:
        wanted = [one.written + more for one in writers]

        async def all_have() -> bool:
            return all(one.written >= enough for one, enough in zip(writers, wanted, strict=True))

        await eventually(all_have, TIMEOUT_S, "that writers go on")

    async with checked_set(cluster_server, folder, None, POLICIES[policy], rows=50) as checked:
        endpoints = load_set(str(checked.small.cluster.path), "shop").endpoints
        async with writing(checked, (2, 50), rate=50, writers=2) as writers:

            class UnderWay(SetRepair):
                async def _write(self, *planned: object) -> None:
                    await gone_on(writers)
                    await super()._write(*planned)  # type: ignore[arg-type]

            await gone_on(writers)
            barrier = SetBarrier(checked.link, TIMEOUT_S)
            handles = await barrier.open(endpoints)
            first = {name: await rows_at(handle) for name, handle in handles.items()}
            await gone_on(writers)
            again = {name: await rows_at(handle) for name, handle in handles.items()}
            await barrier.release()
            await checked.on("r2", "UPDATE t SET v = -5 WHERE id = 1")
            planner = Planner(["r1", "r2", "r3"], Strategy.MAJORITY)
            done = await UnderWay(checked.link, endpoints, planner, TIMEOUT_S).run([found_at("r2", 1)])

    assert first == again
    assert (done.written, done.moved) == (1, 0)
    assert [one.rejected for one in writers] == [[], []]
