"""Votes of m of n: what goes on, what is refused at once, and what a read of n−m+1 sees, for every m and n up to 5.

A walk visits the sets of replicas that are down so that neighbours differ by one replica (a Gray code), and tries a
write and a read at each: no stop and no start is wasted, and all of them together are every case there is.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Update, Upsert
from replication import ReplicaSet
from replication.client.reads import TooFewReaders
from replication.rpc.rejections import TooFewReplicas, WriteRejected
from tests.integration.replication.inprocess import VOTE_S, SmallCluster, small_cluster
from tests.support.polling import eventually

SIZES = [(m, n) for n in range(1, 6) for m in range(1, n + 1)]
BALANCE = "select balance from accounts where id = 1"
AT_ONCE_S = 15.0  # far below what a write or a read may take that waits for somebody


class Quorum:
    """A set of m of n under test, and the newest version that was acknowledged."""

    def __init__(self, cluster: SmallCluster, shop: ReplicaSet, m: int) -> None:
        self.cluster, self.shop, self.m = cluster, shop, m
        self.names = list(cluster.databases)
        self.n = len(self.names)
        self.number = 0

    async def write(self) -> None:
        self.number += 1
        await self.shop.write([Upsert("accounts", {"id": 1}, {"balance": self.number})])

    async def check_read(self, what: str) -> None:
        for consistency in ("quorum", "current"):
            found = await self.shop.fetchval(BALANCE, consistency=consistency)
            assert found == self.number, f"{self.m} of {self.n}, {what}: {consistency} read {found}, not {self.number}"

    async def check(self, down: frozenset[str]) -> None:
        """A write and a read with these replicas down: done, or refused with their names."""
        if len(down) <= self.n - self.m:
            await self.write()
        else:
            async with asyncio.timeout(AT_ONCE_S):
                with pytest.raises(TooFewReplicas) as rejected:
                    await self.shop.write([Upsert("accounts", {"id": 2}, {"balance": 1})])
            assert all(name in str(rejected.value) for name in down)
        if len(down) <= self.m - 1:
            await self.check_read(f"{sorted(down)} down")
        elif len(down) < self.n:
            async with asyncio.timeout(AT_ONCE_S):
                with pytest.raises(TooFewReaders) as unread:
                    await self.shop.fetch("select 1", consistency="quorum", wait_s=1.0)
            assert unread.value.missing == tuple(sorted(down))

    async def is_in_sync(self, name: str) -> None:
        async def caught_up() -> bool:
            replicas = {r["replica"]: r for r in (await self.shop.status(0.5))["replicas"]}
            return bool(replicas[name]["in_sync"])

        await eventually(caught_up, what=f"{name} in sync")

    async def walk(self, steps: Iterator[frozenset[str]]) -> None:
        down: frozenset[str] = frozenset()
        await self.check(down)
        for wanted in steps:
            await self.cluster.stop(*(wanted - down))
            await self.cluster.start(*(down - wanted))
            for name in down - wanted:
                await self.is_in_sync(name)
            down = wanted
            await self.check(down)
        await self.cluster.start(*down)
        await self.shop.wait_in_sync()

    async def meets_the_one_that_knows(self, behind: tuple[str, ...], down: tuple[str, ...]) -> None:
        """n−m replicas stand still during a write, then m−1 of those that took it go down: one is left that knows."""
        for name in behind:
            await self.shop.order(name, "pause")
        await self.write()
        await self.cluster.stop(*down)
        await self.check_read(f"{behind} behind and {down} down")
        await self.cluster.start(*down)
        for name in behind:
            await self.shop.order(name, "resume")
        await self.shop.wait_in_sync()


def every_set(names: list[str]) -> Iterator[frozenset[str]]:
    """All sets of replicas but the empty one, neighbours differing by one (a reflected Gray code)."""
    for number in range(1, 2 ** len(names)):
        code = number ^ (number >> 1)
        yield frozenset(name for place, name in enumerate(names) if code >> place & 1)


def some_sets(names: list[str], pick: random.Random) -> Iterator[frozenset[str]]:
    """One replica after the other goes down, in some order, but for the last one."""
    order = pick.sample(names, len(names))
    for count in range(1, len(names)):
        yield frozenset(order[:count])


async def check_quorum(server: EmbeddedPostgres, folder: Path, m: int, n: int, *, everything: bool) -> None:
    keys, pick = f'policy = "quorum"\nwrite_quorum = {m}', random.Random(m * 10 + n)
    async with small_cluster(server, folder, keys, replicas=n) as cluster, cluster.connect() as shop:
        quorum = Quorum(cluster, shop, m)
        steps = every_set(quorum.names) if everything else some_sets(quorum.names, pick)
        await quorum.walk(steps)
        cases = [
            (behind, down)
            for behind in itertools.combinations(quorum.names, n - m)
            for down in itertools.combinations([name for name in quorum.names if name not in behind], m - 1)
        ]
        for behind, down in cases if everything else [pick.choice(cases)]:
            await quorum.meets_the_one_that_knows(behind, down)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (3, 4), (2, 5), (3, 5)])
async def test_a_quorum_tolerates_what_it_promises_and_names_what_it_lacks(
    server: EmbeddedPostgres, folder: Path, m: int, n: int
) -> None:
    await check_quorum(server, folder, m, n, everything=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("m", "n"), SIZES)
async def test_every_quorum_tolerates_every_loss_it_promises_to(
    server: EmbeddedPostgres, folder: Path, m: int, n: int
) -> None:
    await check_quorum(server, folder, m, n, everything=True)


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
        for number in range(14, 24):
            await shop.write([Upsert("accounts", {"id": 1}, {"balance": number})])
            for consistency in ("quorum", "current"):
                assert await shop.fetchval(BALANCE, consistency=consistency) == number
        assert await shop.fetchval(BALANCE, replica="r3") is None, "a replica that was dropped applied something"
        await cluster.sql("r3", "alter table accounts drop constraint sick")
        await shop.order("r3", "resume")
        await shop.wait_in_sync()
        assert await shop.fetchval(BALANCE, replica="r3") == 23


async def test_a_slow_replica_holds_no_write_up_and_has_all_of_them_in_the_end(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with (
        small_cluster(server, folder, 'policy = "quorum"\nwrite_quorum = 2') as cluster,
        cluster.connect() as shop,
    ):
        await shop.write([Upsert("accounts", {"id": 1}, {"balance": 0})])
        await shop.wait_in_sync()
        slow = await asyncpg.connect(server.dsn_for(cluster.databases["r3"]))
        try:
            async with slow.transaction():
                await slow.execute("select from accounts where id = 1 for update")  # r3 can't prepare the next write
                async with asyncio.timeout(VOTE_S):  # r3 takes so long for each
                    for number in range(1, 4):
                        await shop.write([Update("accounts", {"id": 1}, {"balance": number})])
                assert await shop.fetchval(BALANCE, consistency="quorum") == 3
                assert await slow.fetchval("select balance from accounts where id = 1") == 0
        finally:
            await slow.close()
        await shop.wait_in_sync()
        assert await shop.fetchval(BALANCE, replica="r3") == 3


async def test_a_member_that_every_replica_refuses_is_refused_and_nobody_is_dropped(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with (
        small_cluster(server, folder, 'policy = "quorum"\nwrite_quorum = 2') as cluster,
        cluster.connect() as shop,
    ):
        await shop.write([Upsert("accounts", {"id": 1}, {"balance": 1})])
        await shop.wait_in_sync()  # whom the write did not wait for is not in sync until it has it
        with pytest.raises(WriteRejected, match="constraint"):
            await shop.write([Upsert("accounts", {"id": 1}, {"balance": -1})])

        assert await shop.fetchval(BALANCE, consistency="quorum") == 1
        assert all(r["in_sync"] for r in (await shop.status())["replicas"])
