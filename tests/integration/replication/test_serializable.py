"""Serializable means serializable: histories under contention have no cycles, and would have without the read locks."""

import asyncio
import random
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from replication import ReplicaSet
from replication.refusals import SerializationFailure, WriteRefused
from tests.integration.replication.history import Tx, anomalies
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tops.errors import NotReachable, OutcomeUnknown

KEYS = 6
WRITERS_PER_SITE = 3


async def lists_filled(cluster: SmallCluster) -> None:
    async with cluster.connect() as shop:
        async with shop.transaction() as tx:
            for key in range(KEYS):
                await tx.insert("lists", {"key": key, "items": ""})
        await shop.wait_in_sync()


async def one(shop: ReplicaSet, name: str, pick: random.Random, locks: bool) -> Tx:
    """Read some lists and append to some of them; says what was seen and whether it committed."""
    record = Tx(name)
    try:
        async with shop.transaction() as tx:
            for key in pick.sample(range(KEYS), pick.choice((1, 2, 2, 3))):
                rows = await tx.fetch("select items from lists where key = $1", key)
                before = tuple(value for value in rows[0]["items"].split(",") if value)
                record.reads.append((key, before))
                if pick.random() < 0.6:
                    after = (*before, f"{name}.{key}")
                    record.writes[key] = after
                    await tx.update("lists", key={"key": key}, values={"items": ",".join(after)})
            if not locks:
                tx._locks.clear()
    except SerializationFailure:
        record.committed = False
    except (WriteRefused, NotReachable):
        record.committed = False
    except OutcomeUnknown:
        record.committed = None
    else:
        record.committed = True
    return record


async def run_history(cluster: SmallCluster, seed: int, count: int, locks: bool = True) -> list[Tx]:
    history: list[Tx] = []

    async def writer(site: str, number: int) -> None:
        pick = random.Random(f"{seed}-{site}-{number}")
        async with cluster.connect(prefer=site) as shop:
            while len(history) < count:
                history.append(await one(shop, f"{seed}{site}w{number}t{len(history)}", pick, locks))

    sites = list(cluster.databases)
    await asyncio.gather(*(writer(site, n) for site in sites for n in range(WRITERS_PER_SITE)))
    return history


@pytest.mark.parametrize("seed", [1])
async def test_histories_under_contention_are_serializable(server: EmbeddedPostgres, folder: Path, seed: int) -> None:
    async with small_cluster(server, folder, 'policy = "serializable"', brokers=2) as cluster:
        await lists_filled(cluster)

        history = await run_history(cluster, seed, 2_000)

        aborted = sum(tx.committed is False for tx in history)
        assert aborted >= len(history) * 0.05, "there was no contention to speak of"
        assert sum(tx.committed is True for tx in history) >= 100
        assert anomalies(history) == []


async def test_without_the_read_locks_the_checker_finds_cycles(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "serializable"') as cluster:
        await lists_filled(cluster)

        history = await run_history(cluster, 7, 300, locks=False)

        assert anomalies(history) != []


async def test_peer_to_peer_is_not_serializable(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "peer-to-peer"') as cluster:
        await lists_filled(cluster)

        history = await run_history(cluster, 9, 300)

        assert anomalies(history) != []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 150))
async def test_many_histories_are_serializable_also_with_replicas_stopped(
    server: EmbeddedPostgres, folder: Path, seed: int
) -> None:
    async with small_cluster(server, folder, 'policy = "serializable"', brokers=2) as cluster:
        await lists_filled(cluster)

        async def faults() -> None:
            pick = random.Random(seed)
            while True:
                await asyncio.sleep(pick.uniform(1.0, 4.0))
                victim = pick.choice(list(cluster.databases))
                await cluster.stop(victim)
                await asyncio.sleep(pick.uniform(0.1, 1.0))
                await cluster.start(victim)

        breaking = asyncio.ensure_future(faults()) if seed % 2 else None
        history = await run_history(cluster, seed, 2_000)
        if breaking is not None:
            breaking.cancel()
            await asyncio.gather(breaking, return_exceptions=True)

        assert sum(tx.committed is False for tx in history) >= len(history) * 0.05
        assert anomalies(history) == []
