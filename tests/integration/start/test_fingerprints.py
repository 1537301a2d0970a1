"""What two databases differ in shows in their fingerprints, and what does not matter does not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from replication.replica.start import comparing, fingerprint
from replication.replica.start.fingerprint import Described, Progress
from replication.tables import catalog
from replication.tables.endpoints import ReplicaEndpoint
from tests.integration.replication.inprocess import _database, _give_back

BASE = """
create type mood as enum ('sad', 'ok');
create domain positive as int check (value > 0);
create table owner (id int primary key);
create table t (
    id bigint primary key, n numeric(8, 2) not null default 1, m mood default 'ok', p positive, note text,
    doubled bigint generated always as (id * 2) stored, owner int references owner (id), serial_no serial,
    unique (note), check (n >= 0));
create unique index on t (lower(note)) where p > 3;
create table part (id int, day date, primary key (id, day)) partition by range (day);
create table part_20 partition of part for values from ('2020-01-01') to ('2021-01-01');
create table keyless (a int, b text);
create function tripled(v int) returns int language sql immutable as 'select 3 * v';
create table made (id int primary key, n int generated always as (tripled(id)) stored);
insert into owner values (1), (2);
insert into t (id, n, note, owner) select i, i, 'note ' || i, 1 + i % 2 from generate_series(1, 200) i;
insert into part values (1, '2020-02-02');
insert into keyless values (1, 'x'), (1, 'x'), (2, null);
"""
# What is done to one database of two, and what the difference says then.
CASES = [
    ("create table more (id int primary key)", "table more is missing on r1 and exists on r2"),
    ("drop table keyless", "table keyless is missing on r2 and exists on r1"),
    ("delete from t", "t has different numbers of rows: 200 on r1, 0 on r2"),
    ("delete from t where id = 200", "200 on r1, 199 on r2"),
    ("update t set n = 7.01 where id = 7", "t has 200 rows everywhere, but different ones on r1 and r2"),
    ("update t set id = 1000 where id = 200", "200 rows everywhere, but different ones"),
    ("update t set note = null where id = 3", "200 rows everywhere, but different ones"),
    ("update keyless set b = '' where a = 2", "keyless has 3 rows everywhere, but different ones"),
    ("update keyless set b = 'y' where ctid = '(0,1)'", "keyless has 3 rows everywhere, but different ones"),
    ("update part set id = 2", "part has 1 rows everywhere, but different ones"),
    ("alter table t alter n type numeric(9, 2)", "column n numeric(8,2) not null default 1, r2 has column n numeric"),
    ("alter table t alter n drop not null", "r2 has column n numeric(8,2) default 1"),
    ("alter table t alter n set default 2", "r2 has column n numeric(8,2) not null default 2"),
    ("alter table t add extra int", "r2 has column extra integer"),
    ("alter table t drop constraint t_n_check", "r1 has constraint CHECK"),
    ("alter table t drop constraint t_owner_fkey", "r1 has constraint FOREIGN KEY (owner)"),
    ("alter table t alter doubled drop expression", "r1 has column doubled bigint generated"),
    (
        "create or replace function tripled(v int) returns int language sql immutable as 'select 4 * v'",
        "r2 has function of column n public.tripled",
    ),
    ("drop index t_lower_idx", "r1 has index CREATE UNIQUE INDEX ON public.t USING btree (lower(note))"),
    ("alter type mood add value 'glad'", "r2 has type public.mood enum 'sad', 'ok', 'glad'"),
    ("alter domain positive add check (value < 9)", "r2 has type public.positive domain integer CHECK"),
    (
        "create table part_21 partition of part for values from ('2021-01-01') to ('2022-01-01')",
        "partition public.part",
    ),
    ("alter sequence t_serial_no_seq increment 2", "r2 has sequence of serial_no"),
    ("alter table keyless set unlogged", "r2 has table unlogged"),
    ("alter table t enable row level security", "row security"),
    (
        "create function f() returns trigger language plpgsql as 'begin return new; end';"
        "create trigger mine before insert on t for each row execute function f()",
        "r2 has trigger CREATE TRIGGER mine",
    ),
]
HARMLESS = [
    "alter table t rename constraint t_n_check to other",
    "alter index t_lower_idx rename to other",
    "create index on t (n)",
    "alter table t add gone int; alter table t drop gone",
    "update t set n = n",
    "vacuum t",
    "select setval('t_serial_no_seq', 4711)",
    "create view v as select * from t",
    "analyze",
    "do $$ begin execute format('alter database %I set search_path = elsewhere', current_database());"
    "execute format('alter database %I set quote_all_identifiers = on', current_database()); end $$",
]
FORGET_SETTINGS = "do $$ begin execute format('alter database %I reset all', current_database()); end $$"


@asynccontextmanager
async def equal(server: EmbeddedPostgres, count: int = 2) -> AsyncIterator[list[str]]:
    """Addresses of databases that hold the same."""
    names = [await _database(server) for _ in range(count)]
    try:
        for name in names:
            await on(server.dsn_for(name), BASE)
        yield [server.dsn_for(name) for name in names]
    finally:
        for name in names:
            await _give_back(server, name)


async def on(dsn: str, script: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(script)
    finally:
        await connection.close()


async def taken(dsn: str, *, checksums: bool = True) -> Described:
    tables = await catalog.tables_of(ReplicaEndpoint("r", dsn))
    return await fingerprint.take(dsn, "r", tables, Progress(), checksums=checksums)


def told(first: Described, second: Described) -> str:
    both = {"r1": first, "r2": second}
    found = comparing.differences({name: one.fingerprint for name, one in both.items()})
    texts = []
    for difference in found:
        details = {name: one.details[difference.table] for name, one in both.items() if difference.table in one.details}
        texts.append(comparing.explained(difference, details))
    return " | ".join(texts)


async def test_every_difference_that_matters_is_found_and_named(server: EmbeddedPostgres) -> None:
    async with equal(server) as (first, second):
        base = await taken(first)
        assert told(base, await taken(second)) == ""
    for change, expected in CASES:
        async with equal(server, 1) as (second,):
            await on(second, change)

            text = told(base, await taken(second))

            assert expected in text, f"{change}: {text}"


@pytest.mark.parametrize(("seed", "advice"), [(None, "as `seed`"), ("r1", "--overwrite")])
def test_every_difference_is_told_with_what_to_do(seed: str | None, advice: str) -> None:
    texts = [f"table t{number} is missing on r2 and exists on r1" for number in range(7)]

    for count in (1, 7):
        text = comparing.reason(texts[:count], seed)

        assert texts[0] in text
        assert advice in text.rpartition(": ")[2], text
        assert ("2 more" in text) == (count == 7)


async def test_what_does_not_matter_makes_no_difference(server: EmbeddedPostgres) -> None:
    async with equal(server) as (first, second):
        for change in HARMLESS:
            await on(second, change)

            assert told(await taken(first), await taken(second)) == "", change
        await on(second, FORGET_SETTINGS)  # the database is used again


async def test_the_first_keys_that_differ_are_named(server: EmbeddedPostgres) -> None:
    async with equal(server) as (first, second):
        await on(second, "update t set n = 0 where id = 150")

        text = told(await taken(first), await taken(second))

    assert "the first difference is within keys 144 to 151 (8 on r1, 8 on r2)" in text


async def test_trusted_clones_are_compared_by_schema_and_row_counts_alone(server: EmbeddedPostgres) -> None:
    async with equal(server) as (first, second):
        await on(second, "update t set n = 0 where id = 150")
        assert told(await taken(first), await taken(second, checksums=False)) == ""

        await on(second, "delete from t where id = 150")
        assert "200 on r1, 199 on r2" in told(await taken(first), await taken(second, checksums=False))


async def test_another_encoding_is_a_difference_of_the_servers(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("create database latin encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'")
    try:
        async with equal(server, 1) as (first,):
            await on(server.dsn_for("latin"), BASE)

            text = told(await taken(first), await taken(server.dsn_for("latin")))
    finally:
        await connection.execute("drop database latin with (force)")
        await connection.close()

    assert "the servers differ in encoding: UTF8 on r1; LATIN1 on r2" in text


@pytest.mark.parametrize("parts", [1, 7])
async def test_how_a_table_is_cut_for_reading_does_not_show(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    async with equal(server) as (first, second):
        whole = await taken(first)
        await on(second, "analyze t")
        monkeypatch.setattr(fingerprint, "READ_ROWS", 200 // parts)

        assert told(whole, await taken(second)) == ""
