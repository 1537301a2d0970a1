"""Requests that wait together: each finds what those before it did, and what is shipped is certified row by row."""

import asyncio

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Delete, Insert, Statement, Update
from adapters.postgres.apply.orphans import ORPHANS_MAX, QueriesLeft
from adapters.postgres.origin import Executed, Rejected
from adapters.resource import Why
from tests.integration.origin.databases import OriginDatabase

SCHEMA = """
create table counters (id int primary key, n int not null check (n < 100), at timestamptz);
create table parents (id int primary key);
create table children (id int primary key, parent int references parents on delete cascade);
create table ranked (id int primary key, place int unique deferrable initially deferred);
create function touch() returns trigger language plpgsql as $$ begin new.place := new.place; return new; end $$;
create trigger touched before insert or update on ranked for each row execute function touch();
"""
ROWS = """
truncate counters, parents, children, ranked;
insert into counters values (1, 0), (2, 0);
insert into parents values (1), (2);
insert into ranked values (1, 1), (2, 2);
"""


@pytest.fixture(scope="module")
def made(server: EmbeddedPostgres) -> OriginDatabase:
    async def make() -> OriginDatabase:
        database = await OriginDatabase.make(server)
        await database.set_up(SCHEMA)
        return database

    return asyncio.run(make())


async def test_members_build_on_each_other(made: OriginDatabase) -> None:
    await made.begin()
    await made.sql(ROWS)

    outcomes = await made.execute_all(
        ["update counters set n = n + 1, at = clock_timestamp() where id = 1 returning n"],
        ["update counters set n = n + 100 where id = 1"],
        ["update counters set n = n * 10 where id = 1 returning n"],
        ["delete from counters where id = 1"],
        ["insert into counters values (1, 5)"],
    )

    first, failed, third, deleted, inserted = outcomes
    assert isinstance(first, Executed)
    assert isinstance(third, Executed)
    assert isinstance(failed, Rejected)
    assert failed.sqlstate == "23514"
    assert first.returned == (({"n": 1},),)
    assert third.returned == (({"n": 10},),)
    done = [outcome for outcome in outcomes if isinstance(outcome, Executed)]
    assert [type(change) for one in done for change in one.write_set.changes] == [Update, Update, Delete, Insert]
    votes = await made.apply_all("c", done)
    assert [vote.excluded for vote in votes] == [None] * 4
    assert isinstance(deleted, Executed)
    assert isinstance(inserted, Executed)
    await made.close()


async def test_a_row_that_is_not_the_one_that_was_found_is_a_conflict(made: OriginDatabase) -> None:
    await made.begin()
    await made.sql(ROWS)
    update = await made.execute("update counters set n = n + 1 where id = 1")
    delete = await made.execute("delete from counters where id = 2")
    insert = await made.execute("insert into counters values (3, 1)")
    other = await made.execute("update counters set n = n + 1 where id = 2")
    await made.sql("update counters set at = now(); insert into counters values (3, 3)")

    for number, executed in enumerate((update, delete, insert, other)):
        assert isinstance(executed, Executed)
        vote = await made.apply(f"x{number}", executed)
        assert vote.excluded is not None
        assert vote.excluded.why is Why.CONFLICT
    await made.close()


async def test_a_conflict_in_an_epoch_is_named_and_the_others_commit(made: OriginDatabase) -> None:
    await made.begin()
    await made.sql(ROWS)
    one = await made.execute("update counters set n = n + 1 where id = 1")
    two = await made.execute("update counters set n = n + 1 where id = 2")
    assert isinstance(one, Executed)
    assert isinstance(two, Executed)
    await made.sql("update counters set at = now() where id = 1")

    votes = await made.apply_all("y", [one, two])

    assert [vote.excluded.why if vote.excluded else None for vote in votes] == [Why.CONFLICT, None]
    await made.close()


async def test_a_child_that_came_in_between_is_not_orphaned(made: OriginDatabase) -> None:
    await made.begin()
    await made.sql(ROWS)
    executed = await made.execute("delete from parents where id = 1")
    assert isinstance(executed, Executed)
    await made.sql("insert into children values (1, 1)")

    vote = await made.apply("p1", executed)

    assert vote.excluded is not None
    assert vote.excluded.why is Why.CONFLICT
    await made.close()


async def test_a_parent_that_went_in_between_gets_no_child(made: OriginDatabase) -> None:
    await made.begin()
    await made.sql(ROWS)
    executed = await made.execute("insert into children values (2, 2)")
    assert isinstance(executed, Executed)
    await made.sql("delete from parents where id = 2")

    vote = await made.apply("p2", executed)

    assert vote.excluded is not None
    assert vote.excluded.why is Why.CONFLICT
    await made.close()


async def test_a_deferrable_key_is_kept_with_triggers_switched_off(made: OriginDatabase) -> None:
    await made.begin()
    await made.sql(ROWS)
    executed = await made.execute("insert into ranked values (3, 3)")
    assert isinstance(executed, Executed)
    await made.sql("insert into ranked values (4, 3)")

    vote = await made.apply("d1", executed)

    assert vote.excluded is not None
    assert vote.excluded.why is Why.CONFLICT
    await made.close()


@pytest.mark.parametrize("literal", ["'now'", "$$Now$$", "E'\\x6eow'", "U&'n\\006fw'", "timestamptz 'now'"])
async def test_a_literal_that_is_a_clock_is_read_at_each_execution(database: OriginDatabase, literal: str) -> None:
    await database.begin("create table t (id int primary key, at timestamptz); insert into t values (1), (2)")
    touch = f"update t set at = {literal} where id = "

    times: list[str] = []
    for _ in range(2):
        for outcome in await database.execute_all([f"{touch}1"], [f"{touch}2"]):
            assert isinstance(outcome, Executed)
            (change,) = outcome.write_set.changes
            assert isinstance(change, Update)
            times.append(change.values["at"])

    assert times[0] < times[2]
    assert times[1] < times[3]


async def test_an_identity_whose_executions_can_t_be_cancelled_is_rejected_until_they_end(made: OriginDatabase) -> None:
    await made.begin()
    await made.sql(ROWS)
    endless = Statement(
        "update counters set n = length(translate(repeat('a', 200000), repeat('b', 16000), '')) where id = $1", (2,)
    )
    harmless = Statement("update counters set n = n + 1 where id = $1", (1,))
    for _ in range(ORPHANS_MAX):
        executing = asyncio.ensure_future(made.origin.execute([(endless,)], "greedy"))
        await asyncio.sleep(0.4)
        executing.cancel()
        await asyncio.gather(executing, return_exceptions=True)
    await asyncio.sleep(1.1)  # after which a backend counts as one that does not end

    with pytest.raises(QueriesLeft, match="greedy"):
        await made.origin.execute([(harmless,)], "greedy")
    (done,) = await made.origin.execute([(harmless,)], "calm")
    assert isinstance(done, Executed)
    async with asyncio.timeout(120):
        while True:
            try:
                (done,) = await made.origin.execute([(harmless,)], "greedy")
                break
            except QueriesLeft:
                await asyncio.sleep(0.2)
    assert isinstance(done, Executed)
    await made.close()
