"""What a serializable transaction depends on is what it has read, however the query was written."""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from adapters import EmbeddedPostgres
from replication import ReplicaSet
from replication.certification import WriteSets
from replication.refusals import SerializationFailure, WriteRefused
from tests.integration.replication.clusters import SCHEMA
from tests.integration.replication.inprocess import small_cluster
from tops.changes import Change, Delete, Insert, Statement, Update

WIDER = f"""{SCHEMA}
create table prices (key numeric primary key, value int not null);
create view filled as select * from lists where items <> '';
create table shelves (id int primary key);
create table books (id int primary key, shelf int references shelves on delete cascade);
create function longest() returns int language sql stable as 'select max(length(items)) from lists';
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


async def test_a_change_that_no_replica_can_carry_out_is_refused_and_holds_up_nobody(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "serializable"') as cluster, cluster.connect() as shop:
        with pytest.raises(WriteRefused):
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
