"""`tops doctor` and `tops rs validate` name what would go wrong before a set is started."""

from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from adapters.embedded.free_ports import free_port
from replication.model.config import Cluster
from replication.operations.doctor import examine
from replication.operations.findings import of_file
from tests.integration.replication.test_administration import database_with, findings_about
from tests.integration.start.seeding import seeded_set
from tests.support.command_line import tops_of
from tops.model.errors import ConfigError

GOOD = "create table parent (id int primary key); create table good (id int primary key, p int references parent);"
BAD = """
create unlogged table quick (id int primary key);
create table base (id int primary key); create table derived (extra int) inherits (base);
create table guarded (id int primary key); alter table guarded enable row level security;
create table typed (id int primary key, of_type regclass);
create function f() returns trigger language plpgsql as 'begin return new; end';
create table noisy (id int primary key, at timestamptz check (at <= now()), n int check (n > 0));
create trigger loud before insert on noisy for each row execute function f();
alter table noisy enable always trigger loud;
create table keyless (id int);
create index on good (p);
create function shifty(int) returns boolean language sql volatile as 'select $1 > random()';
create domain recent as timestamptz check (value <= clock_timestamp());
create table "Odd.Name" (id int primary key, "N" int check (shifty("N")), at recent);
create foreign data wrapper other; create server elsewhere foreign data wrapper other;
create foreign table remote (id int) server elsewhere;
"""


async def test_doctor_names_every_table_that_can_not_be_replicated(server: EmbeddedPostgres, folder: Path) -> None:
    dsns = {
        "r1": await database_with(server, "found1", GOOD),
        "r2": await database_with(server, "found2", GOOD + BAD),
    }

    found = await findings_about(folder, dsns, 'policy = "quorum"\nwrite_quorum = 1\ntables = "*"')

    told = {
        (f.level, f.replica): " | ".join(g.text for g in found if (g.level, g.replica) == (f.level, f.replica))
        for f in found
    }
    for level, replica, text in [
        ("error", "r1", "table quick is missing, and exists on r2"),
        ("error", "r2", "table quick is unlogged"),
        ("error", "r2", "table base inherits, or is inherited from"),
        ("error", "r2", "table derived inherits, or is inherited from"),
        ("error", "r2", "table guarded has row security: a change of it that has to be executed once is rejected"),
        ("error", "r2", "table typed has a column of_type of type regclass"),
        ("error", "r2", "noisy: CHECK ((at <= now())) depends on more than the row"),
        ("error", "r2", "table keyless has no primary key"),
        ("error", "r2", 'CHECK (shifty("N")) depends on more than the row'),
        ("error", "r2", "CHECK ((VALUE <= clock_timestamp())) of domain recent depends on more than the row"),
        ("warning", "r2", "remote is a foreign table: it is no part of the set"),
        ("warning", "r2", "client SQL has the agent's login"),
        ("warning", "r2", "noisy has the trigger loud, which is ENABLE ALWAYS"),
        ("warning", "r1", "good: no index leads with the columns of FOREIGN KEY (p)"),
        ("warning", "", "write_quorum is 1"),
    ]:
        assert text in told.get((level, replica), ""), f"{level} {replica}: {text}: {told}"
    assert "good: no index" not in told[("warning", "r2")]
    assert "CHECK ((n > 0))" not in told[("error", "r2")]
    assert "Odd.Name" not in " ".join(f.text for f in found if "does not exist" in f.text)


async def test_doctor_names_a_foreign_table_that_a_set_lists(server: EmbeddedPostgres, folder: Path) -> None:
    schema = """create foreign data wrapper other; create server elsewhere foreign data wrapper other;
        create foreign table remote (id int) server elsewhere;"""
    dsn = await database_with(server, "found3", schema)

    found = await findings_about(folder, {"r1": dsn}, 'policy = "quorum"\ntables = ["remote"]')

    assert any(f.level == "error" and "remote is a foreign table" in f.text for f in found)


async def test_doctor_tells_who_else_uses_the_agents_login(server: EmbeddedPostgres, folder: Path) -> None:
    dsn = await database_with(server, "found4", GOOD)
    application = await asyncpg.connect(dsn, server_settings={"application_name": "billing"})
    try:
        found = await findings_about(folder, {"r1": dsn}, 'policy = "quorum"\ntables = "*"')
    finally:
        await application.close()

    assert any("the agent's login is also used by billing" in f.text for f in found if f.level == "warning")


async def test_doctor_says_that_an_sqlite_file_is_not_compared(server: EmbeddedPostgres, folder: Path) -> None:
    dsn = await database_with(server, "found5", GOOD)
    dsns = {"r1": dsn, "r2": f"sqlite://{folder}/r2.db"}

    found = await findings_about(folder, dsns, 'policy = "primary-site"\nprimary = "r1"\ntables = "*"')

    assert any(f.replica == "r2" and "not compared with the others when the set starts" in f.text for f in found)


async def test_doctor_looks_into_embedded_servers_that_run(folder: Path) -> None:
    async with seeded_set(folder, 'policy = "quorum"\nwrite_quorum = 2\ntables = "*"', replicas=2) as seeded:
        await seeded.before("r2", "create table forgotten (id int primary key);")
        stopped = await examine(seeded.cluster, seeded.cluster.replica_set("shop"))
        await seeded.start("r1", "r2")

        found = await examine(seeded.cluster, seeded.cluster.replica_set("shop"))

    assert any(f.replica == "r1, r2" and "does not run" in f.text for f in stopped)
    assert any(f.replica == "r1" and "table forgotten is missing, and exists on r2" in f.text for f in found)


def a_file(folder: Path, *dsns: str, keys: str = 'policy = "quorum"') -> Path:
    lines = [f'[cluster]\nname = "c"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./b1"']
    lines.append(f'[[replica_set]]\nname = "shop"\n{keys}')
    for number, dsn in enumerate(dsns, 1):
        lines.append(f'[[replica_set.replica]]\nname = "r{number}"\nbroker = "b1"\ndsn = "{dsn}"')
    path = folder / "tops.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("dsns", "problem"),
    [
        (("postgresql://a@h/db", "postgresql://b:x@H:5432/db"), "database of replica 'r1'"),
        (("mysql://a@h/db",), "'mysql' is no database that can be a replica"),
        (("postgresql://a@h/db", "sqlite:///x.db", "sqlite:///x.db"), "database of replica 'r2'"),
    ],
)
def test_an_address_that_can_not_be_a_replica_is_an_error_of_the_file(
    folder: Path, dsns: tuple[str, ...], problem: str
) -> None:
    keys = 'policy = "primary-site"\nprimary = "r1"'
    with pytest.raises(ConfigError, match=problem):
        Cluster.load(a_file(folder, *dsns, keys=keys))


def test_two_sockets_are_two_databases(folder: Path) -> None:
    sockets = ("postgresql://a@/db?host=/tmp/one", "postgresql://a@/db?host=/tmp/two")

    assert Cluster.load(a_file(folder, *sockets)).replica_sets[0].names == ["r1", "r2"]


async def test_validate_warns_about_what_a_file_permits(folder: Path) -> None:
    keys = 'policy = "quorum"\nwrite_quorum = 1\ndirect_writes = "allow"'
    cluster = Cluster.load(a_file(folder, "postgresql://a@h/one", "postgresql://a@h/two", keys=keys))

    code, out, _ = await tops_of(cluster, "rs", "validate")

    assert (code, out.count("shop: warning:")) == (0, 2)
    assert len(of_file(cluster.replica_set("shop"))) == 2
