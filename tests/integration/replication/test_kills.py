"""Every policy, in real processes: a replica and a broker are killed under load, and nothing is lost or doubled."""

import asyncio
import time
from pathlib import Path

import asyncpg
import pytest

from adapters.embedded.servers import kept_logins
from replication import ReplicaSet
from replication.client.reads import Consistency
from tests.integration.replication.clusters import RunningCluster, rows_everywhere, running
from tests.integration.replication.observations import violations
from tests.integration.replication.workloads import ACCOUNTS, START, Record, fill, read_until, write_until

POLICIES = {
    "write-all": 'policy = "write-all"',
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "combined": 'policy = "combined"\nsync = ["r1", "r3"]',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "peer-to-peer": 'policy = "peer-to-peer"',
    "serializable": 'policy = "serializable"',
    "ordered": 'policy = "peer-to-peer"\norder = "ordered"',
}
IN_SYNC_S = 30.0  # after everything is back
# The reads that see everything acknowledged, whatever happens to a replica or a broker.
PROMISED: dict[str, tuple[Consistency, ...]] = {
    "write-all": ("any", "current", "quorum"),
    "quorum": ("current", "quorum"),
    "combined": ("current", "quorum"),
    "primary-site": ("primary",),
    "ordered": ("current",),
}


@pytest.mark.parametrize("policy", POLICIES)
async def test_acknowledged_writes_survive_kills_and_replicas_end_equal(policy: str, folder: Path) -> None:
    async with running(folder, {"shop": POLICIES[policy]}) as cluster, cluster.connect() as shop:
        await fill(shop)
        record, healed = await run_with_kills(cluster, PROMISED.get(policy, ()))
        await shop.wait_in_sync(healed + IN_SYNC_S - time.monotonic())

        assert record.other == []
        assert violations(record.seen) == []
        await check_replicas(shop, record)
        await check_nothing_prepared(cluster)


async def run_with_kills(cluster: RunningCluster, consistencies: tuple[Consistency, ...]) -> tuple[Record, float]:
    """Writers at every site and a reader for each promise, while a replica and a broker are killed and come back; tells
    also when both had been started again."""
    record, stop = Record(), asyncio.Event()
    sites = cluster.cluster.replica_set("shop").names * 2
    work = [
        *(write_until(cluster, site, number, stop, record) for number, site in enumerate(sites)),
        *(read_until(cluster, consistency, stop, record) for consistency in consistencies),
    ]
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)
        await record.grows(acknowledged, 50, "writes before the first kill")
        await cluster.processes.kill("shop/r2")
        await record.grows(noticed, len(sites), "writers noticing that a replica is gone")
        await cluster.processes.kill("broker/b2")
        await record.grows(noticed, len(sites), "writers noticing that a broker is gone")
        await cluster.processes.start("broker/b2")
        await cluster.processes.start("shop/r2")
        healed = time.monotonic()
        await record.grows(acknowledged, 50, "writes after everything is back")
        if consistencies:
            await record.grows(reads, 3 * len(consistencies), "reads after everything is back")
        stop.set()
    return record, healed


@pytest.mark.parametrize(
    ("ack", "kills"),
    [
        ("logged", 1),
        pytest.param("logged", 3, marks=pytest.mark.long),
        pytest.param("local", 3, marks=pytest.mark.long),
    ],
)
async def test_a_primary_that_is_killed_under_forwarded_writes_loses_and_doubles_none(
    ack: str, kills: int, folder: Path
) -> None:
    keys = f'{POLICIES["primary-site"]}\nack = "{ack}"'
    async with running(folder, {"shop": keys}) as cluster, cluster.connect() as shop:
        await fill(shop)
        record, stop = Record(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number, site in enumerate(("r2", "r3", "r2", "r3")):
                group.create_task(write_until(cluster, site, number, stop, record))
            for _ in range(kills):
                await record.grows(acknowledged, 30, "writes before the primary is killed")
                await cluster.processes.kill("shop/r1")
                await record.grows(unknown, 1, "a writer noticing that the primary is gone")
                await cluster.processes.start("shop/r1")
            await record.grows(acknowledged, 30, "writes after the primary is back")
            stop.set()
        await shop.wait_in_sync(IN_SYNC_S)

        assert record.other == []
        await check_replicas(shop, record)
        await check_nothing_prepared(cluster)


def acknowledged(record: Record) -> int:
    return len(record.seen.told)


def noticed(record: Record) -> int:
    return record.noticed


def unknown(record: Record) -> int:
    return record.unknown


def reads(record: Record) -> int:
    return len(record.seen.seen)


async def check_replicas(shop: ReplicaSet, record: Record) -> None:
    accounts = await rows_everywhere(shop, "select id, owner, balance from accounts order by id")
    transfers = await rows_everywhere(shop, "select id, source, target, amount from transfers order by id")
    lists = await rows_everywhere(shop, "select key, items from lists order by key")
    for table in (accounts, transfers, lists):
        assert table["r1"] == table["r2"] == table["r3"]
    found = {row[0] for row in transfers["r1"]}
    assert record.acknowledged - found == set(), "acknowledged writes are lost"
    assert found & record.rejected.keys() == set(), "refused writes are there"
    expected = dict.fromkeys(range(ACCOUNTS), START)
    for _, source, target, amount in transfers["r1"]:
        expected[source] -= amount
        expected[target] += amount
    assert {row[0]: row[2] for row in accounts["r1"]} == expected, "a transfer was applied in part, or twice"


async def check_nothing_prepared(cluster: RunningCluster) -> None:
    """Asked of the servers with the agents' logins: those of clients may not look."""
    config = cluster.cluster.replica_set("shop")
    for replica in config.replica:
        logins = kept_logins(cluster.cluster.data_of(config, replica) / "postgres", "shop")
        assert logins is not None, f"the server of {replica.name} does not run"
        connection = await asyncpg.connect(logins.agent)
        try:
            left = await connection.fetch("select gid from pg_prepared_xacts")
        finally:
            await connection.close()
        assert left == [], f"{replica.name} still has prepared transactions"
