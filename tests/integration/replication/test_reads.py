"""What a read promises, and what a client can rely on after a write."""

import asyncio
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Update, Upsert
from adapters.resource import Attempt
from replication.model.events import log_type
from replication.rpc.calls import ReplicaFailed
from replication.rpc.rejections import VersionConflict, WriteRejected
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.polling import eventually
from tops.model.errors import InvalidTransaction, NotReachable
from tops.model.log_points import LogPoint


@pytest.fixture(params=["direct", "through brokers"], autouse=True)
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything here holds over both roads that a read can take."""
    monkeypatch.setattr(SmallCluster, "connects_directly", request.param == "direct")
    monkeypatch.setattr(SmallCluster, "awaits_direct", True)
    return str(request.param)


BALANCE = "select balance from accounts where id = 1"
PROMISES = {
    'policy = "write-all"': ("any", "current", "quorum"),
    'policy = "quorum"': ("current", "quorum"),
    'policy = "combined"\nsync = ["r1", "r2"]': ("current", "quorum"),
    'policy = "primary-site"\nprimary = "r1"': ("primary",),
    'policy = "serializable"': ("current",),
    'policy = "peer-to-peer"\norder = "ordered"': ("current",),
}


@pytest.mark.parametrize("keys", PROMISES)
async def test_an_acknowledged_write_is_read_at_once_where_the_consistency_promises_it(
    server: EmbeddedPostgres, folder: Path, keys: str
) -> None:
    async with (
        small_cluster(server, folder, keys) as cluster,
        cluster.connect(prefer="r3") as reader,
        cluster.connect(prefer="r1") as writer,
    ):
        for number in range(1, 8):
            done = await writer.write([Upsert("accounts", {"id": 1}, {"balance": number})])
            for consistency in PROMISES[keys]:
                found = await reader.fetchval(BALANCE, consistency=consistency)
                assert found == number, f"{consistency} read {found} after {number} was acknowledged"
            for replica in cluster.databases:
                after = await reader.fetchval(
                    "select balance from accounts where id = 1", replica=replica, after=done.token
                )
                assert after == number, f"{replica} did not wait for the token"


async def test_a_token_of_a_write_that_is_not_in_the_log_yet_binds_a_read_to_its_replica(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with (
        small_cluster(server, folder, 'policy = "peer-to-peer"') as cluster,
        cluster.connect(prefer="r3") as reader,
        cluster.connect(prefer="r1") as writer,
    ):
        for number in range(1, 8):
            done = await writer.write([Upsert("accounts", {"id": 1}, {"balance": number})])
            read = await reader.read(BALANCE, after=done.token)
            assert (read.replica, read.rows) == ("r1", [{"balance": number}])
        with pytest.raises(InvalidTransaction, match="read it at r1"):
            await reader.read(BALANCE, after=done.token, replica="r2")


async def test_a_read_whose_question_was_lost_with_a_link_is_asked_for_again(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"') as cluster, cluster.connect(direct=False) as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        bundles, lost = shop._caller._bundles, list[str]()
        publish = bundles._publish

        async def lose_the_first(to: str, body: bytes) -> None:
            if lost:
                await publish(to, body)
            else:
                lost.append(to)

        monkeypatch.setattr(bundles, "_publish", lose_the_first)

        assert await shop.fetchval(BALANCE, replica="r1", after=shop.token) == 1
        assert lost == [cluster.cluster.replica_set("shop").site_of("r1")]


async def test_a_replica_that_was_cut_off_never_serves_a_stale_current_read(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with (
        small_cluster(server, folder, 'policy = "quorum"\nwrite_quorum = 2') as cluster,
        cluster.connect(prefer="r3") as shop,
    ):
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.wait_in_sync()  # two of three have it: r3, which is to show it, may be the third
        await shop.order("r3", "pause")
        await shop.write([Upsert("accounts", {"id": 1}, {"balance": 2})])

        assert await shop.fetchval("select balance from accounts where id = 1", replica="r3") == 1
        for consistency in ("current", "quorum"):
            found = await shop.fetchval(
                "select balance from accounts where id = 1", consistency=consistency, wait_s=1.0
            )
            assert found == 2
        with pytest.raises(NotReachable, match="did not reach"):
            await shop.fetch("select 1", consistency="current", replica="r3", wait_s=2.0)


async def test_a_replica_that_has_not_finished_an_acknowledged_write_does_not_answer_as_if_it_had_not_happened(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "write-all"') as cluster, cluster.connect(prefer="r3") as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        resource = cluster.agents["r3"].resource
        commit, free = resource.commit, asyncio.Event()

        async def slow_commit(attempt: Attempt) -> LogPoint:
            await free.wait()
            return await commit(attempt)

        resource.commit = slow_commit  # type: ignore[method-assign]
        done = await shop.write([Update("accounts", {"id": 1}, {"balance": 2})])
        assert done.pending == ("r3",)

        with pytest.raises(NotReachable, match="did not reach"):
            await shop.fetch(BALANCE, replica="r3", wait_s=2.0)
        assert await shop.fetchval(BALANCE, wait_s=5.0) == 2
        free.set()
        assert await shop.fetchval(BALANCE, replica="r3") == 2


async def test_the_same_idempotency_key_writes_once_and_refuses_other_content(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "write-all"') as cluster, cluster.connect() as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
        change = [Update("accounts", {"id": 1}, add={"balance": 5})]

        first, *others = await asyncio.gather(*(shop.write(change, idempotency_key="k1") for _ in range(5)))

        assert await shop.fetchval("select balance from accounts where id = 1", consistency="current") == 5
        assert {r.tx for r in (first, *others)} == {first.tx if not first.duplicate else others[0].tx}
        with pytest.raises(WriteRejected, match="other content"):
            await shop.write([Update("accounts", {"id": 1}, add={"balance": 6})], idempotency_key="k1")


async def test_an_expected_version_guards_a_row(server: EmbeddedPostgres, folder: Path) -> None:
    keys = 'policy = "quorum"\nversioned = ["accounts"]'
    async with small_cluster(server, folder, keys) as cluster, cluster.connect() as shop:
        created = await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        version = created.position
        await shop.write([Update("accounts", {"id": 1}, {"balance": 2}, expect_version=version)])

        with pytest.raises(VersionConflict):
            await shop.write([Update("accounts", {"id": 1}, {"balance": 3}, expect_version=version)])

        assert await shop.fetchval("select balance from accounts where id = 1", consistency="current") == 2


async def test_values_arrive_as_the_types_that_the_database_has(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "write-all"') as cluster, cluster.connect() as shop:
        row = await shop.fetchrow(
            "select 1.50::numeric a, '2024-02-29'::date b, timestamptz '2024-01-01 00:00:00+00' c, "
            "interval '90 minutes' d, 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid e, array[1,2] f, null g"
        )

        assert row is not None
        assert row["a"] == Decimal("1.50")
        assert row["b"] == date(2024, 2, 29)
        assert row["c"] == datetime.fromisoformat("2024-01-01T00:00:00+00:00")
        assert row["d"] == timedelta(minutes=90)
        assert row["e"] == UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")
        assert row["f"] == [1, 2]
        assert row["g"] is None


async def test_a_read_that_the_policy_can_not_promise_is_refused(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "peer-to-peer"') as cluster, cluster.connect() as shop:
        with pytest.raises(InvalidTransaction, match="can't promise 'current'"):
            await shop.fetch("select 1", consistency="current")


async def test_a_lost_answer_is_unknown_and_can_be_asked_about(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "write-all"') as cluster, cluster.connect() as shop:
        done = await shop.write([Insert("accounts", {"id": 1, "balance": 1})])

        assert await shop.outcome(done.tx) == "committed"
        assert await shop.outcome("client-nobody.1.1") == "aborted"


async def test_an_answer_that_is_too_long_to_be_sent_is_refused_and_not_waited_for(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"', replicas=2) as cluster, cluster.connect() as shop:
        with pytest.raises(ReplicaFailed, match=r"the result is larger than 4 MiB: add LIMIT"):
            await shop.fetchval("select repeat('x', 9000000)")
        assert await shop.fetchval("select 1") == 1


async def test_a_current_read_does_not_wait_for_a_replica_that_is_gone(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"') as cluster, cluster.connect(prefer="r3") as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        other = cluster.agents["r1"].site
        await cluster.stop("r3")

        async def is_gone() -> bool:
            told = await other.get_log_state(log_type("shop"))
            return shop.config.site_of("r3") not in {f.name for f in told.followers if f.present}

        await eventually(is_gone, what="the loss of r3")
        async with asyncio.timeout(3.0):
            assert await shop.fetchval(BALANCE, consistency="current") == 1


async def test_a_materialized_view_is_read_only_at_a_replica_that_the_client_names(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "write-all"') as cluster, cluster.connect() as shop:
        for replica in cluster.databases:
            await cluster.script(
                replica,
                "create materialized view counted as select count(*) as n from accounts;"
                "create view shown as select * from counted; grant select on counted, shown to public;",
            )
        await shop.write([Insert("accounts", {"id": 71, "balance": 1})])
        await cluster.script("r2", "refresh materialized view counted")

        for sql in ("select n from counted", "select n from public.counted", "select * from shown"):
            with pytest.raises(ReplicaFailed, match="counted is a materialized view, which is not replicated") as told:
                await shop.fetch(sql)
            assert "--replica" in str(told.value)
        first, second = [await shop.fetchval("select n from shown", replica=name) for name in ("r1", "r2")]
        assert second == first + 1
        assert await shop.fetchval("with counted as (select 3 as n) select n from counted") == 3
