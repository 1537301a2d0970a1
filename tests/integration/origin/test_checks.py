"""CHECK constraints whose functions look at other rows: PostgreSQL forbids that in words only, so they exist."""

from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from adapters.postgres.origin import Executed
from replication.rpc.rejections import WriteRejected
from tests.integration.origin.databases import OriginDatabase
from tests.integration.origin.policies import POLICIES
from tests.integration.origin.test_executed_once import all_equal
from tests.integration.replication.inprocess import small_cluster

SCHEMA = """
create table items (id int primary key, v text);
create function has_item(i int) returns boolean language plpgsql stable as
    $$ begin return i is null or exists (select from items where id = i); end $$;
create table lines (id int primary key, item int check (has_item(item)), u int unique);
create table steps (id int primary key, n int);
create function follows(i int, m int) returns boolean language plpgsql stable as
    $$ begin return m <= 1 + coalesce((select max(n) from steps where id <> i), 0); end $$;
alter table steps add check (follows(id, n));
insert into items values (1, 'a');
insert into lines values (1, 1, 1), (2, 1, 2);
insert into steps values (1, 1);
"""
TRANSACTIONS = {
    "an update looks at an insert": ["insert into items values (9)", "update lines set item = 9 where id = 1"],
    "an insert looks at an insert": ["insert into items values (9)", "insert into lines values (9, 9)"],
    "an insert looks at a later insert": [
        "insert into lines values (9, null)",
        "insert into items values (9)",
        "update lines set item = 9 where id = 9",
    ],
    "a row that was touched before": [
        "update lines set u = 7 where id = 1",
        "insert into items values (9)",
        "update lines set item = 9 where id = 1",
    ],
    "rows of one table": [
        "insert into steps values (3, 2)",
        "insert into steps values (2, 3)",
        "update steps set n = 4 where id = 1",
        "insert into steps values (4, 5)",
    ],
    "a unique value passes on": [
        "update lines set u = 7 where id = 1",
        "insert into lines values (9, 1, 1)",
        "update lines set item = 1 where id = 1",
    ],
}
ROWS = "select x::text from (table items) x union all select x::text from lines x union all select x::text from steps x"


@pytest.mark.parametrize("case", TRANSACTIONS)
async def test_rows_are_applied_in_the_order_in_which_checks_have_passed(
    database: OriginDatabase, plain: "asyncpg.Connection[asyncpg.Record]", case: str
) -> None:
    await database.begin(SCHEMA)
    done = await database.execute(*TRANSACTIONS[case])
    assert isinstance(done, Executed), done

    vote = await database.apply("checked", done)

    assert vote.excluded is None
    applied = await plain.fetch(f"{ROWS} order by 1")
    await plain.execute("truncate items, lines, steps")
    await plain.execute(SCHEMA[SCHEMA.index("insert into items") :])
    await plain.execute(";".join(TRANSACTIONS[case]))
    assert applied == await plain.fetch(f"{ROWS} order by 1")


@pytest.mark.parametrize("policy", ["write-all", "serializable", "peer-to-peer"])
async def test_rows_that_never_satisfy_their_check_again_are_rejected_for_good(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    """No other transaction is there: 40001 would send the client round and round."""
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        with pytest.raises(WriteRejected, match=r"check constraint lines_item_check of .* own row alone") as rejected:
            async with shop.transaction() as tx:
                await tx.execute("insert into items values (9, now()::text)")
                await tx.execute("insert into lines values (9, 9)")
                await tx.execute("delete from items where id = 9")

        assert rejected.value.sqlstate == "0A000"
        assert await all_equal(shop, "select id from lines order by id") == [(1,), (2,)]
