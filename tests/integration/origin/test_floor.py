"""An origin that is behind does not execute: 0 rows must mean that there was no row."""

from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Member, Statement, encode_member
from replication.replica.origin import executor
from replication.replica.origin.executor import OriginExecutor
from replication.rpc.calls import Execute
from tests.integration.origin.policies import POLICIES
from tests.integration.origin.test_executed_once import SCHEMA
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tops.model.errors import NotReachable
from tops.model.ids import TxId

TOUCH = Member(TxId(""), (Statement("update counters set touched = now() where id = 99"),))


async def behind(cluster: SmallCluster) -> OriginExecutor:
    """The executor of a replica that does not apply what the others have committed."""
    cluster.agents["r3"].participant.stop("paused by a test")
    async with cluster.connect(prefer="r1") as shop:
        await shop.execute("insert into counters (id, n) values (99, 0)")
    found = cluster.agents["r3"].executor
    assert found is not None
    return found


async def test_an_origin_that_is_behind_waits_and_then_rejects(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "FLOOR_S", 0.5)
    async with small_cluster(server, folder, POLICIES["quorum"], schema=SCHEMA) as cluster:
        late = await behind(cluster)

        with pytest.raises(NotReachable, match="did not reach"):
            await late.execute(Execute(tx="x.1.0000000001@r3", member=encode_member(TOUCH)), "client")

        cluster.agents["r3"].participant.resume()
        monkeypatch.setattr(executor, "FLOOR_S", 10.0)
        done = await late.execute(Execute(tx="x.1.0000000002@r3", member=encode_member(TOUCH)), "client")
        assert done.rows == (1,)


async def test_an_execution_waits_for_the_position_that_its_client_has_seen(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a set promises no reads of all that is committed, the token of the client is what holds it back."""
    monkeypatch.setattr(executor, "FLOOR_S", 0.5)
    async with small_cluster(server, folder, POLICIES["peer-to-peer"], schema=SCHEMA) as cluster:
        late = await behind(cluster)
        seen = cluster.agents["r3"].participant.reached + 1

        with pytest.raises(NotReachable, match="did not reach"):
            await late.execute(Execute(tx="x.1.0000000001@r3", member=encode_member(TOUCH), at_least=seen), "client")

        cluster.agents["r3"].participant.resume()
        monkeypatch.setattr(executor, "FLOOR_S", 10.0)
        again = Execute(tx="x.1.0000000002@r3", member=encode_member(TOUCH), at_least=seen)
        assert (await late.execute(again, "client")).rows == (1,)


async def test_without_the_floor_the_write_would_be_lost(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_floor(self: OriginExecutor) -> int:
        return 0

    monkeypatch.setattr(OriginExecutor, "_floor", no_floor)
    async with small_cluster(server, folder, POLICIES["quorum"], schema=SCHEMA) as cluster:
        late = await behind(cluster)

        done = await late.execute(Execute(tx="x.1.0000000001@r3", member=encode_member(TOUCH)), "client")

        assert done.rows == (0,)
        cluster.agents["r3"].participant.resume()
