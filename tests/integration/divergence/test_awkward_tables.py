"""Tables as they are found in the wild: names, keys and settings that a statement can stumble over."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from replication.divergence.check.options import Method
from replication.divergence.results.model import Verdict
from replication.tables.endpoints import ReplicaEndpoint
from replication.tables.errors import CheckRejected
from tests.integration.divergence.conftest import QUICK, Databases, kinds

METHODS = [Method.NATIVE, Method.CANONICAL]


def file(path: Path, *statements: str) -> ReplicaEndpoint:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return ReplicaEndpoint(path.stem, f"sqlite:///{path}")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", ["int PRIMARY KEY", "text PRIMARY KEY"])
async def test_columns_may_be_called_what_the_statements_call_theirs(
    databases: Databases, method: Method, key: str
) -> None:
    names = ["k", "low", "high", "k0", "bucket", "rows", "total", "wanted_range", "wanted_key", "rows_of_table", "seed"]
    columns = ", ".join(f"{name} int" for name in names)
    await databases.everywhere(
        f"CREATE TABLE t (id {key}, {columns})",
        f"INSERT INTO t SELECT i, {', '.join('i' for _ in names)} FROM generate_series(1, 3000) i",
        "ANALYZE t",
    )
    for number, name in enumerate(names):
        await databases.on("r2", f"UPDATE t SET {name} = -1 WHERE id = '{number * 100 + 7}'")

    result = await databases.compare("t", options=replace(QUICK, method=method))

    expected = {((str(i * 100 + 7),), "r2", "changed", (name,)) for i, name in enumerate(names)}
    assert kinds(databases.differences(result)) == expected


async def test_tables_whose_names_look_alike_are_compared_each(databases: Databases) -> None:
    """A dot inside a name, a schema of that name, quotes, and names that would be one file."""
    tables = ['"shop.items"', "shop.items", "shop_items", '"shop items"', '"say ""hi"""', '"Items"', "items"]
    await databases.everywhere(
        "CREATE SCHEMA shop",
        *(f"CREATE TABLE {t} (id int PRIMARY KEY, v int)" for t in tables),
        *(f"INSERT INTO {t} VALUES (1, 1), (2, 2)" for t in tables),
    )
    for table in tables:
        await databases.on("r2", f"UPDATE {table} SET v = -1 WHERE id = 2")

    result = await databases.compare()

    found = databases.differences(result)
    assert len(found) == len({d.table for d in found}) == len(result.tables) == len(tables)
    assert {'"shop.items"', "shop.items"} <= {d.table for d in found}


async def test_a_backslash_in_a_key_is_one_whatever_the_server_takes_it_for(databases: Databases) -> None:
    name = databases.endpoints[0].dsn.rpartition("/")[2].partition("?")[0]
    await databases.everywhere(
        "CREATE TABLE t (k text PRIMARY KEY, v int)",
        r"INSERT INTO t VALUES ('a\b', 1), ('c''\', 2)",
        f"ALTER DATABASE {name} SET standard_conforming_strings = off",
    )
    await databases.on("r3", "UPDATE t SET v = -v")

    found = databases.differences(await databases.compare("t"))

    assert kinds(found) == {((key,), "r3", "changed", ("v",)) for key in ("a\\b", "c'\\")}


async def test_time_limits_for_applications_do_not_end_a_check(databases: Databases) -> None:
    name = databases.endpoints[0].dsn.rpartition("/")[2].partition("?")[0]
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 100000) i",
        f"ALTER DATABASE {name} SET statement_timeout = 5",
        f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = 5",
    )

    assert (await databases.compare("t")).verdict is Verdict.EQUAL


@pytest.mark.parametrize("method", METHODS)
async def test_rows_of_an_inherited_table_that_share_a_key_are_not_taken_for_one(
    databases: Databases, method: Method
) -> None:
    """A child does not share its parent's key. Which of two rows is read last must not decide."""
    await databases.everywhere(
        "CREATE TABLE parent (id int PRIMARY KEY, v text)",
        "CREATE TABLE child () INHERITS (parent)",
        "ALTER TABLE child ADD PRIMARY KEY (id)",
        "INSERT INTO parent VALUES (1, 'b')",
        "INSERT INTO child VALUES (1, 'a')",
    )
    options = replace(QUICK, method=method)
    assert (await databases.compare("parent", options=options)).verdict is Verdict.EQUAL
    await databases.on("r2", "UPDATE ONLY parent SET v = 'c'")

    with pytest.raises(CheckRejected, match=r"rows with the key \('1',\) can't be told apart"):
        await databases.compare("parent", options=options)


async def test_a_null_that_only_a_child_allows_is_seen(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE parent (id int PRIMARY KEY, v text NOT NULL, w int)",
        "CREATE TABLE child () INHERITS (parent)",
        "ALTER TABLE child ALTER v DROP NOT NULL",
        "INSERT INTO child VALUES (1, NULL, 1), (2, NULL, 2)",
    )
    assert (await databases.compare("parent")).verdict is Verdict.EQUAL
    await databases.on("r2", "UPDATE child SET w = 3 WHERE id = 1")

    found = databases.differences(await databases.compare("parent"))

    assert kinds(found) == {(("1",), "r2", "changed", ("w",))}


async def test_a_key_that_is_null_in_sqlite_is_refused(databases: Databases, tmp_path: Path) -> None:
    table = "CREATE TABLE t (id bigint PRIMARY KEY, v int)"
    await databases.on("r1", table, "INSERT INTO t VALUES (1, 1)")
    second = file(tmp_path / "second.db", table, "INSERT INTO t VALUES (1, 1), (NULL, 5), (NULL, 6)")

    with pytest.raises(CheckRejected, match=r"rows with the key \(None,\) can't be told apart"):
        await databases.compare("t", endpoints=[databases.endpoints[0], second])


async def test_long_keys_are_the_same_in_every_database(databases: Databases, tmp_path: Path) -> None:
    key, raw = "k" * 1500, "ab" * 1100
    await databases.on(
        "r1",
        "CREATE TABLE t (k text, r bytea, v int, PRIMARY KEY (k, r))",
        f"INSERT INTO t VALUES ('{key}', decode('{raw}', 'hex'), 1), ('{key}x', decode('{raw}', 'hex'), 2)",
    )
    second = file(
        tmp_path / "second.db",
        "CREATE TABLE t (k text, r blob, v int, PRIMARY KEY (k, r))",
        f"INSERT INTO t VALUES ('{key}', x'{raw}', 1), ('{key}x', x'{raw}', 3)",
    )

    found = databases.differences(await databases.compare("t", endpoints=[databases.endpoints[0], second]))

    assert kinds(found) == {((key + "x", raw), "second", "changed", ("v",))}


async def test_values_that_only_look_equal_in_the_other_database_are_not(databases: Databases, tmp_path: Path) -> None:
    await databases.on(
        "r1",
        "CREATE TABLE t (id int PRIMARY KEY, flag int, n int, x numeric, day date, txt text)",
        "INSERT INTO t VALUES (1, 2, 12, 12, '2024-01-01', ''), (2, 1, 12, 12, 'infinity', ''), (3, 0, 0, 0, NULL, '')",
    )
    second = file(
        tmp_path / "second.db",
        "CREATE TABLE t (id int PRIMARY KEY, flag boolean, n int, x numeric, day date, txt text)",
        "INSERT INTO t VALUES (1, 1, '١٢', '١٢', '2024-01-01', ''), (2, 1, 12, 12, 'infinity', ''), "
        "(3, 0, 0, 0, NULL, NULL)",
    )

    found = databases.differences(await databases.compare("t", endpoints=[databases.endpoints[0], second]))

    assert {(d.key, d.columns) for d in found} == {(("1",), ("flag", "n", "x")), (("3",), ("txt",))}


@pytest.mark.parametrize("method", METHODS)
async def test_documents_that_no_parser_likes_are_compared(databases: Databases, method: Method) -> None:
    deep = "[" * 3000 + "1" + "]" * 3000
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, doc jsonb, plain json)",
        "INSERT INTO t VALUES (1, '[1]', '[1]'), (3, '[1]', '[1]')",
        f"INSERT INTO t VALUES (2, '{deep}', '[\"\\u0000\"]')",
    )
    options = replace(QUICK, method=method)
    assert (await databases.compare("t", options=options)).verdict is Verdict.EQUAL
    await databases.on("r2", f"UPDATE t SET doc = '{deep.replace('1', '2')}' WHERE id = 2")
    await databases.on("r3", "UPDATE t SET plain = '[\"\\u0000\\u0000\"]' WHERE id = 2")

    found = databases.differences(await databases.compare("t", options=options))

    assert kinds(found) == {(("2",), "r2", "changed", ("doc",)), (("2",), "r3", "changed", ("plain",))}
