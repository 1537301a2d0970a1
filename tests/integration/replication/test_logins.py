"""Which logins a replica is served with: those of the file, checked, or none at all."""

import json
from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres, Logins, PostgresAdapter
from adapters.embedded.free_ports import free_port
from adapters.embedded.servers import kept_logins, logins_file
from adapters.postgres.sql.logins import Roles, user_of, with_login
from replication.model.config import HIDDEN, SUPERUSER_ACCEPTED, Cluster, login_keys
from replication.operations.doctor import Finding, examine
from replication.operations.login_grants import grants_text
from replication.replica.agent import Agent
from replication.replica.databases import ReplicaDatabase, given_logins
from tests.support.logins import PASSWORDS, logins_in
from tops.model.errors import ConfigError, TopsError

TABLES = "create table t (id serial primary key, v int); create table other (id int primary key)"


async def fresh(server: EmbeddedPostgres, name: str) -> str:
    connection = await asyncpg.connect(server.dsn)
    await connection.execute(f"drop database if exists {name} with (force)")
    await connection.execute(f"create database {name}")
    await connection.close()
    await run(server.dsn_for(name), TABLES)
    return name


async def run(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def cluster_with(folder: Path, replica: str, keys: str = "") -> Cluster:
    path = folder / "tops.toml"
    path.write_text(
        f'[cluster]\nname = "c"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./b1"\n'
        f'[[replica_set]]\nname = "shop"\npolicy = "write-all"\ntables = ["t"]\n{keys}\n'
        f'[[replica_set.replica]]\nname = "r1"\nbroker = "b1"\n{replica}\n'
    )
    return Cluster.load(path)


async def served(cluster: Cluster) -> Logins:
    shop = cluster.replica_set("shop")
    return await given_logins(shop, shop.replica[0])


async def found_by_doctor(cluster: Cluster) -> list[Finding]:
    return [f for f in await examine(cluster, cluster.replica_set("shop")) if "does not run" not in f.text]


async def test_a_superuser_serves_no_client_sql_unless_the_file_says_so(server: EmbeddedPostgres, folder: Path) -> None:
    dsn = server.dsn_for(await fresh(server, "alone"))
    logins = await logins_in(server, "alone", tables=["t"])
    mixed = f'dsn = "{dsn}"\nread_dsn = "{logins.read}"\nwrite_dsn = "{logins.write}"'
    as_reader = login_keys(logins).replace(logins.read, dsn)
    for replica in (f'dsn = "{dsn}"', mixed, as_reader):
        with pytest.raises(ConfigError, match=r"'postgres' is a superuser.*--print-grants"):
            await served(cluster_with(folder, replica))

    with pytest.raises(ConfigError, match=r"'postgres' is a superuser"):
        async with Agent.run(cluster_with(folder, f'dsn = "{dsn}"'), "shop", "r1"):
            pass

    accepted = cluster_with(folder, f'dsn = "{dsn}"', f'allow_superuser = "{SUPERUSER_ACCEPTED}"')
    assert (await served(accepted)).write_role is None
    with pytest.raises(ConfigError, match="says what it allows or nothing"):
        cluster_with(folder, f'dsn = "{dsn}"', 'allow_superuser = "yes"')


@pytest.mark.parametrize("power", ["createrole", "in role pg_read_server_files"])
async def test_a_login_that_could_become_a_superuser_is_none_the_better(
    server: EmbeddedPostgres, folder: Path, power: str
) -> None:
    name = await fresh(server, "strong")
    await run(server.dsn, f"drop role if exists strong; create role strong login password 'x' {power}")

    with pytest.raises(ConfigError, match=r"'strong' (may create roles|is a member of pg_read_server_files)"):
        await served(cluster_with(folder, f'dsn = "{server.dsn_for(name, user="strong", password="x")}"'))


async def test_missing_logins_are_named_with_what_to_run(server: EmbeddedPostgres, folder: Path) -> None:
    await fresh(server, "missing")
    logins = await logins_in(server, "missing", tables=["t"])

    with pytest.raises(ConfigError, match=r"read_dsn and write_dsn must be given.*tops doctor shop --print-grants"):
        await served(cluster_with(folder, f'dsn = "{logins.agent}"'))
    with pytest.raises(ConfigError, match="no member of the role"):
        replica = f'dsn = "{logins.check}"\nread_dsn = "{logins.read}"\nwrite_dsn = "{logins.write}"'
        await served(cluster_with(folder, replica))
    with pytest.raises(ConfigError, match="read_dsn belongs to a `dsn`"):
        cluster_with(folder, f'read_dsn = "{logins.read}"')


async def test_the_printed_grants_make_logins_that_doctor_finds_right(server: EmbeddedPostgres, folder: Path) -> None:
    name = await fresh(server, "printed")
    cluster = cluster_with(folder, f'dsn = "{server.dsn_for(name)}"')
    printed = "\n".join(grants_text(cluster.replica_set("shop")))
    assert server.password not in printed
    await run(server.dsn_for(name), printed)
    roles = Roles.named_for(name, "shop")
    users = (roles.agent, roles.read, roles.write, roles.check)
    for user, password in zip(users, PASSWORDS, strict=True):
        await run(server.dsn, f"alter role {user} password '{password}'")
    logins = Logins(*(with_login(server.dsn_for(name), u, p) for u, p in zip(users, PASSWORDS, strict=True)))

    async with PostgresAdapter(logins, cluster="c", replica_set="shop"):
        pass
    cluster = cluster_with(folder, login_keys(logins))
    assert await served(cluster) == logins
    assert [f.text for f in await found_by_doctor(cluster) if f.level == "error"] == []

    await run(server.dsn_for(name), f"grant delete on other to {roles.write}; revoke select on t from {roles.read}")
    await run(
        server.dsn_for(name),
        f"grant update on tops.position to {roles.read}; grant execute on function lo_creat to public",
    )
    # What the agent itself grants is fine for the write login, and for that one only.
    await run(
        server.dsn_for(name),
        f"create table tops.captured (id int); grant select on tops.captured to {roles.write}, {roles.read};"
        f"grant insert on tops.captured to {roles.write}",
    )
    errors = {f.text for f in await found_by_doctor(cluster) if f.level == "error"}
    assert {text for text in errors if "captured" in text} == {
        f"{roles.read} may select tops.captured, which it should not",
        f"{roles.write} may insert tops.captured, which it should not",
    }
    warnings = {f.text for f in await found_by_doctor(cluster) if f.level == "warning"}
    assert errors >= {
        f"{roles.write} may delete other, which it should not",
        f"{roles.read} may not select t",
        f"{roles.read} may update tops.position, which it should not",
    }
    assert any("lo_creat" in text for text in warnings)


async def test_two_sets_in_one_database_see_nothing_of_each_other(server: EmbeddedPostgres) -> None:
    await fresh(server, "shared")
    one = await logins_in(server, "shared", "one", ["t"])
    two = await logins_in(server, "shared", "two", ["other"])

    for logins, theirs in ((one, "other"), (two, "t")):
        async with PostgresAdapter(logins, cluster="c", replica_set=user_of(logins.agent)) as adapter:
            with pytest.raises(TopsError, match="permission denied"):
                await adapter.read(f"select * from {theirs}")


async def test_an_agent_that_may_make_the_tables_shares_them_with_its_clients(
    server: EmbeddedPostgres, folder: Path
) -> None:
    name = await fresh(server, "empty")
    await run(server.dsn_for(name), "drop table t, other")
    logins = await logins_in(server, name, tables=["t"])
    cluster = cluster_with(folder, login_keys(logins))
    database = ReplicaDatabase("c", cluster.replica_set("shop"), cluster.replica_set("shop").replica[0], folder)

    await database.set_up()
    with pytest.raises(ConfigError, match=r"the schema file fails.*permission denied"):
        await database.ensure_schema(f"{TABLES} -- both")
    await run(server.dsn_for(name), f"grant create, usage on schema public to {user_of(logins.agent)}")
    await run(server.dsn_for(name), f"grant usage on schema public to {user_of(logins.read)}, {user_of(logins.write)}")
    await database.ensure_schema(f"{TABLES} -- both")

    async with PostgresAdapter(database.logins, cluster="c", replica_set="shop") as adapter:
        assert (await adapter.read("select * from t")).rows == []
        with pytest.raises(TopsError, match="permission denied"):
            await adapter.read("select * from other")


async def test_an_embedded_server_keeps_its_logins_for_itself(folder: Path) -> None:
    data = folder / "postgres"
    async with EmbeddedPostgres(data) as server:
        await run(server.dsn, TABLES)
        logins = await server.provision("shop", ["t"])
        assert kept_logins(data, "shop") == logins
        assert logins_file(data).stat().st_mode & 0o777 == 0o600
        assert data not in logins_file(data).parents
    async with EmbeddedPostgres(data) as server:
        again = await server.provision("shop", ["t"])
        assert [dsn.split("@")[0] for dsn in (again.agent, again.check)] == [
            dsn.split("@")[0] for dsn in (logins.agent, logins.check)
        ]
    assert kept_logins(data, "shop") is None


def test_no_secret_of_a_replica_is_told(folder: Path) -> None:
    dsns = {key: f"postgresql://u:hidden-{key}@h/d" for key in ("dsn", "read_dsn", "write_dsn", "check_dsn")}
    cluster = cluster_with(folder, "\n".join(f'{key} = "{dsn}"' for key, dsn in dsns.items()))
    told = cluster.replica_set("shop").model_dump_json(by_alias=True, exclude=HIDDEN)

    assert "hidden-" not in told
    assert json.loads(told)["name"] == "shop"
    assert "hidden" not in repr(Logins(*dsns.values()))
