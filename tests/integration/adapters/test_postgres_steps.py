"""The fast path's plan: what shares a statement, what may not, on the catalogue of a real database."""

import asyncpg
import pytest

from adapters.changes import Change, Delete, Insert, Statement, Update, Upsert
from adapters.postgres.apply.statements import Statements
from adapters.postgres.sql.steps import Step, plan, shape_of
from tests.contract.harness import AlwaysShip, PostgresDatabase

MORE = """
create table alone (id int primary key, v int);
create table tree (id int primary key, up int references tree (id));
create table loud (id int primary key, v int);
create function nothing() returns trigger language plpgsql as $$ begin return new; end $$;
create trigger nothing before insert on loud for each row execute function nothing();
create table folded (id int primary key, name text, low text generated always as (lower(name)) stored unique);
create table dated (at timestamptz primary key, v int);
create table codes (id varchar(3) primary key, v int);
"""


@pytest.fixture
async def steps(database: PostgresDatabase):  # type: ignore[no-untyped-def]
    await database.sql(MORE)
    connection = await asyncpg.connect(database.dsn)
    await connection.execute("create function tops.affected(int, bigint) returns void language sql as ''")
    statements = Statements(connection, frozenset(), prover=AlwaysShip)

    async def planned(*changes: Change) -> list[Step]:
        shapes = [shape_of(change) for change in changes]
        traits = [
            statements.known.get(shape) or await statements.traits(change, shape)
            for change, shape in zip(changes, shapes, strict=True)
        ]
        return plan(zip(range(len(changes)), traits, changes, strict=True))

    yield planned
    await connection.close()


def add(table: str, row: object) -> Update:
    key = {"at": row} if table == "dated" else {"id": row}
    return Update(table, key, add={"v": 1} if table != "acct" else {"bal": 1})


def sizes(steps: list[Step]) -> list[int]:
    return [len(step.changes) for step in steps]


async def test_updates_of_different_rows_are_one_statement(steps) -> None:  # type: ignore[no-untyped-def]
    assert sizes(await steps(*(add("acct", n) for n in range(64)))) == [64]


async def test_a_row_occurs_once_per_statement(steps) -> None:  # type: ignore[no-untyped-def]
    found = await steps(add("acct", 1), add("acct", 2), add("acct", 1), add("acct", 3), add("acct", "1"))

    assert sizes(found) == [3, 1, 1] or sizes(found) == [2, 2, 1]
    for step in found:
        assert len({int(change.key["id"]) for change in step.changes}) == len(step.changes)


async def test_updates_pass_inserts_of_other_tables_and_meet_again(steps) -> None:  # type: ignore[no-untyped-def]
    changes: list[Change] = []
    for n in range(10):
        changes += [
            add("acct", 2 * n),
            add("acct", 2 * n + 1),
            Insert("transfer", {"id": n, "acct": 2 * n, "amount": 1}),
        ]

    assert sizes(await steps(*changes)) == [20, 10]


@pytest.mark.parametrize(
    "changes",
    [
        # A value that one row gives up and another takes.
        [Update("acct", {"id": 1}, {"email": "x"}), Update("acct", {"id": 2}, {"email": "one"})],
        # The same, through a generated column.
        [Update("folded", {"id": 1}, {"name": "x"}), Update("folded", {"id": 2}, {"name": "X"})],
        # A child before its parent, and after.
        [Insert("transfer", {"id": 1, "acct": 9, "amount": 1}), Insert("acct", {"id": 9, "bal": 1})],
        # Rows of one table that refer to each other.
        [Insert("tree", {"id": 1, "up": 2}), Insert("tree", {"id": 2, "up": None})],
        # Parents that others may refer to.
        [Delete("acct", {"id": 1}), Delete("acct", {"id": 2})],
        # Triggers may do anything.
        [Insert("loud", {"id": 1}), Insert("loud", {"id": 2})],
        # Only the database knows whether these are one row.
        [add("dated", "2026-01-01 00:00+00"), add("dated", "2026-01-01 01:00+01")],
        # The other row's value decides whether this one may be inserted.
        [Upsert("acct", {"id": 8}, {"bal": 1, "email": "x"}), Upsert("acct", {"id": 9}, {"bal": 1, "email": "x"})],
    ],
)
async def test_changes_that_matter_to_each_other_run_in_their_order(steps, changes: list[Change]) -> None:  # type: ignore[no-untyped-def]
    found = await steps(*changes)

    assert [step.changes for step in found] == [[change] for change in changes]


async def test_nothing_moves_past_a_key_that_is_stored_without_its_blanks(steps) -> None:  # type: ignore[no-untyped-def]
    found = await steps(Delete("codes", {"id": "x"}), Insert("codes", {"id": "abc  "}), Delete("codes", {"id": "abc"}))

    assert sizes(found) == [1, 1, 1]


async def test_nothing_moves_past_a_statement(steps) -> None:  # type: ignore[no-untyped-def]
    between = Statement("update alone set v = 0")

    assert sizes(await steps(add("alone", 1), between, add("alone", 2))) == [1, 1, 1]
