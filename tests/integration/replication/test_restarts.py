"""Whatever stops and starts in whatever order: a replica that missed something takes part only once it has it."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Upsert
from adapters.embedded.free_ports import free_port
from adapters.resource import Resource
from replication import connect
from replication.client.reads import TooFewReaders
from replication.model.config import Cluster, login_keys
from replication.replica.agent import Agent
from replication.replica.databases import ReplicaDatabase
from tests.integration.replication.clusters import SCHEMA
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.logins import logins_in
from tests.support.polling import eventually
from tops.model.errors import AgentReplaced, NotReachable, TopsError
from tops.server.broker import Broker

BALANCE = "select balance from accounts where id = 1"
PARTS = ("b1", "b2", "r1", "r2", "r3")
ORDERS = list(itertools.permutations(PARTS))


class Round:
    """One replica misses a write, everything stops, and comes back part by part."""

    def __init__(self, cluster: SmallCluster, pick: random.Random) -> None:
        self.cluster, self.pick = cluster, pick
        self.newest = 0
        self.maybe: set[int] = set()  # values whose writer was not told whether they are there

    async def write(self, **options: Any) -> None:
        value = max({self.newest, *self.maybe}) + 1
        self.maybe.add(value)
        async with self.cluster.connect(**options) as shop:
            await shop.write([Upsert("accounts", {"id": 1}, {"balance": value})])
        self.newest = value

    async def wrote(self) -> bool:
        await self.write()
        return True

    async def run(self, order: tuple[str, ...]) -> None:
        stale = self.pick.choice(["r1", "r2", "r3"])
        await self.cluster.stop(stale)
        await eventually(self.wrote, 60.0, "a write without one replica")
        for part in self.pick.sample([part for part in PARTS if part != stale], 4):
            await (self.cluster.stop_broker(part) if part.startswith("b") else self.cluster.stop(part))
        starts = []
        for part in order:
            if part.startswith("b"):
                await self.cluster.start_broker(part)
            else:
                starts.append(asyncio.ensure_future(self.cluster.start(part)))  # it waits for a broker by itself
            await self.nobody_is_stale()
        await self.may_write()
        await asyncio.gather(*starts)
        async with self.cluster.connect() as shop:
            await shop.wait_in_sync(60.0)
        await self.nobody_is_stale()
        await eventually(self.wrote, 60.0, "a write after everything is back")
        async with self.cluster.connect() as shop:
            for consistency in ("quorum", "current"):
                assert await shop.fetchval(BALANCE, consistency=consistency) == self.newest

    async def may_write(self) -> None:
        """A write while parts are still coming back; what it says is true, whatever it says."""
        with contextlib.suppress(TopsError):
            await self.write(timeout_s=1.0)
        await self.nobody_is_stale()

    async def nobody_is_stale(self) -> None:
        """Whom the coordinator counts as in sync has everything that was acknowledged before.

        It is asked now: an agent repeats what it was told half a second ago, and a quorum may have gone on since."""
        for name, agent in list(self.cluster.agents.items()):
            with contextlib.suppress(NotReachable):  # no coordinator yet: nobody is said to be in sync
                told = await agent.site.get_log_state(agent.log_type, timeout_s=1.0)
                if agent.name in told.in_sync:
                    (row,) = await self.cluster.sql(name, BALANCE)
                    assert row["balance"] >= self.newest, f"{name} is in sync without {self.newest}"


async def restart_in(server: EmbeddedPostgres, folder: Path, orders: Sequence[tuple[str, ...]], policy: str) -> None:
    async with small_cluster(server, folder, policy, brokers=2) as cluster:
        rounds = Round(cluster, random.Random(1))
        await rounds.write()
        for order in orders:
            await rounds.run(order)


async def test_no_stale_replica_is_in_sync_after_restarts_in_some_orders(
    server: EmbeddedPostgres, folder: Path
) -> None:
    orders = [("r1", "r2", "r3", "b2", "b1"), ("b2", "r3", "r2", "r1", "b1"), ("b1", "r1", "b2", "r3", "r2")]
    await restart_in(server, folder, orders, 'policy = "quorum"\nwrite_quorum = 2')


async def test_the_check_for_stale_replicas_finds_one_that_lost_a_write(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"\nwrite_quorum = 2') as cluster:
        rounds = Round(cluster, random.Random(1))
        await rounds.write()
        async with cluster.connect() as shop:
            await shop.wait_in_sync()
        await rounds.nobody_is_stale()
        await cluster.sql("r2", "update accounts set balance = 0 where id = 1")
        with pytest.raises(AssertionError, match="r2 is in sync without 1"):
            await rounds.nobody_is_stale()


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_no_stale_replica_is_in_sync_after_restarts_in_every_order(
    server: EmbeddedPostgres, folder: Path
) -> None:
    await restart_in(server, folder, ORDERS, 'policy = "quorum"\nwrite_quorum = 2')


async def test_a_replica_that_is_cut_off_from_the_others_serves_no_current_and_no_quorum_read(
    server: EmbeddedPostgres, folder: Path
) -> None:
    keys = 'policy = "quorum"\nwrite_quorum = 2'
    async with small_cluster(server, folder, keys) as cluster, cluster.connect(prefer="r3") as shop:
        await shop.write([Upsert("accounts", {"id": 1}, {"balance": 1})])
        await shop.wait_in_sync()
        await shop.order("r3", "pause")
        await shop.write([Upsert("accounts", {"id": 1}, {"balance": 2})])
        await cluster.stop("r1", "r2")

        with pytest.raises(TooFewReaders) as unread:
            await shop.fetch(BALANCE, consistency="quorum", wait_s=1.0)
        assert unread.value.missing == ("r1", "r2")
        with pytest.raises(NotReachable, match="did not reach"):
            await shop.fetch(BALANCE, consistency="current", wait_s=2.0)
        assert await shop.fetchval(BALANCE) == 1, "a read of any is allowed to be old"

        await cluster.stop_broker("b1")

        async def rejected() -> bool:
            with pytest.raises(NotReachable):
                await shop.fetch(BALANCE, consistency="current", wait_s=2.0)
            return True

        await eventually(rejected, what="a current read being refused without a coordinator")


async def is_out(agent: Agent) -> bool:
    return not (await agent.status())["in_sync"]


@pytest.mark.parametrize("keys", ['policy = "write-all"', 'policy = "primary-site"\nprimary = "r3"'])
async def test_an_agent_whose_database_was_taken_by_another_ends_and_says_so(
    server: EmbeddedPostgres, folder: Path, keys: str
) -> None:
    async with small_cluster(server, folder, keys) as cluster, cluster.connect() as shop:
        old = cluster.agents["r3"]
        ending = asyncio.ensure_future(old.wait())
        async with Agent.run(cluster.cluster, "shop", "r3", take_over=True):
            for number in range(1, 6):
                await shop.write([Upsert("accounts", {"id": 1}, {"balance": number})])

            async with asyncio.timeout(60.0):
                with pytest.raises(AgentReplaced, match="another agent has taken over"):
                    await ending
            await shop.wait_in_sync()
            await eventually(lambda: is_out(old), what="the old one no longer saying that it is in sync")
            assert await shop.fetchval(BALANCE, replica="r3") == 5


def embedded(folder: Path) -> Cluster:
    """One replica with a server of its own."""
    path = folder / "tops.toml"
    path.write_text(
        f'[cluster]\nname = "test"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\n'
        f'data = "{folder}/b1"\n'
        '[[replica_set]]\nname = "shop"\nschema = "schema.sql"\npolicy = "quorum"\n'
        '[[replica_set.replica]]\nname = "r1"\nbroker = "b1"\n'
    )
    (folder / "schema.sql").write_text(SCHEMA)
    return Cluster.load(path)


def kill_postmaster(folder: Path) -> None:
    (lock,) = folder.rglob("postmaster.pid")
    os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)


async def test_an_agent_starts_its_own_server_again_when_only_its_postmaster_is_killed(folder: Path) -> None:
    cluster = embedded(folder)
    async with (
        Broker.run(cluster.config, "b1"),
        Agent.run(cluster, "shop", "r1") as agent,
        connect(cluster.urls(), "shop") as shop,
    ):
        for number in range(1, 4):
            await shop.write([Upsert("accounts", {"id": 1}, {"balance": number})])
            kill_postmaster(folder)
            await eventually(lambda number=number: restarted(agent, number), what="the server being started again")
            await shop.wait_in_sync()
            assert await shop.fetchval(BALANCE, consistency="current") == number


async def test_a_server_that_dies_while_its_agent_starts_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, resource = embedded(folder), ReplicaDatabase.resource

    def killed(database: ReplicaDatabase) -> Resource:
        kill_postmaster(folder)
        return resource(database)

    monkeypatch.setattr(ReplicaDatabase, "resource", killed)
    async with (
        Broker.run(cluster.config, "b1"),
        Agent.run(cluster, "shop", "r1"),
        connect(cluster.urls(), "shop") as shop,
    ):
        await shop.write([Upsert("accounts", {"id": 1}, {"balance": 1})])


async def restarted(agent: Agent, times: int) -> bool:
    return agent.database.restarts >= times and bool(await agent.resource.applied())


async def test_an_agent_waits_for_a_database_that_is_not_there_yet(folder: Path) -> None:
    server = EmbeddedPostgres(folder / "late", settings={"fsync": "off"})
    async with server:
        connection = await asyncpg.connect(server.dsn)
        await connection.execute(SCHEMA)
        await connection.close()
        logins = await logins_in(server, "postgres")
    path = folder / "tops.toml"
    path.write_text(
        f'[cluster]\nname = "test"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\n'
        f'data = "{folder}/b1"\n'
        '[[replica_set]]\nname = "shop"\npolicy = "quorum"\n'
        f'[[replica_set.replica]]\nname = "r1"\nbroker = "b1"\n{login_keys(logins)}\n'
    )
    cluster = SmallCluster(Cluster.load(path), server, {"r1": "postgres"}, partial(logins_in, server))
    try:
        await cluster.start_broker("b1")
        starting = asyncio.ensure_future(cluster.start("r1"))
        with pytest.raises(NotReachable, match="no replica of set"):
            async with cluster.connect(timeout_s=1.0):
                pass
        assert not starting.done(), "the agent gave up"
        async with server:
            await starting
            async with cluster.connect() as shop:
                await shop.write([Upsert("accounts", {"id": 1}, {"balance": 1})])
            await cluster.close()
    finally:
        await cluster.close()
