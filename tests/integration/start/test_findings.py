"""`tops doctor` and `tops rs validate` name what would go wrong before a set is started."""

from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.ports import free_port
from replication.config import Cluster
from replication.start.findings import of_file
from tests.integration.replication.test_administration import database_with, findings_about
from tests.integration.replication.test_command_line import tops
from tops.errors import ConfigError

GOOD = "create table parent (id int primary key); create table good (id int primary key, p int references parent);"
BAD = """
create unlogged table quick (id int primary key);
create table base (id int primary key); create table derived (extra int) inherits (base);
create table late (id int primary key deferrable, n int unique deferrable initially deferred);
create function f() returns trigger language plpgsql as 'begin return new; end';
create table noisy (id int primary key, at timestamptz check (at <= now()), n int check (n > 0));
create trigger loud before insert on noisy for each row execute function f();
alter table noisy enable always trigger loud;
create table keyless (id int);
create index on good (p);
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
        ("error", "r2", "table late: PRIMARY KEY (id) DEFERRABLE is checked at the end"),
        ("error", "r2", "noisy: CHECK ((at <= now())) depends on more than the row"),
        ("error", "r2", "table keyless has no primary key"),
        ("warning", "r2", "noisy has the trigger loud, which is ENABLE ALWAYS"),
        ("warning", "r1", "good: no index leads with the columns of FOREIGN KEY (p)"),
        ("warning", "", "write_quorum is 1"),
    ]:
        assert text in told.get((level, replica), ""), f"{level} {replica}: {text}: {told}"
    assert "good: no index" not in told[("warning", "r2")]
    assert "CHECK ((n > 0))" not in told[("error", "r2")]


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
        (("sqlite:///x.db", "sqlite:///x.db"), "database of replica 'r1'"),
    ],
)
def test_an_address_that_can_not_be_a_replica_is_an_error_of_the_file(
    folder: Path, dsns: tuple[str, ...], problem: str
) -> None:
    keys = 'policy = "peer-to-peer"'
    with pytest.raises(ConfigError, match=problem):
        Cluster.load(a_file(folder, *dsns, keys=keys))


def test_two_sockets_are_two_databases(folder: Path) -> None:
    sockets = ("postgresql://a@/db?host=/tmp/one", "postgresql://a@/db?host=/tmp/two")

    assert Cluster.load(a_file(folder, *sockets)).replica_sets[0].names == ["r1", "r2"]


async def test_validate_warns_about_what_a_file_permits(folder: Path) -> None:
    keys = 'policy = "quorum"\nwrite_quorum = 1\ndirect_writes = "allow"'
    cluster = Cluster.load(a_file(folder, "postgresql://a@h/one", "postgresql://a@h/two", keys=keys))

    code, out, _ = await tops(cluster, "rs", "validate")

    assert (code, out.count("shop: warning:")) == (0, 2)
    assert len(of_file(cluster.replica_set("shop"))) == 2
