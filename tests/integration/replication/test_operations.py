"""What an operator meets: new replicas, too few replicas, changes that can't be applied, status, pause."""

import asyncio
from functools import partial
from pathlib import Path

import asyncpg
import msgspec
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Update, Upsert
from adapters.resource import Epoch, Prepared
from replication import connect
from replication.replica.agent import complaint
from replication.replica.apply.participant import ReplicaParticipant
from replication.rpc.rejections import TooFewReplicas, WriteRejected
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import small_cluster
from tests.integration.replication.workloads import fill, transfer
from tests.support.command_line import tops_of
from tests.support.polling import eventually
from tops.core.overlay.topology import rendezvous_of
from tops.model.errors import OutcomeUnknown
from tops.model.ids import NodeId

HELD = """
select from pg_locks where relation = 'accounts'::regclass and pid <> pg_backend_pid()
   and database = (select oid from pg_database where datname = current_database())
"""


PREPARED = "select gid from pg_prepared_xacts where database = current_database()"


@pytest.mark.parametrize(
    "keys",
    ['policy = "quorum"\nwrite_quorum = 2', 'policy = "peer-to-peer"', 'policy = "primary-site"\nprimary = "r1"'],
)
async def test_a_new_replica_gets_a_copy_and_catches_up_while_writes_go_on(
    server: EmbeddedPostgres, folder: Path, keys: str
) -> None:
    async with small_cluster(server, folder, keys) as cluster, cluster.connect(prefer="r1") as shop:
        await fill(shop)
        for step in range(20):
            await transfer(shop, 1, step)
        await cluster.stop("r3")
        await cluster.lose_database("r3")
        stop = asyncio.Event()

        async def write() -> int:
            step = 0
            while not stop.is_set():
                step += 1
                await transfer(shop, 2, step)
            return step

        writing = asyncio.ensure_future(write())
        await cluster.start("r3")
        await shop.write([Update("accounts", {"id": 1}, {"owner": "while it catches up"})])
        stop.set()
        written = await writing
        await shop.wait_in_sync()

        transfers = await rows_everywhere(shop, "select id from transfers order by id")
        accounts = await rows_everywhere(shop, "select id, balance from accounts order by id")
        assert len(transfers["r3"]) == 20 + written
        assert transfers["r1"] == transfers["r3"]
        assert accounts["r1"] == accounts["r3"]


async def test_a_replica_that_was_not_there_when_the_log_began_is_not_made_from_the_log_alone(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"\nwrite_quorum = 2') as cluster:
        for replica in cluster.databases:
            await cluster.sql(replica, "insert into accounts values (7, 'from before', 7)")
        async with cluster.connect() as shop:
            await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await cluster.stop("r1", "r2", "r3")
        await cluster.lose_database("r3")

        await cluster.start("r3", joined=False)
        agent = cluster.agents["r3"]

        async def told() -> bool:
            return "the set's log is at index 1 and no replica that has followed it responds" in agent.not_started

        await eventually(told, what="the reason why r3 has not started")
        await cluster.start("r1", "r2")
        await agent.wait_joined()
        async with cluster.connect() as shop:
            await shop.wait_in_sync()
            assert await shop.fetchval("select balance from accounts where id = 7", replica="r3") == 7


@pytest.mark.parametrize(
    "keys", ['policy = "write-all"\non_failure = "degrade"', 'policy = "quorum"\nwrite_quorum = 2']
)
async def test_a_replica_that_stops_while_writes_go_on_leaves_no_locks_in_its_database(
    server: EmbeddedPostgres, folder: Path, keys: str
) -> None:
    async with small_cluster(server, folder, keys) as cluster, cluster.connect(prefer="r1") as shop:
        await fill(shop)
        stop, written = asyncio.Event(), 0

        async def write(writer: int) -> None:
            nonlocal written
            while not stop.is_set():
                await transfer(shop, writer, written)
                written += 1

        async def more_than(count: int) -> bool:
            return written > count

        writing = [asyncio.ensure_future(write(writer)) for writer in range(4)]
        left = []
        for _ in range(4):
            await eventually(partial(more_than, written + 20), what="writes")
            await cluster.stop("r3")
            left += await cluster.sql("r3", PREPARED)
            await cluster.start("r3")
            await shop.wait_in_sync()
        stop.set()
        await asyncio.gather(*writing)
        await shop.wait_in_sync()
        transfers = await rows_everywhere(shop, "select id from transfers order by id")

    assert left == []
    assert transfers["r1"] == transfers["r3"]


async def test_a_replica_that_stops_carries_out_a_new_attempt_at_what_it_has_promised(
    server: EmbeddedPostgres, folder: Path
) -> None:
    keys = 'policy = "write-all"'
    async with small_cluster(server, folder, keys) as cluster, cluster.connect(prefer="r1") as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await cluster.sql("r2", "insert into accounts values (7, 'only here', 7)")
        slow, third = cluster.agents["r1"].resource, cluster.agents["r3"].participant
        prepare, go_on = slow.prepare, asyncio.Event()

        async def prepare_later(epoch: Epoch) -> Prepared:
            await go_on.wait()
            return await prepare(epoch)

        slow.prepare = prepare_later  # type: ignore[method-assign]
        try:
            good, rejected = (
                asyncio.ensure_future(shop.write([Insert("accounts", {"id": key, "balance": 1})])) for key in (8, 7)
            )
            await eventually(partial(_has_promised, third), what="the promise of r3")
            stopping = asyncio.ensure_future(cluster.stop("r3"))
            await eventually(partial(_is_leaving, third), what="r3 leaving")
        finally:
            go_on.set()
        await stopping
        with pytest.raises(WriteRejected):
            await rejected
        await good
        assert await cluster.sql("r3", PREPARED) == []
        assert len(await cluster.sql("r3", "select from accounts where id = 8")) == 1


async def _has_promised(participant: ReplicaParticipant) -> bool:
    return bool(participant.prepared)


async def _is_leaving(participant: ReplicaParticipant) -> bool:
    return participant.leaving


async def test_a_replica_whose_next_entry_is_no_longer_kept_says_that_it_needs_a_copy(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"\nwrite_quorum = 2') as cluster:
        async with cluster.connect() as shop:
            await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
            await shop.wait_in_sync()
        old = cluster.agents["r3"]
        assert old.lag.told is not None
        assert complaint(await old.status()) == ""

        old.lag.told = msgspec.structs.replace(old.lag.told, oldest=old.participant.reached + 2)
        status = await old.status()

    assert not status["in_sync"]
    assert "empty its database" in complaint(status)


async def test_too_few_replicas_are_named_at_once_or_waited_for_or_done_without(
    server: EmbeddedPostgres, folder: Path
) -> None:
    change = [Upsert("accounts", {"id": 1}, {"balance": 1})]
    async with small_cluster(server, folder, 'policy = "write-all"') as cluster, cluster.connect() as shop:
        await cluster.stop("r2")
        with pytest.raises(TooFewReplicas, match="missing: r2"):
            await shop.write(change)

    keys = 'policy = "write-all"\non_failure = "block"\nblock_s = 30'
    async with small_cluster(server, folder, keys) as cluster, cluster.connect() as shop:
        await cluster.stop("r2")
        waiting = asyncio.ensure_future(shop.write(change))
        await cluster.start("r2")
        await waiting
        assert await shop.fetchval("select balance from accounts where id = 1", replica="r2", after=shop.token) == 1

    keys = 'policy = "write-all"\non_failure = "degrade"'
    async with small_cluster(server, folder, keys) as cluster, cluster.connect() as shop:
        await cluster.stop("r2")
        await shop.write(change)
        await cluster.start("r2")
        await shop.wait_in_sync()
        assert await shop.fetchval("select balance from accounts where id = 1", replica="r2") == 1


@pytest.mark.parametrize("reaction", ["stop", "skip", "set-aside"])
async def test_a_change_that_can_not_be_applied_does_what_the_set_says(
    server: EmbeddedPostgres, folder: Path, reaction: str
) -> None:
    keys = f'policy = "primary-site"\nprimary = "r1"\non_apply_error = "{reaction}"'
    async with small_cluster(server, folder, keys) as cluster, cluster.connect() as shop:
        await cluster.sql("r3", "insert into accounts values (1, 'in the way', 5)")
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.write([Insert("accounts", {"id": 2, "balance": 2})])

        async def reacted() -> bool:
            r3 = next(r for r in (await shop.status())["replicas"] if r["replica"] == "r3")
            if reaction == "stop":
                return "insert" in r3["stopped"] or "duplicate" in r3["stopped"] or "23505" in r3["stopped"]
            return bool(
                r3["quarantined"] == (reaction == "set-aside")
                and r3["conflicts"] == (reaction == "skip")
                and r3["in_sync"]
            )

        await eventually(reacted, what=reaction)
        if reaction == "stop":
            assert not await cluster.agents["r3"].healthy()
        else:
            assert await shop.fetchval("select balance from accounts where id = 2", replica="r3", after=shop.token) == 2
            _, out, err = await tops_of(cluster.cluster, "rs", "conflicts", "shop")
            kind = {"skip": "apply_error", "set-aside": "quarantined"}[reaction]
            assert (f"  r3  {kind}  " in out, "accounts_pkey" in out, "\n1 conflict\n" in out) == (True,) * 3, out + err
        await cluster.sql("r3", "delete from accounts where id = 1")
        if reaction == "stop":
            await shop.order("r3", "resume")
            await shop.wait_in_sync()
            assert await shop.fetchval("select balance from accounts where id = 1", replica="r3") == 1
        if reaction == "set-aside":
            assert "1 of 1" in await shop.order("r3", "retry")
            assert await shop.fetchval("select balance from accounts where id = 1", replica="r3") == 1


async def test_lag_is_zero_when_idle_and_rises_when_apply_or_the_link_stands_still(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"') as cluster, cluster.connect() as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
        await shop.wait_in_sync()
        assert all(r["lag_s"] == 0 and r["lag_transactions"] == 0 for r in (await shop.status())["replicas"])

        await shop.order("r3", "pause")
        for _ in range(5):
            await shop.write([Update("accounts", {"id": 1}, add={"balance": 1})])

        async def behind() -> bool:
            r3 = next(r for r in (await shop.status())["replicas"] if r["replica"] == "r3")
            return bool(r3["lag_s"] > 1.0 and r3["lag_transactions"] >= 5 and not r3["in_sync"] and r3["stopped"])

        await eventually(behind, what="r3 saying that it is behind, and why")
        await shop.order("r3", "resume")
        await shop.wait_in_sync()

        agent = cluster.agents["r1"]
        await cluster.stop_broker("b1")

        async def unlinked() -> bool:
            status = await agent.status()
            return bool(status["lag_s"] > 3.0 and not status["linked"] and not await agent.healthy())

        await eventually(unlinked, what="the lag rising while the coordinator is away")


@pytest.mark.parametrize("keys", ['policy = "quorum"', 'policy = "peer-to-peer"'])
async def test_a_replica_whose_database_is_away_says_so_also_on_an_idle_set(
    server: EmbeddedPostgres, folder: Path, keys: str
) -> None:
    async with small_cluster(server, folder, keys) as cluster, cluster.connect(prefer="r1") as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
        await shop.wait_in_sync()
        await allow_connections(server, cluster.databases["r3"], False)

        async def told() -> bool:
            r3 = next(r for r in (await shop.status())["replicas"] if r["replica"] == "r3")
            return bool(r3["last_error"] and not r3["in_sync"])

        await eventually(told, what="r3 saying that its database is away")
        assert not await cluster.agents["r3"].healthy()
        code, out, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
        assert (code, "r3: tried again: " in out) == (1, True), out
        await allow_connections(server, cluster.databases["r3"], True)
        await shop.wait_in_sync()
        assert await cluster.agents["r3"].healthy()


async def allow_connections(server: EmbeddedPostgres, database: str, allowed: bool) -> None:
    connection = await asyncpg.connect(server.dsn)
    try:
        await connection.execute(f'alter database "{database}" allow_connections {str(allowed).lower()}')
        if not allowed:
            await connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", database
            )
    finally:
        await connection.close()


async def test_the_lag_of_a_replica_that_can_not_be_asked_rises_all_the_same(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"') as cluster, cluster.connect() as shop:
        await shop.wait_in_sync()
        await cluster.stop("r3")

        async def behind() -> bool:
            r3 = next(r for r in (await shop.status(0.5))["replicas"] if r["replica"] == "r3")
            return bool(r3["unreachable"] and r3["lag_s"] > 3.0)

        await eventually(behind, what="the others telling how long r3 is away")


@pytest.mark.parametrize("ack", ["local", "logged"])
async def test_a_primary_acknowledges_before_or_after_its_write_is_in_the_log_as_the_set_says(
    server: EmbeddedPostgres, folder: Path, ack: str
) -> None:
    keys = f'policy = "primary-site"\nprimary = "r1"\nack = "{ack}"'
    async with small_cluster(server, folder, keys, brokers=2) as cluster:
        coordinator = rendezvous_of((NodeId("b1"), NodeId("b2")), "rs.shop")
        beside = next(r.name for r in cluster.cluster.replica_set("shop").replica if r.broker != coordinator)
        assert beside == "r1", "the primary is at the broker that stays"
        url = cluster.cluster.config.broker_named("b1").url
        async with connect(url, "shop", prefer="r1", timeout_s=2.0) as shop:
            await cluster.stop_broker(coordinator)
            if ack == "local":
                await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
            else:
                with pytest.raises(OutcomeUnknown) as unknown:
                    await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
            assert await cluster.sql("r1", "select balance from accounts") != []
            await cluster.start_broker(coordinator)
            await shop.wait_in_sync()
            assert ack == "local" or await shop.outcome(unknown.value.tx) == "committed"
            assert await shop.fetchval("select balance from accounts where id = 1", replica="r3") == 1


async def test_a_transaction_that_is_not_committed_yet_holds_up_nobody(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "write-all"') as cluster, cluster.connect() as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
        async with shop.transaction() as lunch:
            await lunch.update("accounts", key={"id": 1}, add={"balance": 10})
            for replica in cluster.databases:
                assert await cluster.sql(replica, HELD) == []
            await shop.write([Update("accounts", {"id": 1}, add={"balance": 1})])
        for replica in cluster.databases:
            assert await shop.fetchval("select balance from accounts where id = 1", replica=replica) == 11


@pytest.mark.parametrize("odd", [("r3",), ("r1", "r3")], ids="+".join)
@pytest.mark.parametrize(
    "keys", ['policy = "serializable"', 'policy = "peer-to-peer"\norder = "ordered"'], ids=["serializable", "ordered"]
)
async def test_a_replica_that_rejects_what_another_applies_stops_and_says_so(
    server: EmbeddedPostgres, folder: Path, keys: str, odd: tuple[str, ...]
) -> None:
    async with small_cluster(server, folder, keys) as cluster, cluster.connect(prefer="r2") as shop:
        for replica in odd:
            await cluster.script(replica, "alter table accounts add constraint only_here check (balance < 100)")
        await shop.write([Insert("accounts", {"id": 1, "balance": 500})])

        async def told() -> bool:
            status = {r["replica"]: r for r in (await shop.status())["replicas"]}
            return all(not status[r]["in_sync"] and "applied at" in status[r]["stopped"] for r in odd)

        await eventually(told, what=f"{odd} say that they differ")
        status = {r["replica"]: r["in_sync"] for r in (await shop.status())["replicas"]}
        assert [name for name, in_sync in status.items() if in_sync] == [r for r in cluster.databases if r not in odd]


async def test_what_every_replica_rejects_stops_none(server: EmbeddedPostgres, folder: Path) -> None:
    keys = 'policy = "peer-to-peer"\norder = "ordered"'
    async with small_cluster(server, folder, keys) as cluster, cluster.connect(prefer="r1") as shop:
        with pytest.raises(WriteRejected):
            await shop.write([Insert("accounts", {"id": 1, "balance": -500})])
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.wait_in_sync()

        for agent in cluster.agents.values():
            assert agent.errors.agreement is not None
            await eventually(agent.errors.agreement.is_idle, what="rejections are compared")
        assert all(replica["in_sync"] for replica in (await shop.status())["replicas"])
