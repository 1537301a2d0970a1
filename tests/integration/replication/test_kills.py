"""Every policy, in real processes: a replica and a broker are killed under load, and nothing is lost or doubled."""

import asyncio
from pathlib import Path

import pytest

from replication import ReplicaSet
from tests.integration.replication.clusters import RunningCluster, rows_everywhere, running
from tests.integration.replication.workloads import ACCOUNTS, START, Record, fill, settle_unknown, write_until

POLICIES = {
    "write-all": 'policy = "write-all"',
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "combined": 'policy = "combined"\nsync = ["r1", "r3"]',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "peer-to-peer": 'policy = "peer-to-peer"',
    "serializable": 'policy = "serializable"',
    "ordered": 'policy = "peer-to-peer"\norder = "ordered"',
}


@pytest.mark.parametrize("policy", POLICIES)
async def test_acknowledged_writes_survive_kills_and_replicas_end_equal(policy: str, folder: Path) -> None:
    async with running(folder, {"shop": POLICIES[policy]}) as cluster, cluster.connect() as shop:
        await fill(shop)
        record = await run_with_kills(cluster)
        await shop.wait_in_sync(30.0)
        await settle_unknown(cluster, record)
        await shop.wait_in_sync(30.0)

        assert record.other == []
        assert len(record.acknowledged) > 50
        await check_replicas(shop, record)
        await check_nothing_prepared(shop)


async def run_with_kills(cluster: RunningCluster) -> Record:
    record, stop = Record(), asyncio.Event()
    sites = cluster.cluster.replica_set("shop").names
    writers = [asyncio.ensure_future(write_until(cluster, site, stop, record)) for site in sites]
    await asyncio.sleep(2.0)
    await cluster.processes.kill("shop/r2")
    await asyncio.sleep(1.0)
    await cluster.processes.kill("broker/b2")
    await asyncio.sleep(1.5)
    await cluster.processes.start("broker/b2")
    await cluster.processes.start("shop/r2")
    await asyncio.sleep(4.0)
    stop.set()
    await asyncio.gather(*writers)
    return record


async def check_replicas(shop: ReplicaSet, record: Record) -> None:
    accounts = await rows_everywhere(shop, "select id, owner, balance from accounts order by id")
    transfers = await rows_everywhere(shop, "select id, source, target, amount from transfers order by id")
    assert accounts["r1"] == accounts["r2"] == accounts["r3"]
    assert transfers["r1"] == transfers["r2"] == transfers["r3"]
    found = {row[0] for row in transfers["r1"]}
    assert record.acknowledged - found == set(), "acknowledged writes are lost"
    assert found & record.refused.keys() == set(), "refused writes are there"
    expected = dict.fromkeys(range(ACCOUNTS), START)
    for _, source, target, amount in transfers["r1"]:
        expected[source] -= amount
        expected[target] += amount
    assert {row[0]: row[2] for row in accounts["r1"]} == expected, "a transfer was applied in part, or twice"


async def check_nothing_prepared(shop: ReplicaSet) -> None:
    for name in shop.config.names:
        left = await shop.fetch("select gid from pg_prepared_xacts", replica=name)
        assert left == [], f"{name} still holds promises"
