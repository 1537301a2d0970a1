"""Databases that a DBA gives to a set: what `tops doctor` prints, what it finds then, and a seed taken there."""

from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg

from adapters import EmbeddedPostgres
from adapters.embedded.free_ports import free_port
from adapters.postgres.sql.logins import Roles
from replication.model.config import Cluster
from replication.operations.doctor import Finding, examine
from replication.operations.login_grants import grants_text
from replication.replica.agent import Agent
from tests.support.polling import eventually
from tops.server.broker import Broker

COPIES = "-- FOR COPIES AND SCHEMA FILES ONLY."
SCHEMA = """
create schema archive;
create table events (id int, at date, primary key (id, at)) partition by range (at);
create table events_2024 partition of events for values from ('2024-01-01') to ('2025-01-01');
create table archive.old (id int primary key);
create table "Users" (id int primary key);
create view recent as select * from events where at > '2024-06-01';
create view newest as select max(at) as at from recent;
create materialized view counted as select count(*) as n from events;
create foreign data wrapper other; create server elsewhere foreign data wrapper other;
create foreign table remote (id int) server elsewhere;
insert into events select i, '2024-07-01' from generate_series(1, 100) i;
"""
KEYS = 'policy = "write-all"\ntables = "*"\nseed = "d1"'


async def run(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def made(server: EmbeddedPostgres, *names: str) -> None:
    """Empty databases, of a server where nobody has made the logins of a set in them."""
    for name in names:
        await run(server.dsn, f"drop database if exists {name} with (force)")
        await run(server.dsn, f"create database {name}")


def cluster_of(server: EmbeddedPostgres, folder: Path, databases: list[str], keys: str) -> Cluster:
    lines = [f'[cluster]\nname = "c"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./b1"']
    lines.append(f'[[replica_set]]\nname = "shop"\n{keys}')
    for number, database in enumerate(databases, 1):
        roles = Roles.named_for(database, "shop")
        users = {"dsn": roles.agent, "read_dsn": roles.read, "write_dsn": roles.write, "check_dsn": roles.check}
        dsns = [f'{key} = "{server.dsn_for(database, user=user, password="pw")}"' for key, user in users.items()]
        lines.append(f'[[replica_set.replica]]\nname = "d{number}"\nbroker = "b1"\n' + "\n".join(dsns))
    path = folder / "tops.toml"
    path.write_text("\n".join(lines))
    return Cluster.load(path)


async def grant(server: EmbeddedPostgres, cluster: Cluster, databases: list[str], *, copies: bool) -> None:
    """Run what is printed, as a DBA does: in each database its part, and the passwords; without what is optional."""
    printed = "\n".join(grants_text(cluster.replica_set("shop")))
    parts = printed.split("-- Replica shop/")[1:]
    for database, part in zip(databases, parts, strict=True):
        before, _, rest = part.partition("-- OPTIONAL.")
        always, _, for_copies = before.partition(COPIES)
        assert rest
        assert for_copies or not copies
        await run(server.dsn_for(database), f"-- {always}\n-- {for_copies if copies else None}")
        roles = Roles.named_for(database, "shop")
        for user in (roles.agent, roles.read, roles.write, roles.check):
            await run(server.dsn, f"alter role {user} password 'pw'")


async def found(cluster: Cluster) -> list[Finding]:
    return await examine(cluster, cluster.replica_set("shop"))


async def errors(cluster: Cluster) -> list[Finding]:
    return [f for f in await found(cluster) if f.level == "error"]


async def test_doctor_names_the_grants_where_no_login_exists(server: EmbeddedPostgres, folder: Path) -> None:
    await made(server, "unmade")
    cluster = cluster_of(server, folder, ["unmade"], 'policy = "write-all"\ntables = "*"')

    (problem,) = await errors(cluster)

    assert "does not exist" in problem.text or "password authentication failed" in problem.text
    assert "tops doctor shop --print-grants" in problem.remedy


async def test_doctor_accepts_what_the_printed_grants_give_on_partitions_and_views(
    server: EmbeddedPostgres, folder: Path
) -> None:
    await made(server, "granted")
    await run(server.dsn_for("granted"), SCHEMA)
    cluster = cluster_of(server, folder, ["granted"], 'policy = "write-all"\ntables = "*"')
    await grant(server, cluster, ["granted"], copies=False)
    assert await errors(cluster) == []

    # A list names the tables: a view over them is theirs, too, and others are not.
    await made(server, "listed")
    await run(server.dsn_for("listed"), SCHEMA)
    cluster = cluster_of(server, folder, ["listed"], 'policy = "write-all"\ntables = ["events"]')
    await grant(server, cluster, ["listed"], copies=False)
    assert await errors(cluster) == []
    roles = Roles.named_for("listed", "shop")
    await run(server.dsn_for("listed"), f"grant select on recent, newest, events_2024, archive.old to {roles.read}")
    await run(server.dsn_for("listed"), "create view mixed as select id from events union select id from archive.old")
    await run(server.dsn_for("listed"), f"grant select on mixed to {roles.read}")
    assert {f.text for f in await errors(cluster)} == {
        f"{roles.read} may select archive.old, which it should not",
        f"{roles.read} may select mixed, which it should not",
    }


async def test_a_seed_is_taken_with_the_rights_that_are_printed_for_copies(
    server: EmbeddedPostgres, folder: Path
) -> None:
    databases = ["seeded1", "seeded2"]
    await made(server, *databases)
    await run(server.dsn_for("seeded1"), SCHEMA.replace("create foreign", "-- create foreign"))
    cluster = cluster_of(server, folder, databases, KEYS)
    await grant(server, cluster, databases, copies=False)
    agent = Roles.named_for("seeded2", "shop").agent

    (problem,) = await errors(cluster)
    assert problem.replica == "d2"
    assert "may not create schemas in database seeded2" in problem.text
    assert "tops doctor shop --print-grants" in problem.remedy
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(Broker.run(cluster.config, "b1"))
        agents = [await stack.enter_async_context(Agent.open(cluster, "shop", name)) for name in ("d1", "d2")]

        async def names(right: str) -> bool:
            reason = agents[1].not_started
            return right in reason and "tops doctor shop --print-grants" in reason

        await eventually(lambda: names(f'grant create on database "seeded2" to "{agent}"'), 30.0, "the first right")
        await run(server.dsn_for("seeded2"), f"grant create on database seeded2 to {agent}")
        await eventually(lambda: names(f'grant create on schema public to "{agent}"'), 30.0, "the second right")

        await grant(server, cluster, databases, copies=True)
        for one in agents:
            await one.wait_joined()
        told = await found(cluster)
        assert [f for f in told if f.level == "error"] == []
        views = [f for f in told if "counted is a materialized view: it is not replicated" in f.text]
        assert [(f.level, f.replica) for f in views] == [("warning", "d1"), ("warning", "d2")]
        await run(server.dsn_for("seeded2"), "do $$ begin assert (select n from counted) = 100; end $$")


async def test_doctor_tells_what_a_seed_brings_as_information(server: EmbeddedPostgres, folder: Path) -> None:
    databases = ["whole", "bare", "rowless", "partial_one"]
    await made(server, *databases)
    plain = "create table a (id int primary key); create table b (id int primary key);"
    await run(server.dsn_for("whole"), f"{plain} insert into a values (1)")
    await run(server.dsn_for("rowless"), plain)
    await run(server.dsn_for("partial_one"), "create table a (id int primary key)")
    for tables in ('"*"', '["a", "b"]'):
        keys = f'policy = "write-all"\ntables = {tables}\nseed = "d1"'
        cluster = cluster_of(server, folder, databases, keys)
        await grant(server, cluster, databases, copies=True)

        told = await found(cluster)

        problems = [f for f in told if f.level == "error"]
        assert {f.replica for f in problems} == {"d4"}
        assert any("table b is missing" in f.text or "table b does not exist" in f.text for f in problems)
        seeded = {f.replica: f.text for f in told if f.level == "ok" and "d1" in f.text}
        assert seeded == {
            "d2": "it has none of the set's tables: it takes schema and rows from d1",
            "d3": "its tables are empty: it takes the rows from d1",
        }
