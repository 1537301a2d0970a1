"""Values of every kind arrive exactly, by row changes, statements and snapshots, and no text escapes its quotes."""

import json
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters import PostgresAdapter
from adapters.changes import (
    Change,
    Delete,
    Insert,
    InvalidChange,
    Statement,
    Update,
    Upsert,
    decode_member,
    encode_member,
)
from adapters.postgres.sql.literals import SqlType, array_literal, literal
from adapters.resource import Why
from tests.contract.harness import PostgresDatabase, attempt, entry, epoch, member

COLUMNS: dict[str, tuple[str, list[Any]]] = {
    "n": ("numeric", [Decimal("0.10"), Decimal("-12345678901234567890.123456789"), "NaN", "1e-30", 7]),
    "p": ("numeric(10,2)", [Decimal("12.50"), "99999999.99"]),
    "i2": ("smallint", [-32768, 32767, "5"]),
    "i8": ("bigint", [-(2**63), 2**63 - 1]),
    "f": ("double precision", [0.1, -1.5e300, "Infinity", 5]),
    "f4": ("real", [0.5, "NaN"]),
    "b": ("boolean", [True, False, "t"]),
    "t": (
        "text",
        [
            "",
            "NULL",
            "null",
            "it's",
            'say "hi"',
            "back\\slash",
            "{a,b}",
            "$1; drop table x --",
            "snow \N{SNOWMAN}",
            "tab\t\nnew",
        ],
    ),
    "v": ("varchar(5)", ["abcde"]),
    "c": ("char(4)", ["ab"]),
    "y": ("bytea", [b"", b"\x00\xff'\\", bytes(range(256))]),
    "u": ("uuid", [uuid.UUID(int=5), "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"]),
    "d": ("date", [date(2026, 2, 28), "infinity", "0044-03-15 BC"]),
    "tm": ("time", [time(23, 59, 59, 999999)]),
    "ts": ("timestamp", [datetime(2026, 1, 1, 12, 30, 0, 1)]),
    "tz": ("timestamptz", [datetime(2026, 1, 1, tzinfo=UTC), "2026-07-01 12:00:00.123456+05:30", "-infinity"]),
    "iv": ("interval", [timedelta(days=-3, microseconds=5), "1 year 2 mons"]),
    "j": ("json", [{"a": [1, None, "x"]}, "[1, 2 ]", [1], "null"]),
    "jb": ("jsonb", [{"k": 'it\'s \\ "q"'}, "3.14", [], 5, True]),
    "ia": ("int[]", [[1, None, 3], [], [[1, 2], [3, 4]], "{7}"]),
    "ta": ("text[]", [["a,b", 'q"', "\\", "", None, "NULL"], [["x"], ["y"]]]),
    "ba": ("bytea[]", [[b"\x00", b"'"]]),
    "ja": ("jsonb[]", [[{"a": 1}, [1, 2]]]),
    "m": ("mood", ["happy", "it's"]),
    "ma": ("mood[]", [["happy", None]]),
    "dm": ("positive", [5]),
    "r": ("int4range", ["[1,5)", "empty"]),
    "ip": ("inet", ["10.0.0.1/8"]),
    "bt": ("bit(5)", ["10101"]),
    "g": ("point", ["(1,2.5)"]),
    "bx": ("box", ["(1,1),(0,0)", "(2,2),(1,1)"]),
    "bxa": ("box[]", ["{(1,1),(0,0);(2,2),(1,1)}"]),
    "ttz": ("timetz", ["23:59:59.999999-07", time(1, 2, tzinfo=UTC)]),
    "iva": ("interval[]", [[timedelta(days=-3, microseconds=5)]]),
    "w": ("tsvector", ["'a':1 'b':2"]),
    "comp": ("pair_of", ['(1,"a, \\"b")']),
}
TYPES = """
create type mood as enum ('happy', 'it''s'); create domain positive as int check (value > 0);
create type pair_of as (a int, b text);
"""


async def make_table(database: PostgresDatabase, name: str) -> None:
    columns = ", ".join(f"{column} {sql_type}" for column, (sql_type, _) in COLUMNS.items())
    await database.sql(f"create table {name} (id int primary key, {columns})")


def rows() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"id": 0, **dict.fromkeys(COLUMNS)}]
    for column, (_, values) in COLUMNS.items():
        made += [{"id": len(made) + place, column: value} for place, value in enumerate(values)]
    return made


def over_the_wire(change: Change) -> Change:
    return decode_member(encode_member(member("t", change))).changes[0]


async def test_values_of_every_type_arrive_as_the_database_itself_would_write_them(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await database.sql(TYPES)
    for name in ("mine", "wired", "upserted", "updated", "reference", "copied"):
        await make_table(database, name)
    connection = await asyncpg.connect(database.dsn)
    made = rows()
    for row in made:
        await connection.execute("insert into updated (id) values ($1)", row["id"])
        column = next((name for name in row if name != "id"), None)
        if row["id"] == 0 or column is None:
            await connection.execute("insert into reference (id) values (0)")
        else:
            await by_type_text(connection, row["id"], column, row[column])
    changes: list[Change] = []
    for row in made:
        rest = {name: value for name, value in row.items() if name != "id"}
        changes += [Insert("mine", row), over_the_wire(Insert("wired", row))]
        changes += [Upsert("upserted", {"id": row["id"]}, rest), Update("updated", {"id": row["id"]}, rest)]

    response = await adapter.prepare(epoch(1, *(member(f"t{n}", change) for n, change in enumerate(changes))))
    await adapter.commit(attempt(1))

    assert [vote.excluded for vote in response.votes if vote.excluded] == []
    async with adapter.snapshot() as snapshot:
        copied = [row async for chunk in snapshot.rows("mine", chunk=7) for row in chunk]
    wired = msgspec.msgpack.decode(msgspec.msgpack.encode(copied))
    result = await adapter.apply([entry(n, member("c", Insert("copied", row))) for n, row in enumerate(wired, 2)])
    assert result.failed is None
    for name in ("mine", "wired", "upserted", "updated", "copied"):
        differing = await connection.fetch(
            f"select ours.id, ours::text, theirs::text from {name} ours full join reference theirs using (id) "
            f"where ours::text is distinct from theirs::text"
        )
        assert differing == [], name
    await connection.close()


async def by_type_text(connection: asyncpg.Connection, row: int, column: str, value: Any) -> None:
    """The reference: asyncpg's own encoding where it has one, the type's text otherwise."""
    sql_type = COLUMNS[column][0]
    if isinstance(value, str) or sql_type in ("json", "jsonb", "jsonb[]", "bytea[]", "mood[]"):
        if sql_type in ("json", "jsonb") and not isinstance(value, str):
            value = json.dumps(value)
        elif sql_type == "jsonb[]":
            await connection.execute(
                "insert into reference (id, ja) values ($1, array[$2::jsonb, $3::jsonb])",
                row,
                json.dumps(value[0]),
                json.dumps(value[1]),
            )
            return
        elif sql_type == "bytea[]":
            await connection.execute("insert into reference (id, ba) values ($1, $2)", row, value)
            return
        elif sql_type == "mood[]":
            await connection.execute("insert into reference (id, ma) values ($1, array['happy', null]::mood[])", row)
            return
        await connection.execute(
            f"set timezone = 'UTC'; insert into reference (id, {column}) values ({row}, $tops${value}$tops$)"
        )
        return
    await connection.execute(f"insert into reference (id, {column}) values ($1, $2)", row, value)


async def test_keys_of_every_kind_find_their_row(database: PostgresDatabase, adapter: PostgresAdapter) -> None:
    keys: dict[str, list[Any]] = {
        "text": ["it's", "\\", '"'],
        "uuid": [uuid.UUID(int=1), str(uuid.UUID(int=2)).upper()],
        "numeric": [Decimal("1.50"), "2"],
        "timestamptz": [datetime(2026, 1, 1, tzinfo=UTC), "2026-01-02 00:00:00+05"],
        "bytea": [b"\x00", b"'"],
        "boolean": [True, False],
        "date": [date(2026, 1, 1)],
    }
    number = 0
    for sql_type, values in keys.items():
        table = f"key_{sql_type}"
        await database.sql(f"create table {table} (k {sql_type}, second int, v int not null, primary key (second, k))")
        for value in values:
            key = {"k": value, "second": 1}
            number += 1
            response = await adapter.prepare(
                epoch(
                    number,
                    member("a", Insert(table, {**key, "v": 1}), Update(table, key, add={"v": 1})),
                    member("b", Update(table, key, add={"v": 1}), Upsert(table, key, {"v": 9})),
                    member("c", Update(table, key, add={"v": 1}), Delete(table, key), Insert(table, {**key, "v": 5})),
                )
            )
            await adapter.commit(response.attempt)
            assert [vote.rows for vote in response.votes] == [(1, 1), (1, 1), (1, 1, 1)], (sql_type, value, response)
        assert await database.sql(f"select sum(v) from {table}") == [(5 * len(values),)]


async def test_two_spellings_of_one_key_are_one_row(database: PostgresDatabase, adapter: PostgresAdapter) -> None:
    same = uuid.uuid4()
    await database.sql(f"create table doc (id uuid primary key, v int); insert into doc values ('{same}', 0)")
    spellings = [same, str(same), str(same).upper(), same.hex]

    response = await adapter.prepare(
        epoch(1, *(member(f"t{n}", Update("doc", {"id": key}, add={"v": 1})) for n, key in enumerate(spellings)))
    )
    await adapter.commit(attempt(1))

    assert [vote.rows for vote in response.votes] == [(1,)] * 4
    assert await database.sql("select v from doc") == [(4,)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Update("acct", {"id": 1}, {"note": "nul \0"}), "NUL"),
        (Update("acct", {"id": 1}, {"note": {"a": 1}}), "dict"),
        (Update("acct", {"id": 1}, {"note": b"bytes"}), "bytes"),
        (Update("acct", {"id": 1}, {"bal": [1]}), "list"),
        (Statement("update acct set bal = $1", ()), "parameter"),
        (Update("acct", {"id": 1}, {"at": "now"}), "another time"),
        (Update("acct", {"id": 1}, {"at": "Today 12:00"}), "another time"),
        (Update("acct", {"id": 1}, {"times": "{now}"}), "another time"),
        (Update("acct", {"id": 1}, {"times": ["tomorrow"]}), "another time"),
        (Update("acct", {"id": 1}, {"during": "[yesterday,infinity)"}), "another time"),
        (Statement("update acct set at = $1", ("today",)), "another time"),
    ],
)
async def test_values_that_cannot_be_stored_are_refused_by_name(
    database: PostgresDatabase, adapter: PostgresAdapter, change: Change, words: str
) -> None:
    await database.sql(
        "alter table acct add column at timestamptz, add column times timestamptz[], add column during tstzrange"
    )

    response = await adapter.prepare(
        epoch(1, member("t1", change), member("t2", Update("acct", {"id": 1}, add={"bal": 1})))
    )

    rejected = response.votes[0].excluded
    assert rejected is not None
    assert (rejected.why, words in rejected.message) == (Why.INVALID, True), rejected
    assert response.votes[1].excluded is None


def test_half_a_character_is_refused_before_it_reaches_the_server() -> None:
    with pytest.raises(InvalidChange, match="surrogate"):
        literal("\ud800", TEXT)
    with pytest.raises(InvalidChange, match="surrogate"):
        array_literal(["a", "\ud800"], TEXT)


async def test_values_that_the_type_refuses_exclude_their_member(adapter: PostgresAdapter) -> None:
    wrong = [
        Update("acct", {"id": 1}, {"bal": "abc"}),
        Update("acct", {"id": 1}, {"bal": str(2**70)}),
        Update("acct", {"id": "x"}, {"bal": 1}),
    ]

    response = await adapter.prepare(epoch(1, *(member(f"t{n}", change) for n, change in enumerate(wrong))))

    assert [vote.excluded.sqlstate if vote.excluded else None for vote in response.votes] == ["22P02", "22003", "22P02"]


async def test_names_at_and_over_the_limit_and_look_alikes_reach_their_own_table(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    names = ["x" * 63, "\u0430cct", "Acct", "select", "a;b", "tops.position"]
    for name in names:
        await database.sql(f'create table "{name}" ("{name}" int primary key)')

    changes = [Insert(f'"{name}"', {name: 1}) for name in names]
    response = await adapter.prepare(epoch(1, *(member(f"t{n}", change) for n, change in enumerate(changes))))
    await adapter.commit(attempt(1))

    assert [vote.excluded for vote in response.votes] == [None] * len(names)
    for name in names:
        assert await database.sql(f'select count(*) from "{name}"') == [(1,)]


TEXT = SqlType("text", "S")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=20)
)
def test_no_text_escapes_its_literal(values: list[str | None], literal_server: tuple[Any, Any]) -> None:
    run, connection = literal_server

    array = run(connection.fetchval(f"select {array_literal(values, TEXT)}::text[]"))
    single = run(connection.fetchval(f"select {literal(values[0], TEXT)}::text"))

    assert array == values
    assert single == values[0]


async def test_lists_of_a_type_with_a_delimiter_of_its_own_arrive(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await database.sql("create table shapes (id int primary key, v box[])")

    boxes = ["(1,1),(0,0)", "(2,2),(1,1)"]
    response = await adapter.prepare(epoch(1, member("t1", Insert("shapes", {"id": 1, "v": boxes}))))
    await adapter.commit(response.attempt)

    assert await database.sql("select v[1]::text, v[2]::text from shapes") == [tuple(boxes)]


async def test_a_document_is_the_same_whether_or_not_it_came_over_the_wire(
    database: PostgresDatabase, adapter: PostgresAdapter
) -> None:
    await database.sql("create table doc (id int primary key, v jsonb, vs jsonb[])")
    document = {
        "amount": Decimal("12345678901234567890.10"),
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "for": timedelta(days=1),
        "id": uuid.UUID(int=1),
        "big": 2**63,
        "deep": [{"a": [time(1, 2)]}],
    }

    direct = Insert("doc", {"id": 1, "v": document, "vs": [document]})
    wired = over_the_wire(Insert("doc", {"id": 2, "v": document, "vs": [document]}))
    result = await adapter.apply([entry(1, member("t1", direct)), entry(2, member("t2", wired))])

    assert result.failed is None
    assert await database.sql("select count(distinct (v, vs)) from doc") == [(1,)]


async def test_all_spellings_of_a_key_share_one_version(database: PostgresDatabase) -> None:
    await database.sql(
        "create table priced (k numeric primary key, v int); insert into priced values (1.5, 0);"
        "create table padded (k char(5) primary key, v int); insert into padded values ('ab', 0);"
        "create table floating (k float8 primary key, v int); insert into floating values (0, 0)"
    )
    changes = [
        Update("priced", {"k": Decimal("1.50")}, {"v": 1}),
        Update("padded", {"k": "ab   "}, {"v": 1}),
        Update("floating", {"k": -0.0}, {"v": 1}),
        Update("public.acct", {"id": 1}, add={"bal": 1}),
    ]
    async with database.open(versioned=["priced", "public.padded", "floating", "acct"]) as adapter:
        await adapter.apply([entry(1, *(member(f"t{n}", change) for n, change in enumerate(changes)))])

        assert await adapter.version("priced", {"k": "1.5"}) == 1
        assert await adapter.version("padded", {"k": "ab"}) == 1
        assert await adapter.version("floating", {"k": 0}) == 1
        assert await adapter.version("acct", {"id": 1}) == 1
