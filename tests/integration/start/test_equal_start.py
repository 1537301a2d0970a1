"""A set begins only with equal data; until then nothing is accepted, and everybody is told why."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert
from adapters.embedded.free_ports import free_port
from replication.http.agent import serve_agent
from replication.replica.agent import Agent
from replication.replica.start.decisions import State
from replication.replica.start.record import StartRecord
from replication.rpc.rejections import NotStarted
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.command_line import tops_of
from tests.support.polling import eventually

QUORUM = 'policy = "quorum"\nwrite_quorum = 2'
POLICIES = [
    QUORUM,
    'policy = "write-all"',
    'policy = "serializable"',
    'policy = "peer-to-peer"',
    'policy = "primary-site"\nprimary = "r1"',
]
ROWS = "insert into accounts select i, 'before', i from generate_series(1, 1000) i"


async def reason_of(agent: Agent) -> str:
    return str((await agent.status())["not_started"])


async def says(cluster: SmallCluster, *parts: str, replicas: tuple[str, ...] = ("r1", "r2", "r3")) -> None:
    """Wait until all of these replicas give a reason with all of these parts."""
    last: dict[str, str] = {}

    async def told() -> bool:
        last.update({name: await reason_of(cluster.agents[name]) for name in replicas})
        return all(part in text for text in last.values() for part in parts)

    try:
        await eventually(told, 15.0)
    except AssertionError:
        raise AssertionError(f"{parts} are not in {last}") from None


async def joined(cluster: SmallCluster, *replicas: str) -> None:
    for name in replicas or tuple(cluster.databases):
        await cluster.agents[name].wait_joined()


async def prepared(cluster: SmallCluster, **scripts: str) -> None:
    for name, script in scripts.items():
        await cluster.script(name, script)


@pytest.mark.parametrize("keys", POLICIES)
async def test_rows_at_one_replica_alone_keep_the_set_from_starting(
    server: EmbeddedPostgres, folder: Path, keys: str
) -> None:
    async with small_cluster(server, folder, keys, running=False) as cluster:
        await prepared(cluster, r1=ROWS)
        await cluster.start("r1", "r2", "r3", joined=False)
        async with cluster.connect() as shop:
            with pytest.raises(NotStarted) as rejected:
                await shop.write([Insert("accounts", {"id": 5000, "balance": 1})])
            assert rejected.value.why == "not-started"
            await says(cluster, "table accounts has different numbers of rows: 1,000 on r1, 0 on r2, 0 on r3", "seed")
            with pytest.raises(NotStarted, match="1,000 on r1, 0 on r2, 0 on r3"):
                await shop.write([Insert("accounts", {"id": 5000, "balance": 1})])
            assert [r["in_sync"] for r in (await shop.status())["replicas"]] == [False] * 3

            await cluster.sql("r2", ROWS)
            await cluster.sql("r3", ROWS)
            await joined(cluster)
            await shop.write([Insert("accounts", {"id": 5000, "balance": 1})])
            await shop.wait_in_sync()

            counts = await rows_everywhere(shop, "select count(*), sum(balance) from accounts")
            assert set(map(tuple, counts.values())) == {((1001, 500501),)}


async def test_the_reason_is_on_the_command_line_and_in_the_readiness(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, f'{QUORUM}\ntables = "*"', running=False) as cluster:
        await prepared(cluster, r3="create table forgotten (id int primary key)")
        await cluster.start("r1", "r2", "r3", joined=False)
        await says(cluster, "table forgotten is missing on r1, r2 and exists on r3")
        agent = cluster.agents["r1"]
        agent.replica = agent.replica.model_copy(update={"listen": f"127.0.0.1:{free_port()}"})
        async with serve_agent(agent), aiohttp.ClientSession() as session:
            async with session.get(f"http://{agent.replica.listen}/readyz") as response:
                assert (response.status, "forgotten" in await response.text()) == (503, True)

        code, out, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
        assert (code, "r2: not started: the databases differ: table forgotten is missing" in out) == (1, True)
        code, _, err = await tops_of(
            cluster.cluster, "write", "shop", "--sql", "insert into accounts values (1, 'a', 1)"
        )
        assert (code, "not-started" in err, "forgotten" in err) == (1, True, True)

        await cluster.sql("r3", "drop table forgotten")
        await joined(cluster)


async def test_one_value_that_differs_is_found_and_trusted_clones_are_not_read(
    server: EmbeddedPostgres, folder: Path
) -> None:
    change = f"{ROWS}; update accounts set balance = 0 where id = 700"
    for keys in (QUORUM, f"{QUORUM}\ntrust_equal = true"):
        async with small_cluster(server, folder, keys, running=False) as cluster:
            await prepared(cluster, r1=ROWS, r2=change, r3=ROWS)
            await cluster.start("r1", "r2", "r3", joined=False)
            if "trust" in keys:
                await joined(cluster)
            else:
                await says(cluster, "different ones on r1, r3 and r2; the first difference is within keys 672 to 703")


async def test_a_replica_that_is_not_there_is_waited_for_and_named(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, QUORUM, running=False) as cluster:
        await cluster.start("r1", "r2", joined=False)
        await says(cluster, "no response from r3", replicas=("r1", "r2"))
        async with cluster.connect() as shop:
            with pytest.raises(NotStarted, match="no response from r3"):
                await shop.write([Insert("accounts", {"id": 1, "balance": 1})])

        await cluster.start("r3")
        await joined(cluster)


# ------------------------------------------------------------------------------------------------------------- crashes


async def state_of(cluster: SmallCluster, replica: str) -> Any:
    rows = await cluster.sql(replica, "select state from tops.start")
    return State(rows[0]["state"]) if rows else State.NEW


async def is_in(cluster: SmallCluster, replica: str, state: State) -> bool:
    return await state_of(cluster, replica) is state


@pytest.mark.parametrize("keys", [QUORUM, 'policy = "peer-to-peer"'])
async def test_a_replica_that_agreed_and_crashed_follows_the_log_of_those_who_went_on(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    started = StartRecord.started

    async def hang_at_r3(record: StartRecord, now: Any) -> Any:
        if cluster.databases["r3"] in record._dsn:
            await asyncio.Event().wait()  # until it is stopped: nothing more of it reaches the database
        return await started(record, now)

    async with small_cluster(server, folder, keys, running=False) as cluster:
        await prepared(cluster, r1=ROWS, r2=ROWS, r3=ROWS)
        monkeypatch.setattr(StartRecord, "started", hang_at_r3)
        await cluster.start("r1", "r2", "r3", joined=False)
        await joined(cluster, "r1", "r2")
        await cluster.stop("r3")
        assert await state_of(cluster, "r3") is State.AGREED
        async with cluster.connect(prefer="r1") as shop:
            await shop.write([Insert("accounts", {"id": 5000, "balance": 1})])
            monkeypatch.undo()
            await cluster.start("r3")
            await shop.wait_in_sync()

            counts = await rows_everywhere(shop, "select count(*), sum(balance) from accounts")
            assert set(map(tuple, counts.values())) == {((1001, 500501),)}


async def test_a_direct_write_while_agents_are_down_before_the_start_is_compared_again(
    server: EmbeddedPostgres, folder: Path
) -> None:
    keys = f'{QUORUM}\ndirect_writes = "reject"'
    async with small_cluster(server, folder, keys, running=False) as cluster:
        await cluster.start("r1", "r2", joined=False)
        await eventually(partial(is_in, cluster, "r1", State.COMPARED), what="the fingerprint of r1")
        await cluster.stop("r1", "r2")
        await cluster.sql("r1", "insert into accounts values (1, 'by hand', 1)")

        await cluster.start("r1", "r2", "r3", joined=False)
        await says(cluster, "1 on r1, 0 on r2, 0 on r3")

        await cluster.sql("r1", "delete from accounts")
        await joined(cluster)


async def test_a_database_that_is_lost_before_the_start_begins_anew_and_after_it_takes_a_copy(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, QUORUM, running=False) as cluster:
        await prepared(cluster, r1=ROWS, r2=ROWS, r3=ROWS)
        await cluster.start("r2", "r3", joined=False)
        await eventually(partial(is_in, cluster, "r3", State.COMPARED), what="the fingerprint of r3")
        await cluster.stop("r2", "r3")
        await cluster.lose_database("r3")
        await cluster.start("r1", "r2", "r3", joined=False)
        await says(cluster, "1,000 on r1, 1,000 on r2, 0 on r3")
        await cluster.sql("r3", ROWS)
        await joined(cluster)

        await cluster.stop("r3")
        await cluster.lose_database("r3")
        await cluster.start("r3")
        assert (await cluster.sql("r3", "select count(*) from accounts"))[0]["count"] == 1000
