"""An agent that can't go on: it leaves its set, its status says why, and it does not look healthy."""

import asyncio
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Upsert
from replication.cli import replica
from replication.conflicts.tables import CLOCKS, WRITE_SETS
from replication.model.events import log_type
from replication.operations.doctor import examine
from replication.replica.agent import complaint
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.command_line import started, tops_of
from tests.support.polling import eventually
from tops.model.errors import NotReachable, TopsError

MEMBERS = {"shop/r1", "shop/r2"}  # without the one that failed
SERIALIZABLE, PEERS = 'policy = "serializable"', 'policy = "peer-to-peer"'
DAMAGE = {
    # A record that can't be decoded, and a table that is not what the agent made.
    SERIALIZABLE: (
        f"insert into {WRITE_SETS} values (99, 'x')",
        "internal-error",
    ),
    PEERS: (f"alter table {CLOCKS} rename column clock to time", "resource-error"),
}


async def damaged(cluster: SmallCluster, policy: str) -> str:
    """The third replica is stopped, and what its agent keeps in the database is damaged; the code of its failure."""
    async with cluster.connect(prefer="r1") as shop:
        await shop.write([Upsert("accounts", {"id": 1}, {"balance": 1})])
        await shop.wait_in_sync()
    sql, code = DAMAGE[policy]
    await cluster.stop("r3")
    await cluster.script("r3", sql)
    return code


@pytest.mark.parametrize("policy", DAMAGE)
async def test_the_status_of_an_agent_that_failed_has_the_code_and_the_reason(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with small_cluster(server, folder, policy) as cluster:
        code = await damaged(cluster, policy)
        await cluster.start("r3", joined=False)
        agent = cluster.agents["r3"]
        (ended,) = await asyncio.gather(agent.wait(), return_exceptions=True)

        status = await agent.status()
        assert status["failure_code"] == code
        assert complaint(status).startswith(f"not started: serves no longer ({code}): ")
        assert str(ended) in complaint(status)
        assert not await agent.healthy()
        shown = await tops_of(cluster.cluster, "rs", "status", "shop")
        assert shown[0] == 1
        assert f"r3: not started: serves no longer ({code}): " in shown[1]
        async with cluster.connect(prefer="r1") as shop:
            await shop.write([Upsert("accounts", {"id": 1}, {"balance": 2})])
            with pytest.raises(NotReachable, match=rf"replica r3 serves no longer \({code}\)"):
                await shop.fetch("select * from accounts", replica="r3")
        found = await examine(cluster.cluster, cluster.cluster.replica_sets[0])
        assert any(f.level == "error" and f.replica == "r3" and code in f.text for f in found)


async def test_a_task_that_dies_after_the_start_ends_the_service_of_the_replica(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"\nwrite_quorum = 2') as cluster:
        agent = cluster.agents["r3"]

        async def broken() -> None:
            raise RuntimeError("out of order")

        agent._spawn(broken())
        with pytest.raises(RuntimeError, match="out of order"):
            await agent.wait()

        status = await agent.status()
        assert (status["failure_code"], status["in_sync"]) == ("internal-error", False)
        assert complaint(status) == "serves no longer (internal-error): RuntimeError: out of order"
        async with cluster.connect(prefer="r1") as shop:
            await shop.write([Upsert("accounts", {"id": 1}, {"balance": 2})])

            async def has_left() -> bool:
                told = await cluster.agents["r1"].site.get_log_state(log_type("shop"))
                present = {follower.name for follower in told.followers if follower.present}
                return (set(told.in_sync), present) == (MEMBERS, MEMBERS)

            await eventually(has_left, what="the coordinator going on without it")


async def test_the_process_of_a_failed_agent_tells_why_and_ends(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, SERIALIZABLE) as cluster:
        await damaged(cluster, SERIALIZABLE)
        process = await started("replica", "run", "--name", "r3", "-c", str(cluster.cluster.path))
        try:

            async def told() -> bool:
                _, out, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
                return "r3: not started: serves no longer (internal-error): " in out

            await eventually(told, what="the status with the reason")
        finally:
            process.terminate()
            _, err = await process.communicate()
        assert b"replica stopped serving" in err


async def test_an_agent_that_failed_ends_with_its_error_so_that_it_is_started_again(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "FAILED_S", 0.0)
    async with small_cluster(server, folder, PEERS) as cluster:
        await damaged(cluster, PEERS)

        with pytest.raises(TopsError, match="clock"):
            await replica._serve(cluster.cluster, "shop", "r3", {})
