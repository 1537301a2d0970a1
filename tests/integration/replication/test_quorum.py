"""m of n: which replicas may be down for writes and for reads, and what a client hears beyond that."""

import itertools
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from replication.reads import TooFewReaders
from replication.refusals import TooFewReplicas
from tests.integration.replication.clusters import eventually
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tops.changes import Upsert

SIZES = [(m, n) for n in (1, 2, 3) for m in range(1, n + 1)]
LARGER = [(m, n) for n in (4, 5) for m in range(1, n + 1)]


async def check_quorum(server: EmbeddedPostgres, folder: Path, m: int, n: int) -> None:
    keys = f'policy = "quorum"\nwrite_quorum = {m}'
    async with small_cluster(server, folder, keys, replicas=n) as cluster, cluster.connect() as shop:
        number = 0
        for down in itertools.chain(
            itertools.combinations(list(cluster.databases), n - m),
            itertools.combinations(list(cluster.databases), m - 1),
        ):
            await cluster.stop(*down)
            if len(down) <= n - m:
                number += 1
                await shop.write([Upsert("accounts", {"id": 1}, {"balance": number})])
            if len(down) <= m - 1:
                newest = await shop.fetchval("select balance from accounts where id = 1", consistency="quorum")
                assert (newest or 0) == number, f"{m} of {n} with {down} down: read {newest}, written {number}"
            await cluster.start(*down)
            await shop.wait_in_sync()

        await check_refusals(cluster, m, n)


async def check_refusals(cluster: SmallCluster, m: int, n: int) -> None:
    """One more replica down than may be: refused, with the names of those that are missing."""
    names = list(cluster.databases)
    async with cluster.connect() as shop:
        down = names[: n - m + 1]
        if len(down) < n:
            await cluster.stop(*down)
            with pytest.raises(TooFewReplicas) as refused:
                await shop.write([Upsert("accounts", {"id": 2}, {"balance": 1})])
            assert all(name in str(refused.value) for name in down)
            await cluster.start(*down)
            await shop.wait_in_sync()
        down = names[:m]
        if len(down) < n:
            await cluster.stop(*down)
            with pytest.raises(TooFewReaders) as unread:
                await shop.fetch("select 1", consistency="quorum", wait_s=1.0)
            assert unread.value.missing == tuple(down)


@pytest.mark.parametrize(("m", "n"), SIZES)
async def test_every_quorum_tolerates_what_it_promises(server: EmbeddedPostgres, folder: Path, m: int, n: int) -> None:
    await check_quorum(server, folder, m, n)


@pytest.mark.long
@pytest.mark.parametrize(("m", "n"), LARGER)
async def test_larger_quorums_tolerate_what_they_promise(
    server: EmbeddedPostgres, folder: Path, m: int, n: int
) -> None:
    await check_quorum(server, folder, m, n)


async def test_a_sick_replica_is_dropped_and_named_and_does_not_abort_writes(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with (
        small_cluster(server, folder, 'policy = "quorum"\nwrite_quorum = 2') as cluster,
        cluster.connect() as shop,
    ):
        await cluster.sql("r3", "alter table accounts add constraint sick check (balance <> 13)")

        done = await shop.write([Upsert("accounts", {"id": 1}, {"balance": 13})])

        assert sum(done.rows) == 1

        async def dropped() -> bool:
            status = {r["replica"]: r for r in (await shop.status())["replicas"]}
            return not status["r3"]["in_sync"] and "sick" in status["r3"]["stopped"]

        await eventually(dropped, what="r3 stopping with its reason")
        assert await shop.fetchval("select balance from accounts where id = 1", consistency="quorum") == 13
        await cluster.sql("r3", "alter table accounts drop constraint sick")
        await shop.order("r3", "resume")
        await shop.wait_in_sync()
        assert await shop.fetchval("select balance from accounts where id = 1", replica="r3") == 13
