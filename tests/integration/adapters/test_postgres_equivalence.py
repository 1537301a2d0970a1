"""An epoch ends like its members run one by one, whatever is batched: random members on few rows, many violations.

The reference is written apart from the adapter: each member is a transaction of its own, plain SQL, in order.
"""

import random
from typing import Any

import asyncpg
import pytest

from adapters import PostgresAdapter
from adapters.changes import Change, Delete, Insert, Member, Statement, Update, Upsert
from tests.contract.harness import PostgresDatabase, attempt, entry, epoch, member

SCHEMA = """
create schema {schema};
create table {schema}.parent (
    id int primary key, code int unique, bal int not null check (bal between 0 and 20), u2 int, u3 int,
    constraint u2_late unique (u2) deferrable initially deferred,
    constraint u3_soon unique (u3) deferrable initially immediate);
create table {schema}.child (id int primary key, parent int references {schema}.parent (id),
    late int references {schema}.parent (id) deferrable initially deferred, bal int not null default 0);
create table {schema}.branch (id int primary key, up int references {schema}.branch (id), bal int not null default 0);
create table {schema}.owned (id int primary key, parent int references {schema}.parent (id) on delete cascade,
    code int references {schema}.parent (code) on update cascade on delete set null, bal int not null default 0);
create table {schema}.alone (id int primary key, bal int not null check (bal >= -3));
create table {schema}.noisy (id int primary key, bal int not null default 0);
create function {schema}.echo() returns trigger language plpgsql as $$
    begin update {schema}.alone set bal = bal + 1 where id = new.id; return new; end $$;
create trigger echo after insert or update on {schema}.noisy for each row execute function {schema}.echo();
insert into {schema}.parent select n, n, 10, n, n from generate_series(1, 6) n;
insert into {schema}.child select n, n, n, 0 from generate_series(1, 5) n;
insert into {schema}.alone select n, 0 from generate_series(1, 8) n;
insert into {schema}.branch values (1, null, 0), (2, 1, 0);
insert into {schema}.owned values (1, 1, 1, 0), (2, 2, 2, 0);
"""
TABLES = ["parent", "child", "branch", "owned", "alone", "noisy"]
COLUMNS: dict[str, list[str]] = {
    "parent": ["code", "bal", "u2", "u3"],
    "child": ["parent", "late", "bal"],
    "branch": ["up", "bal"],
    "owned": ["parent", "code", "bal"],
    "alone": ["bal"],
    "noisy": ["bal"],
}


def random_change(dice: random.Random) -> Change:
    table = dice.choices(TABLES, weights=[4, 3, 2, 2, 5, 1])[0]
    key = {"id": dice.randint(1, 10)}
    columns = COLUMNS[table]

    def value(column: str) -> int | None:
        if column == "bal":
            return dice.randint(-2, 12)
        return dice.randint(1, 8) if dice.random() < 0.9 else None

    match dice.choices(["add", "set", "insert", "upsert", "delete", "sql"], weights=[8, 4, 4, 2, 3, 1])[0]:
        case "add":
            return Update(f"{{schema}}.{table}", key, add={"bal": dice.randint(-3, 3)})
        case "set":
            column = dice.choice(columns)
            return Update(f"{{schema}}.{table}", key, values={column: value(column)})
        case "insert":
            return Insert(f"{{schema}}.{table}", {**key, **{column: value(column) for column in columns}})
        case "upsert":
            return Upsert(f"{{schema}}.{table}", key, {column: value(column) for column in columns})
        case "delete":
            return Delete(f"{{schema}}.{table}", key)
        case _:
            low = dice.randint(1, 8)
            return Statement(
                f"update {{schema}}.{table} set bal = bal + $1 where id between $2 and $3", (1, low, low + 2)
            )


def waiting_change(dice: random.Random) -> Change:
    """One that leaves a constraint open which may wait, or makes one good."""
    row, value = {"id": dice.randint(1, 10)}, dice.choice([None, *range(1, 9)])
    match dice.randrange(5):
        case 0:
            return Insert("{schema}.child", {**row, "parent": None, "late": value, "bal": 0})
        case 1:
            return Update("{schema}.child", row, {"late": value})
        case 2:
            return Insert("{schema}.parent", {**row, "code": None, "bal": 1, "u2": None, "u3": None})
        case 3:
            return Delete("{schema}.parent", row)
        case _:
            return Update("{schema}.parent", row, {dice.choice(["u2", "u3"]): value})


def in_schema(change: Change, schema: str) -> Change:
    if isinstance(change, Statement):
        return Statement(change.sql.format(schema=schema), change.args)
    match change:
        case Insert(table, values):
            return Insert(table.format(schema=schema), values)
        case Upsert(table, key, values):
            return Upsert(table.format(schema=schema), key, values)
        case Delete(table, key):
            return Delete(table.format(schema=schema), key)
        case Update(table, key, values, add):
            return Update(table.format(schema=schema), key, values, add)


async def by_hand(connection: asyncpg.Connection, change: Change) -> int:
    def numbered(names: dict[str, Any], start: int = 1) -> list[str]:
        return [f"{name} = ${place}" for place, name in enumerate(names, start)]

    match change:
        case Statement(sql, args):
            tag = await connection.execute(sql, *args)
        case Insert(table, values):
            places = ", ".join(f"${n}" for n in range(1, len(values) + 1))
            tag = await connection.execute(
                f"insert into {table} ({', '.join(values)}) values ({places})", *values.values()
            )
        case Upsert(table, key, values):
            row = {**key, **values}
            places = ", ".join(f"${n}" for n in range(1, len(row) + 1))
            updates = ", ".join(f"{name} = excluded.{name}" for name in values)
            sql = f"insert into {table} ({', '.join(row)}) values ({places}) on conflict (id) do update set {updates}"
            tag = await connection.execute(sql, *row.values())
        case Delete(table, key):
            tag = await connection.execute(f"delete from {table} where id = $1", key["id"])
        case Update(table, key, values, add):
            sets = numbered(values) + [f"{name} = {name} + ${n}" for n, name in enumerate(add, len(values) + 1)]
            sql = f"update {table} set {', '.join(sets)} where id = ${len(values) + len(add) + 1}"
            tag = await connection.execute(sql, *values.values(), *add.values(), key["id"])
    return int(tag.rsplit(" ", 1)[-1])


async def one_by_one(connection: asyncpg.Connection, members: list[Member]) -> list[tuple[int, ...] | None]:
    outcomes: list[tuple[int, ...] | None] = []
    for each in members:
        outcome: tuple[int, ...] | None
        try:
            async with connection.transaction():
                outcome = tuple([await by_hand(connection, in_schema(change, "theirs")) for change in each.changes])
        except asyncpg.IntegrityConstraintViolationError:
            outcome = None
        outcomes.append(outcome)
    return outcomes


async def state(connection: asyncpg.Connection, schema: str) -> list[list[tuple[Any, ...]]]:
    return [
        [tuple(row) for row in await connection.fetch(f"select * from {schema}.{table} order by id")]
        for table in TABLES
    ]


async def compare(database: PostgresDatabase, unproved_adapter: PostgresAdapter, seed: int, epochs: int) -> None:
    dice = random.Random(seed)
    connection = await asyncpg.connect(database.dsn)
    for schema in ("ours", "theirs"):
        await connection.execute(SCHEMA.replace("{schema}", schema))
    await database.provision()
    fast = 0
    for number in range(1, epochs + 1):
        size = dice.choice([1, 4, 16, 40])
        changes = [[random_change(dice) for _ in range(dice.choice([1, 1, 1, 2, 4]))] for _ in range(size)]
        mood = dice.random()
        if mood < 0.2:
            changes = [
                [waiting_change(dice) for _ in range(dice.choice([1, 1, 2]))] for _ in range(dice.choice([2, 3]))
            ]
        elif mood < 0.6:  # mostly harmless, so that the fast path is taken too
            changes = [[Update("{schema}.alone", {"id": dice.randint(1, 10)}, add={"bal": 1})] for _ in range(size)]
            changes += [[random_change(dice)]]
        members = [member(f"t{place}", *each) for place, each in enumerate(changes)]
        ours = [member(each.tx, *(in_schema(change, "ours") for change in each.changes)) for each in members]

        response = await unproved_adapter.prepare(epoch(number, *ours))
        decided = dice.random() < 0.8
        await (unproved_adapter.commit if decided else unproved_adapter.rollback)(attempt(number))
        if not decided:
            accepted = [each for each, vote in zip(ours, response.votes, strict=True) if vote.excluded is None]
            assert (await unproved_adapter.apply([entry(number, *accepted)])).failed is None
        expected = await one_by_one(connection, members)

        found = [vote.rows if vote.excluded is None else None for vote in response.votes]
        assert found == expected, f"seed {seed}, epoch {number}: {[m.changes for m in members]}"
        assert await state(connection, "ours") == await state(connection, "theirs"), f"seed {seed}, epoch {number}"
        fast += None not in expected
    assert 0 < fast < epochs, "both paths must be met"
    await connection.close()


async def test_epochs_end_like_their_members_one_by_one(
    database: PostgresDatabase, unproved_adapter: PostgresAdapter
) -> None:
    await compare(database, unproved_adapter, seed=1, epochs=60)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 7))
async def test_a_thousand_epochs_end_like_their_members_one_by_one(
    database: PostgresDatabase, unproved_adapter: PostgresAdapter, seed: int
) -> None:
    await compare(database, unproved_adapter, seed, epochs=200)
