"""A lost answer: the id in the error leads to what really happened, and "aborted" is the last word."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Update
from replication import ReplicaSet, connect
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.integration.replication.wires import Wire, wire_to
from tests.support.polling import eventually
from tops.model.errors import OutcomeUnknown

POLICIES = {
    "write-all": 'policy = "write-all"',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "peer-to-peer": 'policy = "peer-to-peer"',
    "ordered": 'policy = "peer-to-peer"\norder = "ordered"',
    "serializable": 'policy = "serializable"',
}
PATIENT = "heartbeat_s = 60\nsite_grace_s = 60"  # nobody gives a silent client up while its wire is held
GIVE_UP_S = 2.0
LOST = Insert("accounts", {"id": 1, "balance": 1})


@asynccontextmanager
async def wired(server: EmbeddedPostgres, folder: Path, keys: str) -> AsyncIterator[tuple[SmallCluster, Wire]]:
    async with (
        small_cluster(server, folder, keys, limits=PATIENT) as cluster,
        wire_to(cluster.cluster.urls()[0]) as wire,
    ):
        yield cluster, wire


@asynccontextmanager
async def client_at(wire: Wire, prefer: str | None = "r1") -> AsyncIterator[ReplicaSet]:
    async with connect(wire.url, "shop", prefer=prefer, timeout_s=GIVE_UP_S) as shop:
        yield shop


async def lose_the_answer(shop: ReplicaSet, key: str = "") -> str:
    with pytest.raises(OutcomeUnknown) as lost:
        await shop.write([LOST], idempotency_key=key)
    return lost.value.tx


async def is_there(cluster: SmallCluster, replica: str) -> bool:
    return bool(await cluster.sql(replica, "select from accounts where id = 1"))


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_write_whose_answer_was_lost_is_found_committed(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with wired(server, folder, POLICIES[policy]) as (cluster, wire), client_at(wire) as shop:
        wire.to_client.clear()
        tx = await lose_the_answer(shop)
        await eventually(lambda: is_there(cluster, "r1"), what="the write")
        wire.let_go()

        async with cluster.connect(prefer="r1") as another:
            assert await another.outcome(tx) == "committed"
            assert await another.outcome(tx) == "committed"
        assert await shop.outcome(tx) == "committed"


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_write_that_arrives_after_it_was_said_to_be_aborted_is_refused(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with wired(server, folder, POLICIES[policy]) as (cluster, wire), client_at(wire) as shop:
        wire.to_broker.clear()
        tx = await lose_the_answer(shop)
        async with cluster.connect(prefer="r1") as another:
            assert await another.outcome(tx) == "aborted"
        wire.let_go()
        behind = await shop.write([Insert("accounts", {"id": 2, "balance": 2})])
        await shop.wait_in_sync()

        assert behind.tx != tx
        assert [await is_there(cluster, replica) for replica in ("r1", "r2", "r3")] == [False] * 3
        assert await shop.outcome(tx) == "aborted"


async def test_whoever_asks_elsewhere_about_a_local_first_write_is_led_to_its_replica(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with wired(server, folder, POLICIES["peer-to-peer"]) as (cluster, wire), client_at(wire, "r2") as shop:
        wire.to_client.clear()
        async with cluster.connect(prefer="r3") as elsewhere:
            await elsewhere.order("r3", "pause")  # it has not heard of the write when it is asked
            tx = await lose_the_answer(shop)
            await eventually(lambda: is_there(cluster, "r2"), what="the write")
            wire.let_go()

            assert await elsewhere.outcome(tx) == "committed"


async def test_a_replica_that_is_new_tells_what_was_refused_before_it_came(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, POLICIES["serializable"]) as cluster, cluster.connect() as shop:
        done = await shop.write([LOST])
        with pytest.raises(WriteRejected) as rejected:
            await shop.write([LOST])
        await cluster.stop("r3")
        await cluster.lose_database("r3")
        await cluster.start("r3")
        await shop.wait_in_sync()

        async with cluster.connect(prefer="r3") as at_new:
            assert await at_new.outcome(rejected.value.tx) == "aborted"
            assert await at_new.outcome(done.tx) == "committed"


async def test_a_serializable_transaction_that_is_repeated_under_its_key_is_done_once(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with wired(server, folder, POLICIES["serializable"]) as (_, wire), client_at(wire) as shop:
        await shop.write([LOST])
        async with shop.transaction(idempotency_key="once") as tx:
            (row,) = await tx.fetch("select balance from accounts where id = $1", 1)
            await tx.update("accounts", key={"id": 1}, values={"balance": row["balance"] + 1})
            wire.to_client.clear()
            with pytest.raises(OutcomeUnknown):
                await tx.commit()
            wire.let_go()
            await tx.commit()  # what it had read was changed meanwhile, by itself
            again = await shop.write(
                [Update("accounts", {"id": 1}, {"balance": row["balance"] + 1})], idempotency_key="once"
            )

        rows = await shop.fetch("select balance from accounts where id = 1", after=again.token)
        assert [row["balance"] for row in rows] == [2]


@pytest.mark.parametrize("policy", ["write-all", "serializable", "peer-to-peer"])
async def test_a_request_with_a_key_is_found_by_its_id_alone_and_by_its_key_alone(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with wired(server, folder, POLICIES[policy]) as (cluster, wire), client_at(wire) as shop:
        wire.to_client.clear()
        tx = await lose_the_answer(shop, key="mine")
        await eventually(lambda: is_there(cluster, "r1"), what="the write")
        wire.let_go()

        async with cluster.connect(prefer="r1") as another:
            assert await another.outcome(tx) == "committed"
            assert await another.outcome("somebody.1.1", idempotency_key="mine") == "committed"


async def test_a_refusal_is_told_after_old_conflicts_were_pruned(server: EmbeddedPostgres, folder: Path) -> None:
    keys = f"{POLICIES['serializable']}\nkeep_conflicts_s = 0.1"
    async with small_cluster(server, folder, keys) as cluster, cluster.connect() as shop:
        await shop.write([LOST])
        with pytest.raises(WriteRejected) as rejected:
            await shop.write([LOST])
        await shop.wait_in_sync()

        await eventually(lambda: pruned(cluster), what="a round of pruning at every replica")
        await cluster.stop("r1", "r2", "r3")
        await cluster.start("r1", "r2", "r3")

        assert await shop.outcome(rejected.value.tx) == "aborted"


async def pruned(cluster: SmallCluster) -> bool:
    return all(agent.pruning is not None and agent.pruning.rounds >= 2 for agent in cluster.agents.values())
