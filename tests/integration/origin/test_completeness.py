"""What is not captured is not acknowledged: whatever a transaction does besides changing rows of the set rejects it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from adapters import EmbeddedPostgres
from adapters.postgres.origin import Executed, Rejected, chain
from adapters.postgres.origin.completeness import Touched
from tests.integration.origin.databases import OriginDatabase

SCHEMA = """
create table items (id int primary key, n int not null default 0);
create table keyless (n int);
create unlogged table scratch (id int primary key);
create table timed (id int primary key, at timestamptz, f float8);
create table unnoticed (id int primary key, n int);
insert into items select g from generate_series(1, 5) as g;
insert into unnoticed values (1, 1);
create function makes_function() returns void language plpgsql security definer as
    $$ begin execute 'create function made() returns int language sql as ''select 1'''; end $$;
create function makes_object() returns oid language sql security definer as $$ select lo_create(0) $$;
create function grants() returns void language plpgsql security definer as
    $$ begin execute 'grant select on items to public'; end $$;
create function locks() returns void language plpgsql security definer as
    $$ begin execute 'lock table items in share update exclusive mode'; end $$;
create table loud (id int primary key, n int);
insert into loud values (1, 1);
create function again() returns trigger language plpgsql as $$ begin new.n := new.n + 1; return new; end $$;
create trigger again before update on loud for each row execute function again();
alter table loud enable always trigger again;
create function empties() returns void language plpgsql as $$ begin truncate items; end $$;
create function fails_inside() returns int language plpgsql as $$ begin
    begin insert into keyless values (1); raise 'back'; exception when others then null; end;
    return 1; end $$;
create function spoils_settings() returns int language plpgsql as $$ begin
    execute 'set local datestyle to ''German'''; execute 'set local extra_float_digits to -3'; return 1; end $$;
"""
REJECTED = {
    "a table without a key": ("insert into keyless values (1)", "has no primary key"),
    "an unlogged table": ("insert into scratch values (1)", "is not logged"),
    "a table whose trigger is off": ("update unnoticed set n = 2", "no table of the replica set"),
    "a trigger that fires again": ("update loud set n = 2", "also fires where rows are applied"),
    "truncate": ("truncate items", "use DELETE FROM"),
    "truncate in a function": ("select empties()", "AccessExclusiveLock"),
    "a function": ("select makes_function()", "catalogue"),
    "a large object": ("select makes_object()", "catalogue"),
    "a grant": ("select grants()", "catalogue"),
    "a lock": ("select locks()", "ShareUpdateExclusiveLock"),
}


@pytest.fixture(scope="module")
def made(server: EmbeddedPostgres) -> OriginDatabase:
    async def make() -> OriginDatabase:
        database = await OriginDatabase.make(server)
        await database.set_up(SCHEMA)
        try:
            await database.begin()
            await database.sql("alter table unnoticed disable trigger tops_capture")
        finally:
            await database.close()
        return database

    return asyncio.run(make())


@pytest_asyncio.fixture
async def prepared(made: OriginDatabase) -> AsyncIterator[OriginDatabase]:
    """Ready to execute. Closed also after a test that failed: what it left open would hold locks against the others."""
    try:
        await made.begin()
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize("case", REJECTED)
async def test_what_is_not_captured_is_rejected(prepared: OriginDatabase, case: str) -> None:
    sql, problem = REJECTED[case]
    outcome = await prepared.execute("update items set n = n + 1 where id = 1", sql)

    assert isinstance(outcome, Rejected), outcome
    assert outcome.sqlstate == "0A000"
    assert problem in outcome.message


async def test_without_the_check_it_would_be_acknowledged(
    prepared: OriginDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> Touched:
        return Touched("", (), {})

    monkeypatch.setattr(chain, "touched", nothing)
    assert isinstance(await prepared.execute("insert into keyless values (1)"), Executed)


async def test_a_statement_that_the_driver_does_not_understand_is_rejected_and_the_session_stays(
    prepared: OriginDatabase,
) -> None:
    outcomes = await prepared.execute_all(
        ["select * from pg_catalog.pg_statistic"], ["update items set n = 3 where id = 4"]
    )

    assert [type(outcome) for outcome in outcomes] == [Rejected, Executed]


async def test_what_was_taken_back_inside_is_no_change(prepared: OriginDatabase) -> None:
    outcome = await prepared.execute("update items set n = fails_inside() where id = 1")

    assert isinstance(outcome, Executed), outcome
    assert len(outcome.write_set.changes) == 1


async def test_only_the_member_that_is_not_captured_is_rejected(prepared: OriginDatabase) -> None:
    requests = [
        ["update items set n = 7 where id = 1"],
        ["insert into keyless values (1)"],
        ["delete from items where id = 2"],
    ]

    outcomes = await prepared.execute_all(*requests)

    assert [type(outcome) for outcome in outcomes] == [Executed, Rejected, Executed]


async def test_settings_that_a_statement_changes_do_not_reach_the_images(prepared: OriginDatabase) -> None:
    outcome = await prepared.execute(
        "insert into timed values (spoils_settings(), '2026-02-03 04:05:06+00', 0.1::float8 + 0.2)"
    )

    assert isinstance(outcome, Executed), outcome
    (change,) = outcome.write_set.changes
    assert change.values == {"id": 1, "at": "2026-02-03 04:05:06+00", "f": "0.30000000000000004"}  # type: ignore[union-attr]
