"""Three sites that write the same rows, cut off from each other and with clocks that differ, end with the same rows."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from adapters import EmbeddedPostgres
from replication import ReplicaSet
from replication.conflicts.clock import wall_ms
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tops.changes import Delete, Insert, Update

HOT, DOOMED, COUNTER = range(8), range(20, 28), 50
SKEW_MS = {"r1": 0, "r2": 5_000, "r3": -5_000}
RESOLVERS = ["last-writer", "first-writer", "per-column", "site-priority"]


def keys_for(resolver: str) -> str:
    priority = '\nsite_priority = ["r2", "r1", "r3"]' if resolver == "site-priority" else ""
    return f'policy = "peer-to-peer"\nresolver = "{resolver}"{priority}'


def cut(cluster: SmallCluster, site: str) -> None:
    """Nothing comes in from the log and nothing goes out to it; local writes go on."""
    agent = cluster.agents[site]
    assert agent.writes is not None
    agent.participant.stop("cut off")
    agent.writes.publisher.resumed.clear()


def heal(cluster: SmallCluster, site: str) -> None:
    agent = cluster.agents[site]
    assert agent.writes is not None
    agent.participant.resume()
    agent.writes.publisher.resumed.set()


def skew(cluster: SmallCluster) -> None:
    for site, ahead_ms in SKEW_MS.items():
        writes = cluster.agents[site].writes
        assert writes is not None
        writes.clock._wall = lambda ahead_ms=ahead_ms: wall_ms() + ahead_ms


async def begin(shop: ReplicaSet, sites: list[str]) -> None:
    rows = [*HOT, *DOOMED, COUNTER, *(100 + place for place in range(len(sites)))]
    await shop.write([Insert("accounts", {"id": row, "owner": "", "balance": 1_000_000}) for row in rows])
    await shop.wait_in_sync()


async def write_much(cluster: SmallCluster, site: str, place: int, count: int, told: dict[str, Any]) -> None:
    """Updates of rows that everyone updates, of a row of one's own, of a counter; deletes of what others update."""
    pick = random.Random(site)
    async with cluster.connect(prefer=site) as shop:
        for step in range(count):
            value, choice = f"{site}-{step}", pick.random()
            if choice < 0.6:
                await shop.write([Update("accounts", {"id": pick.choice(HOT)}, {"owner": value})])
            elif choice < 0.75:
                await shop.write([Update("accounts", {"id": 100 + place}, {"owner": value})])
                told[site] = value
            elif choice < 0.9:
                await shop.write([Update("accounts", {"id": COUNTER}, add={"balance": 1})])
                told["added"] = told.get("added", 0) + 1
            elif choice < 0.95:
                await shop.write([Update("accounts", {"id": pick.choice(DOOMED)}, {"owner": value})])
            else:
                await shop.write([Delete("accounts", {"id": DOOMED[(step + place) % len(DOOMED)]})])
                told.setdefault("deleted", set()).add(DOOMED[(step + place) % len(DOOMED)])


async def converge(server: EmbeddedPostgres, folder: Path, resolver: str, count: int) -> None:
    async with small_cluster(server, folder, keys_for(resolver)) as cluster, cluster.connect(prefer="r1") as shop:
        sites, told = list(cluster.databases), {}
        await begin(shop, sites)
        skew(cluster)
        writers = [
            asyncio.ensure_future(write_much(cluster, site, place, count // 3, told))
            for place, site in enumerate(sites)
        ]
        while not all(writer.done() for writer in writers):
            lonely = random.choice(sites)
            cut(cluster, lonely)
            await asyncio.sleep(random.uniform(0.1, 0.5))
            heal(cluster, lonely)
            await asyncio.sleep(random.uniform(0.1, 0.5))
        await asyncio.gather(*writers)
        await shop.wait_in_sync(60.0)

        found = await rows_everywhere(shop, "select id, owner, balance from accounts order by id")
        assert found["r1"] == found["r2"] == found["r3"]
        rows = {row[0]: row for row in found["r1"]}
        for place, site in enumerate(sites):
            assert rows[100 + place][1] == told.get(site, ""), "an update that never conflicted is lost"
        assert rows[COUNTER][2] == 1_000_000 + told["added"], "an increment is lost or doubled"
        assert rows.keys() & told["deleted"] == set(), "a deleted row came back"
        assert sum(len(lines) for lines in (await shop.conflicts(10)).values()) > 0


@pytest.mark.parametrize("resolver", RESOLVERS)
async def test_sites_converge_under_conflicts_partitions_and_skewed_clocks(
    server: EmbeddedPostgres, folder: Path, resolver: str
) -> None:
    await converge(server, folder, resolver, 300)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("resolver", RESOLVERS)
async def test_sites_converge_after_ten_thousand_changes(server: EmbeddedPostgres, folder: Path, resolver: str) -> None:
    await converge(server, folder, resolver, 10_000)


async def test_every_discarded_version_is_in_the_conflict_log_with_the_winner(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, keys_for("last-writer")) as cluster, cluster.connect() as shop:
        await begin(shop, list(cluster.databases))
        skew(cluster)
        for site in cluster.databases:
            cut(cluster, site)
        for site in cluster.databases:
            async with cluster.connect(prefer=site) as there:
                await there.write([Update("accounts", {"id": 1}, {"owner": f"by {site}"})])
        for site in cluster.databases:
            heal(cluster, site)
        await shop.wait_in_sync()

        found = await rows_everywhere(shop, "select owner from accounts where id = 1")
        assert {rows[0][0] for rows in found.values()} == {"by r2"}, "the site whose clock is ahead wins"
        lines = [line for lines in (await shop.conflicts()).values() for line in lines]
        discarded = {json.loads(line["discarded"])["owner"] for line in lines}
        assert discarded >= {"by r1", "by r3"}
        assert {line["kind"] for line in lines} == {"update_origin_differs"}
        assert all(json.loads(line["kept"])["owner"] for line in lines)
        statuses = (await shop.status())["replicas"]
        assert any("clock" in status["warning"] for status in statuses), "nobody warned of the clocks"


async def test_a_row_deleted_at_one_site_and_updated_at_another_stays_deleted(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, keys_for("last-writer")) as cluster, cluster.connect(prefer="r1") as shop:
        await begin(shop, list(cluster.databases))
        for site in cluster.databases:
            cut(cluster, site)
        await shop.write([Delete("accounts", {"id": 2})])
        async with cluster.connect(prefer="r2") as there:
            await there.write([Update("accounts", {"id": 2}, {"owner": "later"})])
        for site in cluster.databases:
            heal(cluster, site)
        await shop.wait_in_sync()

        found = await rows_everywhere(shop, "select owner from accounts where id = 2")
        assert found == {"r1": [], "r2": [], "r3": []}
        kinds = {line["kind"] for lines in (await shop.conflicts()).values() for line in lines}
        assert kinds <= {"update_deleted", "delete_origin_differs"}

        await shop.write([Insert("accounts", {"id": 2, "owner": "again", "balance": 1})])
        await shop.wait_in_sync()
        again = await rows_everywhere(shop, "select owner from accounts where id = 2")
        assert again == {"r1": [("again",)], "r2": [("again",)], "r3": [("again",)]}


async def test_a_violated_constraint_sets_the_transaction_aside_and_marks_the_set_divergent(
    server: EmbeddedPostgres, folder: Path
) -> None:
    schema = "create table accounts (id int primary key, owner text not null default '', unique (owner))"
    async with (
        small_cluster(server, folder, keys_for("last-writer"), schema=schema) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        for site in cluster.databases:
            cut(cluster, site)
        await shop.write([Insert("accounts", {"id": 1, "owner": "same"})])
        async with cluster.connect(prefer="r2") as there:
            await there.write([Insert("accounts", {"id": 2, "owner": "same"})])
        for site in cluster.databases:
            heal(cluster, site)
        await shop.wait_in_sync()

        status = {r["replica"]: r for r in (await shop.status())["replicas"]}
        assert status["r1"]["divergent"]
        assert status["r1"]["set_aside"] == 1
        await cluster.sql("r1", "alter table accounts drop constraint accounts_owner_key")
        assert "1 of 1" in await shop.order("r1", "retry")
        assert len(await cluster.sql("r1", "select * from accounts")) == 2
