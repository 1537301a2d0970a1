"""What a serializable transaction depends on is what it has read, however the query was written."""

import asyncio
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Change, Delete, Insert, Member, Statement, Update
from replication import ReplicaSet
from replication.client.transaction import Transaction
from replication.replica.apply.certification import WriteSets
from replication.replica.origin.submission import Submission, Submitted
from replication.rpc.rejections import SerializationFailure, WriteRejected
from tests.integration.replication.clusters import SCHEMA
from tests.integration.replication.inprocess import small_cluster

WIDER = f"""{SCHEMA}
create table prices (key numeric primary key, value int not null);
create view filled as select * from lists where items <> '';
create table shelves (id int primary key);
create table books (id int primary key, shelf int references shelves on delete cascade);
create function longest() returns int language sql stable as 'select max(length(items)) from lists';
create function longest_beside(prices) returns int language sql stable as 'select max(length(items)) from lists';
create function nothing_like(int, int) returns boolean language sql stable as 'select count(*) > $1 + $2 from lists';
create operator !~~~ (leftarg = int, rightarg = int, function = nothing_like);
create table codes (id varchar(3) primary key, v text not null default '');
create table parted (id int primary key, v text not null default '') partition by range (id);
create table part partition of parted for values from (0) to (100);
drop schema if exists archive cascade; create schema archive;
create table archive.lists (key int primary key, items text not null default '');
"""
Read = tuple[str, tuple[Any, ...]]
ROW: Read = ("select items from lists where key = $1", (1,))
PRICE: Read = ("select value from prices where key = $1", (Decimal("1.5"),))
OTHER = Update("lists", {"key": 1}, {"items": "x"})
BROKEN: dict[str, tuple[Read, Change]] = {
    "a row": (ROW, OTHER),
    "a row under its schema's name": (ROW, Update("public.lists", {"key": 1}, {"items": "y"})),
    "a row that a statement changes": (ROW, Statement("update lists set items = 'z' where key = 1")),
    "a row that is not there yet": ((ROW[0], (77,)), Insert("lists", {"key": 77})),
    "a table": (("select count(*) from lists", ()), Insert("lists", {"key": 78})),
    "a view": (("select count(*) from filled", ()), OTHER),
    "a view beside another table": (("select count(*) from prices, filled", ()), OTHER),
    "a function among the columns": (("select longest(), value from prices where key = $1", PRICE[1]), OTHER),
    "a subquery among the columns": (
        ("select value, (select max(items) from lists) from prices where key = $1", PRICE[1]),
        OTHER,
    ),
    "a row that goes with another": (("select shelf from books where id = $1", (1,)), Delete("shelves", {"id": 1})),
    "a table whose name is written as code points": (('select count(*) from U&"\\006Cists" as prices', ()), OTHER),
    "a table of which another schema has one as well": (ROW, Update("public.lists", {"key": 1}, {"items": "w"})),
    "a query that a function is given as text": (
        ("select value, (select count(*) from ts_stat('select to_tsvector(items) from l' || 'ists')) from prices", ()),
        OTHER,
    ),
    "a function that looks like a column": (("select prices.longest_beside from prices", ()), OTHER),
    "an operator": (("select value !~~~ 5 from prices", ()), OTHER),
    "a partition": (("select count(*) from part", ()), Insert("parted", {"id": 1})),
    "a row of a partitioned table": (("select v from parted where id = $1", (2,)), Insert("part", {"id": 2})),
    "a row whose key loses its blanks": (
        ("select v from codes where id = $1", ("abc",)),
        Insert("codes", {"id": "abc  "}),
    ),
    "a WITH query with the name of a table": (
        ("with prices as (select * from lists) select count(*) from prices", ()),
        OTHER,
    ),
    "a column by the name of the key": (
        ("select items from lists as l (items, key) where key = $1", ("",)),
        Update("lists", {"key": 2}, {"items": ""}),
    ),
    "a key of several spellings": (PRICE, Update("prices", {"key": Decimal("1.50")}, {"value": 2})),
}


async def read_then_write(shop: ReplicaSet, another: ReplicaSet, read: Read, change: Change) -> None:
    """A transaction that reads, is overtaken by somebody else's change, and commits a write of its own."""
    async with shop.transaction() as tx:
        await tx.fetch(read[0], *read[1])
        await another.write([change])
        await tx.update("accounts", key={"id": 1}, add={"balance": 1})


async def test_whoever_read_what_was_changed_is_refused_however_it_was_read(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with (
        small_cluster(server, folder, 'policy = "serializable"', schema=WIDER) as cluster,
        cluster.connect(prefer="r1") as shop,
        cluster.connect(prefer="r2") as another,
    ):
        await shop.write(
            [Insert("accounts", {"id": 1, "balance": 0}), Insert("prices", {"key": Decimal("1.5"), "value": 1})]
        )
        await shop.write([Insert("lists", {"key": key}) for key in (1, 2)])
        await shop.write([Insert("shelves", {"id": 1}), Insert("books", {"id": 1, "shelf": 1})])

        passed = []
        for name, (read, change) in BROKEN.items():
            try:
                await read_then_write(shop, another, read, change)
                passed.append(name)
            except SerializationFailure:
                await shop.wait_in_sync()
        await read_then_write(shop, another, (ROW[0], (2,)), OTHER)

        assert passed == []
        assert await shop.fetchval("select balance from accounts where id = 1", consistency="current") == 1


SHIPPED = {
    "code points and an alias": """update U&"\\006Cists" as prices set items = 'a' where prices.key = 1""",
    "another table in a comment": "update lists /* prices */ set items = 'b' where key = 1 -- accounts",
    "a schema": "update public.lists set items = 'accounts' where key = 1",
    "a data-modifying WITH query": "with prices as (update lists set items = 'c' where key = 1 returning 1) select 1",
}


async def test_what_a_logged_statement_changes_is_read_as_postgresql_reads_it(
    server: EmbeddedPostgres, folder: Path
) -> None:
    """Clients have statements executed once; one that was written by hand may log them as they are."""
    async with (
        small_cluster(server, folder, 'policy = "serializable"', schema=WIDER) as cluster,
        cluster.connect(prefer="r1") as shop,
        cluster.connect(prefer="r2") as another,
    ):
        await shop.write([Insert("accounts", {"id": 1, "balance": 0}), Insert("lists", {"key": 1})])
        another._writer._ships_statements = True

        passed = []
        for name, sql in SHIPPED.items():
            try:
                await read_then_write(shop, another, ROW, Statement(sql))
                passed.append(name)
            except SerializationFailure:
                await shop.wait_in_sync()

        assert passed == []
        await read_then_write(shop, another, ROW, Statement("update prices set value = 1 /* lists */ where key = 1"))


async def test_a_change_that_no_replica_can_carry_out_is_refused_and_holds_up_nobody(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "serializable"') as cluster, cluster.connect() as shop:
        with pytest.raises(WriteRejected):
            await shop.write([Insert("no_such_table", {"id": 1})])
        await shop.write([Insert("accounts", {"id": 1, "balance": 5})])

        await shop.wait_in_sync()
        balances = [await cluster.sql(name, "select balance from accounts") for name in ("r1", "r2", "r3")]
        assert [[tuple(row) for row in rows] for rows in balances] == [[(5,)]] * 3


async def test_of_transactions_that_read_the_same_and_arrive_together_one_commits(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "serializable"') as cluster, cluster.connect() as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
        everybody_has_read = asyncio.Barrier(4)

        async def increment() -> None:
            async with shop.transaction() as tx:
                (row,) = await tx.fetch("select balance from accounts where id = $1", 1)
                await tx.update("accounts", key={"id": 1}, values={"balance": row["balance"] + 1})
                await everybody_has_read.wait()

        ended = await asyncio.gather(*(increment() for _ in range(4)), return_exceptions=True)

        assert sorted(type(e).__name__ for e in ended) == ["NoneType", *["SerializationFailure"] * 3]
        assert await shop.fetchval("select balance from accounts where id = 1", consistency="current") == 1


async def test_work_that_lost_against_others_is_run_again_until_its_last_try(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "serializable"') as cluster, cluster.connect() as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
        attempts = 0

        async def increment(tx: Transaction) -> int:
            nonlocal attempts
            attempts += 1
            (row,) = await tx.fetch("select balance from accounts where id = $1", 1)
            if attempts <= 2:  # another client changes what was read
                await shop.write([Update("accounts", {"id": 1}, {"balance": 10 * attempts})])
            await tx.update("accounts", key={"id": 1}, values={"balance": row["balance"] + 1})
            return attempts

        assert await shop.run(increment) == 3
        assert await shop.fetchval("select balance from accounts where id = 1", consistency="current") == 21

        attempts = 0
        with pytest.raises(SerializationFailure):
            await shop.run(increment, tries=2)
        assert await shop.fetchval("select balance from accounts where id = 1", consistency="current") == 20


async def test_a_replica_that_was_restarted_judges_as_before(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "serializable"') as cluster, cluster.connect() as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 0}), Insert("lists", {"key": 1})])
        with pytest.raises(SerializationFailure):
            async with shop.transaction() as tx:
                await tx.fetch(ROW[0], 1)
                await shop.write([OTHER])
                await cluster.stop("r1", "r2", "r3")
                await cluster.start("r1", "r2", "r3")
                await tx.update("accounts", key={"id": 1}, add={"balance": 1})

        await shop.wait_in_sync()
        assert await shop.fetchval("select balance from accounts where id = 1", consistency="current") == 0


def test_write_sets_beyond_the_window_are_forgotten_and_newer_ones_of_their_places_kept() -> None:
    written = WriteSets(window=10)
    here, there = ("lists", "[1]"), ("lists", "[2]")

    written.add(1, frozenset({here, there}))
    written.add(5, frozenset({here}))
    written.add(11, frozenset())

    assert (written.last(here), written.last(there)) == (5, 0)


SKEWED = {
    "subqueries": (
        "insert into lists select 50, count(*)::text from prices",
        "insert into prices select 50, count(*) from lists",
    ),
    "conditions": (
        "insert into lists select 51, 'x' where not exists (select from prices where value = 51)",
        "insert into prices select 51, 51 where not exists (select from lists where key = 51)",
    ),
    "triggers": ("insert into counted values (1)", "insert into lists values (52)"),
    "defaults": ("insert into measured (id) values (1)", "insert into lists select 53, count(*)::text from measured"),
}
COUNTING = f"""{WIDER}
create function lists_now() returns bigint language sql stable as 'select count(*) from lists';
create table measured (id int primary key, seen bigint default lists_now());
create table counted (id int primary key, seen bigint);
create function count_lists() returns trigger language plpgsql as
    $$ begin new.seen := (select count(*) from lists); return new; end $$;
create trigger count_lists before insert on counted for each row execute function count_lists();
create function count_counted() returns trigger language plpgsql as
    $$ begin new.items := (select count(*) from counted)::text; return new; end $$;
create trigger count_counted before insert on lists for each row when (new.key = 52) execute function count_counted();
"""
SERIAL = {  # by how many transactions saw the other one's row
    "subqueries": "select ((select items from lists where key = 50) <> '0')::int"
    " + ((select value from prices where key = 50) <> $1)::int",
    "conditions": "select (select count(*) from lists where key = 51) + (select count(*) from prices where key = 51)",
    "triggers": "select (select seen from counted where id = 1) - $1 + (select items::int from lists where key = 52)",
    "defaults": "select (select seen from measured where id = 1) - $1 + (select items::int from lists where key = 53)",
}


@pytest.mark.parametrize("kind", SKEWED)
async def test_what_statements_read_where_they_are_executed_is_certified(
    server: EmbeddedPostgres, folder: Path, kind: str
) -> None:
    """Two origins execute at the same time what reads the table that the other one writes."""
    async with (
        small_cluster(server, folder, 'policy = "serializable"', schema=COUNTING) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as other,
    ):
        await one.write([Insert("lists", {"key": 1})])
        await one.wait_in_sync()
        before = await one.fetchval("select count(*) from lists", consistency="current")
        both_executed, submitting = asyncio.Barrier(2), iter(range(2))
        for site in ("r1", "r2"):
            executor = cluster.agents[site].executor
            assert executor is not None
            executor._submission = Together(executor._submission, both_executed, submitting)

        await asyncio.gather(
            *(shop.write([Statement(sql)]) for shop, sql in zip((one, other), SKEWED[kind], strict=True))
        )

        await one.wait_in_sync()
        args = (before,) if "$1" in SERIAL[kind] else ()
        assert await one.fetchval(SERIAL[kind], *args, consistency="current") == 1


class Together:
    """Submits the first write sets of two origins when both were executed."""

    def __init__(self, inner: Submission, both_executed: asyncio.Barrier, submitting: Iterator[int]) -> None:
        self._inner, self._both_executed, self._submitting = inner, both_executed, submitting

    async def submit(self, member: Member, reads: bytes) -> Submitted:
        if next(self._submitting, None) is not None:
            await self._both_executed.wait()
        return await self._inner.submit(member, reads)
