"""Writes past replication are rejected, or noticed within seconds, as the set says; replication itself goes on."""

import asyncio
import re
import time
from functools import partial
from pathlib import Path

import aiohttp
import asyncpg
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert
from adapters.embedded.free_ports import free_port
from adapters.postgres.access.guard_triggers import TRIGGER, remove_everything
from adapters.postgres.sql.logins import with_login
from replication import connect
from replication.http.agent import serve_agent
from replication.model.config import Cluster
from replication.replica.agent import Agent
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.clusters import SCHEMA, rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.command_line import tops_of
from tests.support.polling import eventually
from tops.server.broker import Broker

QUORUM = 'policy = "quorum"\nwrite_quorum = 2\ntables = "*"'
PARTS = """
create table parts (id int, day date, primary key (id, day)) partition by range (day);
create table parts_20 partition of parts for values from ('2020-01-01') to ('2021-01-01') partition by list (id);
create table parts_20_1 partition of parts_20 for values in (1);
"""
DIRECT = [
    "insert into accounts values (8, 'by hand', 8)",
    "update accounts set balance = 0",
    "delete from accounts",
    "truncate accounts",
    "copy accounts from program 'echo 9,by hand,9' csv",
    "insert into parts values (1, '2020-02-02')",
    "insert into parts_20 values (1, '2020-02-02')",
    "insert into parts_20_1 values (1, '2020-02-02')",
    "truncate parts_20_1",
    "with gone as (delete from accounts returning *) select count(*) from gone",
]


async def test_direct_writes_are_rejected_and_the_set_is_named(server: EmbeddedPostgres, folder: Path) -> None:
    keys = f'{QUORUM}\ndirect_writes = "reject"'
    async with small_cluster(server, folder, keys, schema=SCHEMA + PARTS) as cluster, cluster.connect() as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.execute("update accounts set balance = 2 where id = $1", 1)
        await shop.write([Insert("parts", {"id": 1, "day": "2020-03-03"})])

        for sql in DIRECT:
            with pytest.raises(asyncpg.PostgresError, match='belongs to the TOPS replica set "shop"') as rejected:
                await cluster.script("r2", sql)
            assert rejected.value.sqlstate == "25006", sql

        # The agent does not own the tables: what was set up for its login lets it switch the trigger to ALWAYS.
        for table in ("accounts", "parts", "parts_20_1"):
            with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
                await cluster.script("r2", f"set session_replication_role = replica; delete from {table}")
        await shop.wait_in_sync()
        rows = await rows_everywhere(shop, "select id, balance from accounts")
        assert set(map(tuple, rows.values())) == {((1, 2),)}


BYPASSES = """
create function bypasses(noticed int, unnoticed int) returns int language plpgsql security definer as $$ begin
    update accounts set balance = balance + 1 where id = noticed;
    set local session_replication_role = replica;
    update accounts set balance = balance + 1 where id = unnoticed;
    set local session_replication_role = origin;
    return 1; end $$;
"""


async def test_neither_a_former_origin_nor_a_function_without_triggers_passes_the_guard(
    server: EmbeddedPostgres, folder: Path
) -> None:
    keys = f'{QUORUM}\ndirect_writes = "reject"'
    async with small_cluster(server, folder, keys, schema=SCHEMA + BYPASSES) as cluster, cluster.connect() as shop:
        await shop.write([Insert("accounts", {"id": number, "balance": 1}) for number in (1, 2)])

        # An origin's session of before the server's restart, whose process id is another session's now.
        former = (
            "insert into tops.sessions values (pg_backend_pid(), now(), pg_postmaster_start_time() - interval '1 h')"
        )
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            await cluster.script("r2", f"{former}; delete from accounts")
        with pytest.raises(WriteRejected, match="while triggers are switched off") as rejected:
            await shop.execute("select bypasses(1, 2)")

        assert rejected.value.sqlstate == "0A000"
        rows = await rows_everywhere(shop, "select id, balance from accounts order by id")
        assert set(map(tuple, rows.values())) == {((1, 1), (2, 1))}


async def test_a_table_that_appears_is_guarded_soon(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, f'{QUORUM}\ndirect_writes = "reject"') as cluster:
        await cluster.script("r1", "create table fresh (id int primary key)")

        await eventually(partial(is_rejected, cluster, "r1", "insert into fresh values (1)"), 5.0, "the guard")


async def is_rejected(cluster: SmallCluster, replica: str, sql: str) -> bool:
    """Tried in a transaction that is rolled back."""
    try:
        await cluster.script(replica, f"begin; {sql}; rollback")
    except asyncpg.ReadOnlySQLTransactionError:
        return True
    return False


async def test_pgbench_into_one_replica_is_noticed_within_five_seconds(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, f'{QUORUM}\ndirect_writes = "warn"') as cluster, cluster.connect() as shop:
        assert [r["direct_writes"] for r in (await shop.status())["replicas"]] == [0, 0, 0]
        script = folder / "writes.sql"
        script.write_text("insert into lists values (:client_id, '') on conflict (key) do update set items = 'x';")
        began = time.monotonic()
        code = await pgbench(server, cluster.databases["r2"], script)

        async def noticed() -> bool:
            status = {r["replica"]: r for r in (await shop.status())["replicas"]}
            return "lists" in status["r2"]["warning"] and status["r2"]["direct_writes"] >= 40

        await eventually(noticed, 5.0, "the warning")
        assert time.monotonic() - began < 10.0
        assert code == 0
        status = {r["replica"]: r for r in (await shop.status())["replicas"]}
        assert "by postgres (pgbench)" in status["r2"]["warning"]
        assert (status["r1"]["direct_writes"], status["r1"]["warning"]) == (0, "")
        agent = cluster.agents["r2"]
        agent.replica = agent.replica.model_copy(update={"listen": f"127.0.0.1:{free_port()}"})
        async with serve_agent(agent), aiohttp.ClientSession() as session:
            async with session.get(f"http://{agent.replica.listen}/metrics") as response:
                assert 'tops_replica_direct_writes_total{replica="r2",replica_set="shop"}' in await response.text()


async def test_pgbench_into_one_replica_is_rejected(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, f'{QUORUM}\ndirect_writes = "reject"') as cluster:
        script = folder / "writes.sql"
        script.write_text("insert into lists values (:client_id, '');")

        code = await pgbench(server, cluster.databases["r2"], script)

        assert code == 2, "every client of pgbench was aborted by an error"
        assert await cluster.sql("r2", "select key from lists") == []


async def pgbench(server: EmbeddedPostgres, database: str, script: Path) -> int:
    process = await asyncio.create_subprocess_exec(
        str(server.binary("pgbench")), "-n", "-c", "4", "-t", "10", "-f", str(script), database,
        env={"PGHOST": "127.0.0.1", "PGPORT": str(server.port), "PGUSER": "postgres", "PGPASSWORD": server.password},
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    return await process.wait()


async def test_everything_that_was_put_into_a_database_can_be_taken_out(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, f'{QUORUM}\ndirect_writes = "reject"', schema=SCHEMA + PARTS) as cluster:
        await cluster.stop("r1", "r2", "r3")
        connection = await asyncpg.connect(server.dsn_for(cluster.databases["r1"]))
        try:
            await remove_everything(connection)

            left = await connection.fetch("select tgname from pg_trigger where tgname = $1", TRIGGER)
            assert (left, await connection.fetchval("select to_regnamespace('tops')")) == ([], None)
            await connection.execute("insert into accounts values (8, 'by hand', 8)")
        finally:
            await connection.close()


OWNED = """
create table accounts (id int primary key, owner text, balance bigint);
create table parts (id int, day date, primary key (id, day)) partition by range (day);
create table parts_20 partition of parts for values from ('2020-01-01') to ('2021-01-01');
alter table accounts owner to app; alter table parts owner to app; alter table parts_20 owner to app;
"""


@pytest.mark.parametrize("tables", ['"*"', '["accounts", "parts"]'])
async def test_a_server_that_was_set_up_by_the_printed_grants_is_guarded(folder: Path, tables: str) -> None:
    """The tables belong to the application's owner, and the agent's login has what was printed and no more."""
    async with EmbeddedPostgres() as server:
        dsns = [await plain_database(server, f"plain{number}") for number in (1, 2)]
        path = folder / "tops.toml"
        lines = [f'[cluster]\nname = "c"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./b1"']
        lines.append(f'[[replica_set]]\nname = "shop"\npolicy = "write-all"\ntables = {tables}')
        replica = '[[replica_set.replica]]\nname = "r{}"\nbroker = "b1"\ndsn = "{}"'
        path.write_text("\n".join(lines + [replica.format(number, dsn) for number, dsn in enumerate(dsns, 1)]))
        cluster = Cluster.load(path)
        code, printed, _ = await tops_of(cluster, "doctor", "shop", "--print-grants")
        assert code == 0
        given = []
        for number, part in enumerate(printed.split("-- Replica shop/")[1:], 1):
            required = re.sub(r"-- OPTIONAL\..*?-- END OF WHAT IS OPTIONAL\.", "", part.partition("\n")[2], flags=re.S)
            await script(dsns[number - 1], required)
            logins = {key: with_login(dsns[number - 1], user, "x") for key, user in LOGIN.findall(part)}
            await script(
                dsns[number - 1], "".join(f"alter role \"{user}\" password 'x';" for _, user in LOGIN.findall(part))
            )
            given.append("\n".join(f'{key} = "{dsn}"' for key, dsn in logins.items()))
        replica = '[[replica_set.replica]]\nname = "r{}"\nbroker = "b1"\n{}'
        path.write_text("\n".join(lines + [replica.format(number, keys) for number, keys in enumerate(given, 1)]))
        cluster = Cluster.load(path)

        async with (
            Broker.run(cluster.config, "b1"),
            Agent.open(cluster, "shop", "r1") as r1,
            Agent.open(cluster, "shop", "r2"),
            connect(cluster.urls(), "shop") as shop,
        ):
            await r1.wait_joined()
            await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
            await shop.write([Insert("parts", {"id": 1, "day": "2020-03-03"})])
            for table in ("accounts", "parts", "parts_20"):
                for how in ("", "set session_replication_role = replica;"):
                    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
                        await script(dsns[0], f"{how} delete from {table}")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await script(r1.database.dsn, "alter table accounts disable trigger tops_guard")


LOGIN = re.compile(r'--   (\w+) = "postgresql://([^:]+):')


async def plain_database(server: EmbeddedPostgres, name: str) -> str:
    await script(server.dsn, "do $$ begin create role app; exception when duplicate_object then end $$")
    connection = await asyncpg.connect(server.dsn)
    await connection.execute(f"create database {name}")
    await connection.close()
    await script(server.dsn_for(name), OWNED)
    return server.dsn_for(name)


async def script(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()
