"""A set that is not as it should be: the status, the doctor and the exit code say so, with what to do."""

import json
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Member, encode_member, known_by_id, pack_members
from replication.model.config import Cluster
from replication.operations.doctor import examine
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.integration.time_travel.machine import TimeMachine
from tests.support.command_line import tops_of
from tests.support.polling import eventually
from tops.model.errors import NotReachable
from tops.model.ids import TxId

SCHEMA = "create table notes (id int primary key, text text not null); create table t (id int primary key, v int);"
PEERS, QUORUM = 'policy = "peer-to-peer"', 'policy = "quorum"\nwrite_quorum = 2'
PRIMARY = 'policy = "primary-site"\nprimary = "r1"\nack = '


async def left_by_an_earlier_version(cluster: SmallCluster) -> None:
    """The first replica holds a row that was committed without a look at its length, and the record to publish it."""
    await cluster.stop("r1")
    rows = [Insert("notes", {"id": number, "text": "x" * 1_000_000}) for number in range(1, 10)]
    long = known_by_id(Member(TxId(""), tuple(rows)), TxId("c.1.1"))
    packed = pack_members([encode_member(long)]).hex()
    await cluster.script(
        "r1",
        "insert into notes select number, repeat('x', 1000000) from generate_series(1, 9) number;"
        "insert into tops.outbox (replica_set, id, size, members) values "
        f"('shop', nextval('tops.outbox_ids'), 1, decode('{packed}', 'hex'))",
    )
    await cluster.start("r1")


@pytest.mark.parametrize("policy", [PEERS, f'{PRIMARY}"local"'])
async def test_a_record_that_can_not_be_published_is_named_and_can_be_quarantined(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with small_cluster(server, folder, policy, schema=SCHEMA) as cluster:
        await left_by_an_earlier_version(cluster)
        async with cluster.connect(prefer="r1") as shop:
            await shop.write([Insert("t", {"id": 1, "v": 1})])

            async def says_so() -> bool:
                r1, r2, _ = (await shop.status())["replicas"]
                return "tops rs quarantine shop --replica r1" in r1["stopped"] and r2["lag_transactions"] == 2

            await eventually(says_so, what="the reason in the status, and the lag of the others")
            r1, r2, r3 = (await shop.status())["replicas"]
            assert (r1["failure_code"], r1["unpublished"]) == ("unpublishable", 2)
            assert [(r["in_sync"], r["lag_transactions"], r["lag_network"]) for r in (r2, r3)] == [(False, 2, 2)] * 2
            assert r2["lag_s"] > 0
            assert not await cluster.agents["r1"].healthy()
            found = await examine(cluster.cluster, cluster.cluster.replica_sets[0])
            assert any(f.level == "error" and "tops rs quarantine shop --replica r1" in f.remedy for f in found)
            code, out, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
            assert (code, "transaction c.1.1 is committed here and can't be published" in out) == (1, True)

            code, out, err = await tops_of(cluster.cluster, "rs", "quarantine", "shop", "--replica", "r1")
            assert (code, "tops divergence check" in out) == (0, True), err

            async def all_have_it() -> bool:
                return all(rows == [(1,)] for rows in (await rows_everywhere(shop, "select count(*) from t")).values())

            await eventually(all_have_it, what="what was behind it at all replicas")
        await cluster.stop("r1")
        await cluster.start("r1")
        code, out, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
        assert (code, "r1: differs from the others (notes: a transaction of this replica was quar" in out) == (1, True)
        assert (await cluster.sql("r1", "select size from tops.quarantined"))[0]["size"] == 1

        runs = str(folder / "runs")
        code, said, err = await tops_of(cluster.cluster, "divergence", "check", "shop", "--out", runs)
        assert code == 1, said + err
        by = ("--by", "primary", "--primary", "r1", "--execute")
        code, said, err = await tops_of(cluster.cluster, "divergence", "repair", "shop", "--out", runs, *by)
        assert code == 0, said + err
        code, said, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
        assert code == 0, said


async def test_a_primary_that_waits_for_the_log_takes_no_write_that_would_wait_in_vain(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, f'{PRIMARY}"logged"', schema=SCHEMA) as cluster:
        await left_by_an_earlier_version(cluster)
        agent = cluster.agents["r1"]

        async def is_stuck() -> bool:
            return "can't be published" in (await agent.status())["stopped"]

        await eventually(is_stuck)
        async with cluster.connect() as shop:
            with pytest.raises(WriteRejected, match="can't be published"):
                await shop.write([Insert("t", {"id": 1, "v": 1})])
        assert await cluster.sql("r1", "select * from t") == []


async def test_writes_that_wait_for_the_log_are_lag_of_all_other_replicas(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, PEERS, schema=SCHEMA) as cluster, cluster.connect(prefer="r1") as shop:
        writes = cluster.agents["r1"].writes
        assert writes is not None
        writes.publisher.resumed.clear()
        for number in range(1, 4):
            await shop.write([Insert("t", {"id": number, "v": 1})])

        shown = {r["replica"]: (r["in_sync"], r["lag_transactions"]) for r in (await shop.status())["replicas"]}
        code, _, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
        writes.publisher.resumed.set()
        await shop.wait_in_sync()

        assert (shown["r2"], shown["r3"], code) == ((False, 3), (False, 3), 1)
        assert (await tops_of(cluster.cluster, "rs", "status", "shop"))[0] == 0


async def test_a_replica_that_comes_back_ahead_of_the_log_says_so_serves_nobody_and_follows_after_a_copy(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, QUORUM) as cluster:
        machine = TimeMachine(cluster)
        try:
            await machine.write(3)
            journal = await machine.copy_journal("b1")
            old = {name: await machine.copy_database(name) for name in ("r1", "r2")}
            await machine.write(4)
            await cluster.stop("r1", "r2", "r3")
            await machine.restore_journal("b1", journal)
            for name, copy in old.items():
                await machine.restore_database(name, copy)
            await cluster.start("r1", "r2")

            async def writes() -> bool:
                await machine.write(1)
                return True

            await eventually(writes, 60.0, what="a write without the third replica")
            await machine.write(5)
            await cluster.start("r3")

            async def says_so() -> bool:
                _, out, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
                return "r3: stopped: the database holds" in out and "empty its database" in out

            await eventually(says_so, what="the reason in the status")
            assert not await cluster.agents["r3"].healthy()
            found = await examine(cluster.cluster, cluster.cluster.replica_sets[0])
            assert any(f.level == "error" and f.replica == "r3" and "empty its database" in f.remedy for f in found)
            async with cluster.connect() as shop:
                with pytest.raises(NotReachable, match="takes no part"):
                    await shop.fetch("select * from accounts", replica="r3")
                assert (await shop.read("select count(*) from accounts")).replica in ("r1", "r2")

            await machine.copied_anew("r3")

            async with cluster.connect() as shop:
                await shop.wait_in_sync(30.0)
                found_rows = await rows_everywhere(shop, "select id from accounts order by id")
            assert found_rows["r3"] == found_rows["r1"]
        finally:
            await machine.close()


async def test_a_replica_of_the_file_that_the_running_set_does_not_have_is_shown(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, QUORUM) as cluster:
        path = cluster.cluster.path.with_name("new.toml")
        path.write_text(cluster.cluster.path.read_text() + '\n[[replica_set.replica]]\nname = "r4"\nbroker = "b1"')
        code, out, err = await tops_of(Cluster.load(path), "rs", "status", "shop")
        assert (code, "r4: not in the running set: " in out, "tops rs apply shop" in out) == (1, True, True), err
        code, out, _ = await tops_of(Cluster.load(path), "rs", "status", "shop", "--format", "json")
        assert [r["replica"] for r in json.loads(out)[0]["replicas"]] == ["r1", "r2", "r3", "r4"]


async def test_what_a_check_finds_stays_in_the_status_until_a_repair(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, QUORUM) as cluster:
        async with cluster.connect() as shop:
            await shop.write([Insert("accounts", {"id": n, "balance": n}) for n in range(1, 6)])
            await shop.wait_in_sync()
        await cluster.sql("r3", "update accounts set balance = 99 where id = 3")
        out = str(folder / "runs")
        code, said, err = await tops_of(cluster.cluster, "divergence", "check", "shop", "--out", out)
        assert code == 1, said + err

        async def shown() -> str:
            code, said, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
            return f"{code} {said}"

        before = await shown()
        await cluster.stop("r3")
        await cluster.start("r3")
        await eventually(lambda: _has(shown, "r3: differs from the others (accounts: 1 differing row(s))"))
        found = await examine(cluster.cluster, cluster.cluster.replica_sets[0])
        code, said, err = await tops_of(cluster.cluster, "divergence", "repair", "shop", "--out", out, "--execute")
        assert code == 0, said + err

        assert before.startswith("1 ") and "r3: differs from the others (accounts: 1 differing row(s))" in before
        assert any(f.level == "error" and f.replica == "r3" and "tops divergence repair" in f.remedy for f in found)
        await eventually(lambda: _has(shown, "0 "))


async def _has(shown, text: str) -> bool:  # type: ignore[no-untyped-def]
    return text in await shown()
