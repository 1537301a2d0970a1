"""The prepared check of a table's stamp: it costs no look at the catalogue, and it misses no change."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from adapters import PostgresAdapter
from adapters.postgres.sql.sqlstates import WRONG_COUNT
from adapters.postgres.sql.stamps import expect_sql, read_stamps
from tests.contract.harness import PostgresDatabase

CHANGES = [
    "alter table acct add column more int",
    "alter table acct add column made int generated always as (1) stored",
    "alter table acct alter column bal set default 7",
    "alter table acct alter column bal type numeric",
    "alter table acct alter column bal drop not null",
    "alter table acct add check (bal < 1000000)",
    "alter table acct add foreign key (id) references acct (id)",
    "create index on acct (bal)",
    "create unique index concurrently on acct (bal, id)",
    "create trigger noting before update on acct for each row execute function suppress_redundant_updates_trigger()",
    "create rule noting as on delete to acct do also nothing",
]


async def prepare_check(connection: asyncpg.Connection) -> None:
    oid = await connection.fetchval("select 'acct'::regclass::oid")
    stamp = (await read_stamps(connection, [oid]))[oid]
    await connection.execute(f"prepare unchanged as {expect_sql(oid, 'acct', stamp)}")
    await connection.execute("execute unchanged; execute unchanged")


async def is_rejected(connection: asyncpg.Connection) -> bool:
    try:
        await connection.execute("execute unchanged")
    except asyncpg.PostgresError as error:
        return error.sqlstate == WRONG_COUNT
    return False


@pytest.fixture
async def two(database: PostgresDatabase, adapter: PostgresAdapter) -> AsyncIterator[list[asyncpg.Connection]]:
    """One connection that checks, and one that changes the table."""
    connections = [await asyncpg.connect(database.dsn) for _ in range(2)]
    try:
        await prepare_check(connections[0])
        yield connections
    finally:
        for connection in connections:
            await connection.close()


@pytest.mark.parametrize("change", CHANGES)
async def test_every_change_of_a_definition_fails_the_check(two: list[asyncpg.Connection], change: str) -> None:
    checking, changing = two
    assert not await is_rejected(checking)

    await changing.execute(change)

    assert await is_rejected(checking)
    assert await is_rejected(checking)  # and it stays so


async def test_changes_of_rows_and_of_other_tables_do_not_fail_the_check(two: list[asyncpg.Connection]) -> None:
    checking, changing = two
    await changing.execute("create table other (id int primary key); alter table other add column more int")
    await changing.execute("update acct set bal = bal + 1")
    await changing.execute("vacuum analyze acct")

    assert not await is_rejected(checking)


async def test_the_check_sees_a_change_that_commits_after_its_statement_began(two: list[asyncpg.Connection]) -> None:
    """The statement's snapshot is older than the change; the plan that it makes then would be kept."""
    checking, changing = two
    await changing.execute("begin; alter table acct alter column bal set default 8")
    waiting = asyncio.ensure_future(is_rejected(checking))
    while not await changing.fetchval(
        "select pg_sleep(0.01), exists (select from pg_locks where not granted)", column=1
    ):
        pass
    await changing.execute("commit")

    assert await waiting
    assert await is_rejected(checking)


async def test_the_check_reads_no_catalogue_while_nothing_changes(two: list[asyncpg.Connection]) -> None:
    checking, _ = two
    plan = await checking.fetch("explain (costs off) execute unchanged")

    assert not [line for (line,) in plan if "expect_stamp" in line]  # its result is a part of the plan
