"""PostgreSQL and SQLite compared with each other: the same values in other clothes are equal, others are not."""

import sqlite3
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.divergence.read.snapshots import SnapshotBarrier
from replication.divergence.results.model import Kind, Verdict
from replication.tables.canonical import NotOfType, float_text, json_text, numeric_text, sqlite_text
from replication.tables.endpoints import ReplicaEndpoint
from replication.tables.schema import ValueKind
from tests.integration.divergence.conftest import Databases, kinds


def embedded(path: Path, *statements: str) -> ReplicaEndpoint:
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return ReplicaEndpoint("embedded", f"sqlite:///{path}")


async def test_equal_rows_are_equal_whatever_database_holds_them(databases: Databases, tmp_path: Path) -> None:
    await databases.on(
        "r1",
        "CREATE TABLE t (id bigint PRIMARY KEY, n numeric, f float8, s real, flag boolean, txt text, raw bytea, "
        "day date, at timestamptz, naive timestamp, ident uuid, doc jsonb)",
        "INSERT INTO t VALUES (1, 12.5, 0.1, 0.1, true, 'grün', '\\x00ff', '2024-02-29', '2024-01-01 12:00:00.5+02', "
        "'2024-01-01 12:00', '6ba7b810-9dad-11d1-80b4-00c04fd430c8', '{\"b\": [1, 2.50], \"a\": null}')",
        "INSERT INTO t (id, n, f) VALUES (2, 1e20, 1e300), (3, -0.0001, -1e-7), (4, 0, 123456789012345680)",
    )
    second = embedded(
        tmp_path / "second.db",
        "CREATE TABLE t (id integer PRIMARY KEY, n numeric, f double, s float4, flag boolean, txt text, raw blob, "
        "day date, at timestamptz, naive timestamp, ident uuid, doc json)",
        "INSERT INTO t VALUES (1, 12.50, 0.1, 0.1, 1, 'grün', x'00ff', '2024-02-29', '2024-01-01T10:00:00.500Z', "
        "'2024-01-01 12:00:00', '6BA7B810-9DAD-11D1-80B4-00C04FD430C8', '{\"a\":null,\"b\":[1.0,2.5]}')",
        "INSERT INTO t (id, n, f) VALUES (2, 100000000000000000000, 1e300), (3, -0.0001, -1e-7), "
        "(4, 0, 123456789012345680)",
    )

    result = await databases.compare("t", endpoints=[databases.endpoints[0], second])

    assert result.verdict is Verdict.EQUAL, databases.differences(result)
    assert result.tables[0].method == "canonical"


async def test_differences_between_engines_are_found_by_row_and_column(databases: Databases, tmp_path: Path) -> None:
    await databases.on(
        "r1",
        "CREATE TABLE t (id bigint PRIMARY KEY, v numeric, txt text)",
        "INSERT INTO t SELECT i, i * 0.5, 'row ' || i FROM generate_series(1, 3000) i",
    )
    second = embedded(
        tmp_path / "second.db",
        "CREATE TABLE t (id integer PRIMARY KEY, v numeric, txt text)",
        "WITH RECURSIVE s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < 3000) "
        "INSERT INTO t SELECT i, i * 0.5, 'row ' || i FROM s",
        "UPDATE t SET v = -v WHERE id = 17",
        "UPDATE t SET txt = 'not what it was' WHERE id = 2999",
        "DELETE FROM t WHERE id = 1024",
        "INSERT INTO t VALUES (-1, 0, 'x')",
        "UPDATE t SET v = 'twelve' WHERE id = 12",
    )

    found = databases.differences(await databases.compare("t", endpoints=[databases.endpoints[0], second]))

    assert kinds(found) == {
        (("17",), "embedded", "changed", ("v",)),
        (("2999",), "embedded", "changed", ("txt",)),
        (("1024",), "embedded", "missing", ()),
        (("-1",), "embedded", "extra", ()),
        (("12",), "embedded", "type", ("v",)),
    }
    assert [d.actual for d in found if d.kind is Kind.TYPE] == [
        {"id": "12", "v": "(not of the column's type) twelve", "txt": "row 12"}
    ]


async def test_text_keys_that_each_engine_sorts_its_own_way_are_matched(databases: Databases, tmp_path: Path) -> None:
    """Four real differences; a merge by sort order would see hundreds."""
    letters = ["a", "A", "ä", "-", "_", "z", "Z"]
    rows = [(f"{letters[i % 7]}{i}", i) for i in range(2000)]
    second = embedded(tmp_path / "second.db", "CREATE TABLE t (k text COLLATE NOCASE PRIMARY KEY, v int) WITHOUT ROWID")
    connection = sqlite3.connect(tmp_path / "second.db")
    with connection:
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(k, v if v > 3 else -1) for k, v in rows])
    connection.close()
    values = ", ".join(f"('{k}', {v})" for k, v in rows)
    await databases.on("r1", 'CREATE TABLE t (k text COLLATE "C" PRIMARY KEY, v int)', f"INSERT INTO t VALUES {values}")

    result = await databases.compare("t", endpoints=[databases.endpoints[0], second])

    assert result.tables[0].counts == {"embedded": {"changed": 4}}


@pytest.mark.parametrize("declared", ["text", "bigint"])
async def test_keys_that_are_not_of_their_columns_type_are_compared_too(
    databases: Databases, tmp_path: Path, declared: str
) -> None:
    table = f"CREATE TABLE t (id {declared} PRIMARY KEY NOT NULL, v int)"
    one, other = (
        replace(embedded(tmp_path / f"{name}.db", table, f"INSERT INTO t VALUES (x'ff', {v}), (5, 0)"), name=name)
        for name, v in (("one", 1), ("other", 2))
    )

    result = await databases.compare("t", endpoints=[one, other])

    assert [d.columns for d in databases.differences(result)] == [("v",)]


async def test_the_snapshot_of_an_embedded_database_is_one_moment(databases: Databases, tmp_path: Path) -> None:
    """A row that is written after the barrier is not half seen: it is not seen at all."""
    endpoint = embedded(tmp_path / "one.db", "CREATE TABLE t (id integer PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    barrier = SnapshotBarrier()
    handles = await barrier.open([endpoint])
    embedded(tmp_path / "one.db", "INSERT INTO t VALUES (2)")

    copy = sqlite3.connect(handles["embedded"].dsn.removeprefix("sqlite:///"))
    rows = copy.execute("SELECT id FROM t").fetchall()
    copy.close()
    await barrier.release()

    assert rows == [(1,)]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_text_reads_back_as_the_same_number(value: float) -> None:
    assert float(float_text(value)) == value


async def test_python_writes_numbers_as_postgresql_does(databases: Databases) -> None:
    doubles = [0.1, 1e14, 1e15, 1e16, 123456789012345678.0, 1e-4, 1e-5, 1.5e-300, -2.5, 5e-324, 1.7976931348623157e308]
    singles = [0.1, 1e5, 1e6, 16777216.0, 3.4028235e38, 1e-4, 1e-5, 1.1754944e-38]
    numerics = ["0", "-0.00", "1.50", "100", "1e30", "0.000001", "-12.340"]

    rows = await databases.fetch(
        "r1",
        "SELECT (SELECT array_agg(v::text ORDER BY n) FROM unnest($1::float8[]) WITH ORDINALITY AS d(v, n)), "
        "(SELECT array_agg(v::text ORDER BY n) FROM unnest($2::real[]) WITH ORDINALITY AS d(v, n)), "
        "(SELECT array_agg(trim_scale(v::numeric)::text ORDER BY n) "
        "FROM unnest($3::text[]) WITH ORDINALITY AS d(v, n))",
        doubles,
        singles,
        numerics,
    )

    assert [float_text(v) for v in doubles] == rows[0][0]
    assert [float_text(v, single=True) for v in singles] == rows[0][1]
    assert [numeric_text(Decimal(v)) for v in numerics] == rows[0][2]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ValueKind.INTEGER, "twelve"),
        (ValueKind.INTEGER, 1.5),
        (ValueKind.UUID, "no uuid"),
        (ValueKind.JSON, "{broken"),
        (ValueKind.TIMESTAMPTZ, 12),
        (ValueKind.TEXT, b"\xff"),
        (ValueKind.BOOLEAN, 7),
        (ValueKind.NUMERIC, "1_000"),
        (ValueKind.FLOAT4, 1e300),
        (ValueKind.DATE, "2024-01-01 10:00"),
        (ValueKind.TIME, "10:00+02:00"),
        (ValueKind.TIMESTAMP, "2024-01-01 10:00:00.123456789"),
    ],
)
def test_a_value_that_is_not_of_its_columns_type_is_marked(kind: ValueKind, value: object) -> None:
    assert isinstance(sqlite_text(kind, value), NotOfType)


def test_json_is_equal_by_meaning_only() -> None:
    assert json_text('{"b":1.0,"a":[1,2]}') == json_text('{"a": [1.00, 2], "b": 1}')
    assert json_text("[1,2]") != json_text("[2,1]")
    assert json_text('{"a":1}') != json_text('{"a":"1"}')
    assert json_text('{"a":1}') != json_text('{"a":-1}')
    assert json_text('{"a":12345678901234567890}') != json_text('{"a":12345678901234567891}')
    assert json_text('{"a":null}') != json_text("{}")
