"""SQLite as a compensatable resource: committed early, taken back exactly, once, or not at all."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from adapters import SqliteAdapter
from adapters.changes import Change, Delete, Insert, Statement, Update, Upsert
from adapters.resource import Position, Why
from adapters.sqlite.undo import OWN_TABLES
from tests.contract.harness import SqliteDatabase, attempt, entry, epoch, member
from tops.model.errors import CompensationRejected, ConfigError, ResourceRejected

TABLES = """
create table plain (id integer primary key, v, w text);
create table keyed (k text primary key, v) without rowid;
create table rowids (v, w);
create table parent (id integer primary key, name text unique);
create table kid (id integer primary key, parent integer references parent (id) on delete cascade, v real);
create table coded (id integer primary key, code text unique);
create table follower (id integer primary key, code text references coded (code) on update cascade on delete set null);
create table tops_sales (id integer primary key, v);
create table computed (id integer primary key, a integer, double_a integer generated always as (a * 2) stored);
insert into plain values (1, 1.5, 'one'), (2, x'00ff', null), (3, 9007199254740993, 'it''s');
insert into keyed values ('a', 1), ('b', null);
insert into rowids values (1, 'x'), (2, 'y');
insert into parent values (1, 'p1'), (2, 'p2');
insert into kid values (1, 1, 0.1), (2, 1, 1e300), (3, 2, null);
insert into coded values (1, 'a'), (2, 'b');
insert into follower values (1, 'a'), (2, 'a'), (3, 'b');
insert into tops_sales values (1, 'mine');
insert into plain values (4, cast(x'610062' as text), cast(x'00' as text));
insert into plain values (5, 9e999, 'inf'), (6, -9e999, ''), (7, x'', 'X');
insert into computed (id, a) values (1, 1);
"""


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    database = SqliteDatabase(tmp_path / "test.db")
    await database.sql(TABLES)
    return tmp_path / "test.db"


def dump(path: Path) -> list[str]:
    """All rows of the user's tables, value by value; SQLite's own dump would end a text at its first NUL."""
    connection = sqlite3.connect(path)
    tables = connection.execute("select name, sql from sqlite_master where type = 'table' order by name").fetchall()
    lines = []
    for name, sql in tables:
        if name not in OWN_TABLES and not name.startswith("sqlite_"):
            row_id = "" if "without rowid" in sql else "rowid, "
            rows = connection.execute(f'select {row_id}* from "{name}" order by 1').fetchall()
            lines += [f"{name}: {row!r}" for row in rows]
    connection.close()
    return lines


def open_adapter(path: Path) -> SqliteAdapter:
    return SqliteAdapter(path, cluster="test", replica_set="shop")


CHANGES: dict[str, Change] = {
    "update": Update("plain", {"id": 1}, {"v": "text now"}),
    "update of a blob": Update("plain", {"id": 2}, {"v": 7}),
    "insert": Insert("plain", {"id": 9, "v": b"\x00"}),
    "delete": Delete("plain", {"id": 3}),
    "upsert of an old row": Upsert("keyed", {"k": "a"}, {"v": 5}),
    "upsert of a new row": Upsert("keyed", {"k": "z"}, {"v": 5}),
    "delete without rowid": Delete("keyed", {"k": "b"}),
    "cascade": Delete("parent", {"id": 1}),
    "cascade by replace": Statement("with x as (select 1) insert or replace into parent values (1, 'p2')"),
    "change of the key by statement": Statement("update plain set id = id + 100"),
    "all rows of a table without key": Statement("delete from rowids"),
    "update of a text with a NUL": Update("plain", {"id": 4}, {"v": 1, "w": "x"}),
    "update to a text with a NUL": Update("plain", {"id": 1}, {"v": "a\0b", "w": "\0"}),
    "update of infinity": Update("plain", {"id": 5}, {"v": 1}),
    "update to less than infinity": Update("plain", {"id": 1}, {"v": float("-inf")}),
    "update of no bytes": Update("plain", {"id": 7}, {"v": 1}),
    "update of the smallest number": Update("plain", {"id": 1}, {"v": 5e-324}),
    "cascade of an update": Update("coded", {"id": 1}, {"code": "z"}),
    "a reference that becomes null": Delete("coded", {"id": 1}),
    "a table that is called like ours": Update("tops_sales", {"id": 1}, {"v": "yours"}),
    "computed column": Update("computed", {"id": 1}, add={"a": 4}),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_compensation_restores_every_byte(path: Path, name: str) -> None:
    before = dump(path)
    async with open_adapter(path) as adapter:
        response = await adapter.prepare(epoch(1, member("t1", CHANGES[name], Insert("plain", {"id": 50}))))
        assert response.votes[0].excluded is None
        assert dump(path) != before  # early: everybody sees it

        await adapter.rollback(attempt(1))
        await adapter.rollback(attempt(1))

    assert dump(path) == before


@pytest.mark.parametrize("seed", range(15))
async def test_compensation_of_random_epochs_restores_every_byte(path: Path, seed: int) -> None:
    dice = random.Random(seed)
    async with open_adapter(path) as adapter:
        for number in range(1, 6):
            before = dump(path)
            members = []
            for n in range(dice.randint(1, 12)):
                changes = dice.choices(list(CHANGES.values()), k=dice.randint(1, 3))
                if dice.random() < 0.3:
                    changes.append(Insert("plain", {"id": dice.randint(1, 5)}))
                members.append(member(f"t{n}", *changes))
            await adapter.prepare(epoch(number, *members))
            if dice.random() < 0.7:
                await adapter.rollback(attempt(number))
                assert dump(path) == before, f"seed {seed}, epoch {number}"
                await adapter.apply([entry(number)])
            else:
                await adapter.commit(attempt(number))


async def test_rows_changed_by_somebody_else_are_not_overwritten(path: Path) -> None:
    async with open_adapter(path) as adapter:
        await adapter.prepare(
            epoch(1, member("t1", Update("plain", {"id": 1}, {"w": "ours"}), Delete("plain", {"id": 2})))
        )
        await SqliteDatabase(path).sql("update plain set v = 'theirs' where id = 1")
        before = dump(path)

        with pytest.raises(CompensationRejected):
            await adapter.rollback(attempt(1))

        assert dump(path) == before
        assert [doubt.attempt for doubt in await adapter.recover()] == [attempt(1)]


async def test_nothing_is_taken_back_once_something_later_is_committed(path: Path) -> None:
    async with open_adapter(path) as adapter:
        await adapter.prepare(epoch(1, member("t1", Update("plain", {"id": 1}, {"w": "ours"}))))
        await adapter.write_local(member("t2", Update("plain", {"id": 2}, {"w": "later"})))

        with pytest.raises(CompensationRejected, match="later"):
            await adapter.rollback(attempt(1))
        await adapter.commit(attempt(1))

        assert await adapter.applied() == Position(1)


async def test_the_log_waits_while_an_epoch_is_undecided(path: Path) -> None:
    async with open_adapter(path) as adapter:
        await adapter.prepare(epoch(1, member("t1", Update("plain", {"id": 1}, {"w": "ours"}))))

        with pytest.raises(ResourceRejected, match="decided"):
            await adapter.apply([entry(2, member("t2", Update("plain", {"id": 1}, {"w": "x"})))])
        with pytest.raises(ResourceRejected, match="decided"):
            await adapter.prepare(epoch(2, member("t2", Update("plain", {"id": 1}, {"w": "x"}))))

        await adapter.rollback(attempt(1))
        assert (await adapter.apply([entry(1), entry(2)])).position == 2


async def test_tables_with_triggers_are_refused_since_the_way_back_would_fire_them(path: Path) -> None:
    await SqliteDatabase(path).sql("create trigger t after update on plain begin update keyed set v = 1; end")
    async with open_adapter(path) as adapter:
        response = await adapter.prepare(
            epoch(
                1,
                member("t1", Update("plain", {"id": 1}, {"w": "x"})),
                member("t2", Update("keyed", {"k": "a"}, {"v": 2})),
            )
        )

        assert response.votes[0].excluded is not None
        assert (response.votes[0].excluded.why, response.votes[1].excluded) == (Why.INVALID, None)


async def test_a_table_made_later_is_compensated_too(path: Path) -> None:
    async with open_adapter(path) as adapter:
        await SqliteDatabase(path).sql("create table fresh (id integer primary key, v)")
        before = dump(path)

        await adapter.prepare(epoch(1, member("t1", Insert("fresh", {"id": 1, "v": 2}))))
        await adapter.rollback(attempt(1))

        assert dump(path) == before


async def test_rows_that_others_tied_to_ours_are_not_swept_away(path: Path) -> None:
    async with open_adapter(path) as adapter:
        await adapter.prepare(epoch(1, member("t1", Insert("parent", {"id": 7, "name": "x"}))))
        await SqliteDatabase(path).sql("pragma foreign_keys = on; insert into kid values (70, 7, 1.0)")
        before = dump(path)

        with pytest.raises(CompensationRejected):
            await adapter.rollback(attempt(1))

        assert dump(path) == before


async def test_a_case_that_differs_is_another_value(path: Path) -> None:
    await SqliteDatabase(path).sql("create table loose (id integer primary key, v text collate nocase)")
    async with open_adapter(path) as adapter:
        await adapter.prepare(epoch(1, member("t1", Insert("loose", {"id": 1, "v": "ours"}))))
        await SqliteDatabase(path).sql("update loose set v = 'OURS'")

        with pytest.raises(CompensationRejected):
            await adapter.rollback(attempt(1))


@pytest.mark.parametrize("change", [Delete("parent", {"id": 1}), Update("KID", {"id": 1}, {"v": 1.0})], ids=str)
async def test_no_way_leads_to_a_trigger_unseen(path: Path, change: Change) -> None:
    """Through a cascade, or by the name in other letters."""
    await SqliteDatabase(path).sql(
        "create table seen (n integer); create trigger t after insert on kid begin insert into seen values (1); end"
    )
    async with open_adapter(path) as adapter:
        response = await adapter.prepare(epoch(1, member("t1", change)))

        assert response.votes[0].excluded is not None
        assert response.votes[0].excluded.why is Why.INVALID


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Statement("insert into papers (body) values ($1)", ("hello",)), "papers can't be compensated"),
        (Statement("update tops_position set prefix = 9"), "own memory"),
        (Statement("with x as (select 1) delete from tops_undo"), "own memory"),
        (Update("tops_position", {"replica_set": "shop"}, {"prefix": 9}), "own memory"),
    ],
    ids=str,
)
async def test_what_cannot_be_taken_back_is_not_done(path: Path, change: Change, words: str) -> None:
    await SqliteDatabase(path).sql("create virtual table papers using fts5 (body)")
    async with open_adapter(path) as adapter:
        response = await adapter.prepare(
            epoch(1, member("t1", change), member("t2", Statement("update plain set w = 'x' where id = 1")))
        )

        rejected = response.votes[0].excluded
        assert rejected is not None
        assert (rejected.why, words in rejected.message) == (Why.INVALID, True), rejected
        assert response.votes[1].rows == (1,)
        assert (await adapter.read("select count(*) as n from papers")).rows == [{"n": 0}]


async def test_the_log_may_fill_a_search_index(path: Path) -> None:
    await SqliteDatabase(path).sql("create virtual table papers using fts5 (body)")
    async with open_adapter(path) as adapter:
        await adapter.apply([entry(1, member("t1", Statement("insert into papers (body) values ($1)", ("hello",))))])

        assert (await adapter.read("select count(*) as n from papers where papers match 'hello'")).rows == [{"n": 1}]


async def test_what_another_set_writes_in_the_file_does_not_stand_in_the_way(path: Path) -> None:
    async with (
        SqliteAdapter(path, cluster="test", replica_set="a") as ours,
        SqliteAdapter(path, cluster="test", replica_set="b") as theirs,
    ):
        before = dump(path)
        await ours.prepare(epoch(1, member("t1", Update("plain", {"id": 1}, {"w": "x"}))))
        await theirs.write_local(member("t2", Update("keyed", {"k": "a"}, {"v": 1})))

        await ours.rollback(attempt(1))

    assert dump(path) == before


async def test_a_reference_that_was_broken_before_is_not_held_against_a_member(path: Path) -> None:
    await SqliteDatabase(path).sql(
        "create table late (id integer primary key, p integer references parent (id) deferrable initially deferred);"
        "insert into late values (1, 999)"
    )
    async with open_adapter(path) as adapter:
        response = await adapter.prepare(
            epoch(
                1, member("t1", Update("plain", {"id": 1}, {"w": "x"})), member("t2", Insert("late", {"id": 2, "p": 8}))
            )
        )

        assert [vote.excluded is None for vote in response.votes] == [True, False]


async def test_readers_go_on_and_see_whole_states_while_an_epoch_is_taken_back(path: Path) -> None:
    async with open_adapter(path) as adapter:
        await adapter.prepare(
            epoch(1, member("t1", Update("plain", {"id": 1}, {"w": "x"}), Update("keyed", {"k": "a"}, {"v": 7})))
        )
        async with adapter.snapshot() as early:
            await adapter.rollback(attempt(1))

            plain = [row async for rows in early.rows("plain") for row in rows]
            keyed = [row async for rows in early.rows("keyed") for row in rows]
            assert (plain[0]["w"], keyed[0]["v"]) == ("x", 7)
        now = await adapter.read("select w, (select v from keyed where k = 'a') as v from plain where id = 1")
        assert now.rows == [{"w": "one", "v": 1}]


async def test_all_spellings_of_a_key_share_one_version(path: Path) -> None:
    async with SqliteAdapter(path, cluster="test", replica_set="shop", versioned=["plain"]) as adapter:
        await adapter.apply([entry(1, member("t1", Update("plain", {"id": "1"}, {"w": "x"})))])

        assert await adapter.version("plain", {"id": 1}) == 1


OWNER = """
import asyncio, os, sys
from tests.integration.adapters.test_sqlite import CHANGES, open_adapter, epoch, member, attempt
async def main():
    async with open_adapter(sys.argv[1]) as adapter:
        await adapter.prepare(epoch(1, *(member(f"t{n}", change) for n, change in enumerate(CHANGES.values()))))
        print("prepared", flush=True)
        work = asyncio.create_task(getattr(adapter, sys.argv[2])(attempt(1)))
        await asyncio.sleep(float(sys.argv[3]))
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""


@pytest.mark.parametrize("verb", ["commit", "rollback"])
@pytest.mark.parametrize("delay_s", [0.0, 0.002])
async def test_a_killed_agent_leaves_the_epoch_whole_and_its_successor_ends_it_once(
    path: Path, verb: str, delay_s: float
) -> None:
    before = dump(path)
    owner = subprocess.run(
        [sys.executable, "-c", OWNER, str(path), verb, str(delay_s)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert owner.returncode == -signal.SIGKILL, owner.stderr

    async with SqliteAdapter(path, cluster="test", replica_set="shop") as successor:
        doubts = await successor.recover()
        await (successor.commit(attempt(1)) if verb == "commit" else successor.rollback(attempt(1)))
        if verb == "rollback":
            assert dump(path) == before
            assert await successor.applied() == Position(0)
        else:
            assert dump(path) != before
            assert await successor.applied() == Position(1)
        assert len(doubts) <= 1
        assert await successor.recover() == []


async def test_a_file_that_is_no_database_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear reader, this is not a database at all" * 100)

    with pytest.raises(ConfigError, match="is not a database"):
        await SqliteAdapter(tmp_path / "letter.txt", cluster="c", replica_set="s").start()

    assert (tmp_path / "letter.txt").read_text().startswith("dear reader")


async def test_a_locked_file_is_a_no_that_may_be_tried_again(path: Path) -> None:
    async with open_adapter(path) as adapter:
        adapter._connection.execute("pragma busy_timeout = 50")
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("begin immediate")
        with pytest.raises(ResourceRejected, match="locked"):
            await adapter.prepare(epoch(1, member("t1", Update("plain", {"id": 1}, {"w": "x"}))))
        holder.execute("rollback")
        holder.close()

        response = await adapter.prepare(epoch(1, member("t1", Update("plain", {"id": 1}, {"w": "x"}))))
        assert response.votes[0].rows == (1,)
