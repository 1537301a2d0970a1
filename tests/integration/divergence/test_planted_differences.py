"""Every planted difference is found, with its class and columns, and nothing else is."""

from dataclasses import replace

import pytest

from replication.divergence.check.options import Method
from replication.divergence.results.model import Kind, Verdict
from tests.integration.divergence.conftest import QUICK, Databases, kinds

EVERY_TYPE = """
    CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
    CREATE DOMAIN positive AS int CHECK (value > 0);
    CREATE TABLE everything (
        id bigint PRIMARY KEY, small smallint, number int, big bigint, exact numeric, single real, double float8,
        flag boolean, label text, short varchar(40), padded char(12), raw bytea, day date, clock time, clock_tz timetz,
        moment timestamp, instant timestamptz, span interval, ident uuid, doc json, docb jsonb, feeling mood,
        sized positive, numbers int[], words text[], net inet, ranged int4range, money money, bits bit(8), path point,
        doubled int GENERATED ALWAYS AS (number * 2) STORED
    );
    INSERT INTO everything (id, small, number, big, exact, single, double, flag, label, short, padded, raw, day, clock,
        clock_tz, moment, instant, span, ident, doc, docb, feeling, sized, numbers, words, net, ranged, money,
        bits, path)
    SELECT i, i % 100, i, i * 10000000000, i * 1.10, i * 0.1, i * 0.01, i % 2 = 0, 'label ' || i, 'short ' || i,
        'pad' || i, decode(md5(i::text), 'hex'), '2024-01-01'::date + i % 1000, '10:00'::time + i * interval '1 second',
        '10:00+02'::timetz, '2024-01-01'::timestamp + i * interval '1 minute',
        '2024-01-01Z'::timestamptz + i * interval '1 minute', i * interval '1 hour', md5(i::text)::uuid,
        json_build_object('n', i), jsonb_build_object('n', i, 'list', array[1, i]), 'ok', i, array[i, i + 1],
        array['a', 'b' || i], '10.0.0.1'::inet + i % 1000, int4range(i, i + 10), i::numeric::money,
        (i % 256)::int::bit(8), point(i, i)
    FROM generate_series(1, 3000) AS i;
"""
CHANGES = {
    "small": "small + 1",
    "number": "number + 1",
    "big": "big + 4294967297",  # what the server's own bigint hash can't see
    "exact": "-exact",  # what the server's own numeric hash can't see
    "single": "single + 0.5",
    "double": "double * 1.0000000001",
    "flag": "NOT flag",
    "label": "label || ' '",
    "short": "upper(short)",
    "padded": "'other'",
    "raw": "raw || '\\x00'::bytea",
    "day": "day + 1",
    "clock": "clock + interval '1 microsecond'",
    "clock_tz": "'08:00+00'::timetz",  # the same instant, another zone: another value
    "moment": "moment + interval '1 microsecond'",
    "instant": "'infinity'",
    "span": "justify_hours(span)",  # equal to PostgreSQL, another value all the same
    "ident": "'00000000-0000-0000-0000-000000000001'::uuid",
    "doc": "'{\"n\": -1}'",
    "docb": "jsonb_set(docb, '{n}', to_jsonb(-(docb->>'n')::int))",
    "feeling": "'happy'",
    "sized": "sized + 1",
    "numbers": "array_append(numbers, NULL)",
    "words": "ARRAY[words[2], words[1]]",
    "net": "set_masklen(net, 24)",
    "ranged": "int4range(lower(ranged), NULL)",
    "money": "money * 2",
    "bits": "~bits",
    "path": "point(0, 0)",  # a type that has no hash at all
}


async def test_a_change_of_any_type_is_found_with_its_column(databases: Databases) -> None:
    await databases.everywhere(EVERY_TYPE)
    expected = set()
    for number, (column, change) in enumerate(CHANGES.items()):
        changed, nulled = 100 + number * 40, 101 + number * 40
        replica = f"r{number % 3 + 1}"
        await databases.on(replica, f"UPDATE everything SET {column} = {change} WHERE id = {changed}")
        await databases.on(replica, f"UPDATE everything SET {column} = NULL WHERE id = {nulled}")
        also = ("doubled",) if column == "number" else ()
        expected |= {((str(key),), replica, "changed", (column, *also)) for key in (changed, nulled)}
    await databases.on("r1", "DELETE FROM everything WHERE id IN (1, 3000, 777)")
    expected |= {((key,), "r1", "missing", ()) for key in ("1", "3000", "777")}
    await databases.on("r2", "INSERT INTO everything (id, label) VALUES (-5, 'x'), (3001, 'x'), (9000000000000, 'x')")
    expected |= {((key,), "r2", "extra", ()) for key in ("-5", "3001", "9000000000000")}

    result = await databases.compare("everything")

    assert kinds(databases.differences(result)) == expected
    assert result.verdict is Verdict.DIFFERENT
    assert result.exit_code == 1
    assert result.tables[0].method == "native"


async def test_what_is_written_differently_but_means_the_same_is_no_difference(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, n numeric, f float8, j jsonb, d json, at timestamptz, c char(10))"
    )
    for replica, n, f, j, d, at in (
        ("r1", "1.0", "0", '{"a": 1.0, "b": 2}', '{"a":1,"b":2}', "2024-01-01 12:00:00+02"),
        ("r2", "1.00", "-0", '{"b": 2, "a": 1.00}', '{ "b": 2, "a": 1 }', "2024-01-01 10:00:00Z"),
        ("r3", "1", "0", '{"a": 1, "b": 2}', '{"a":1,\n"b":2}', "2024-01-01 05:00:00-05"),
    ):
        await databases.on(
            replica,
            f"INSERT INTO t VALUES (1, {n}, '{f}', '{j}', '{d}', '{at}', 'x')",
            "INSERT INTO t (id, f) VALUES (2, 'NaN')",
        )

    result = await databases.compare("t")

    assert result.verdict is Verdict.EQUAL, databases.differences(result)
    assert result.exit_code == 0


async def test_with_three_versions_of_a_row_and_no_majority_the_reference_is_named(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    for replica in ("r1", "r2", "r3"):
        await databases.on(replica, f"INSERT INTO t VALUES (1, '{replica}')")

    found = databases.differences(await databases.compare("t"))

    assert [(d.replica, d.basis.value, d.reference) for d in found] == [
        ("r2", "first", ("r1",)),
        ("r3", "first", ("r1",)),
    ]


async def test_the_primary_is_right_against_the_majority(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'old')")
    await databases.on("r3", "UPDATE t SET v = 'new'")

    found = databases.differences(await databases.compare("t", options=replace(QUICK, primary="r3")))

    assert {(d.replica, d.kind, d.reference) for d in found} == {
        ("r1", Kind.CHANGED, ("r3",)),
        ("r2", Kind.CHANGED, ("r3",)),
    }


@pytest.mark.parametrize("method", ["native", "canonical"])
async def test_pairs_count_every_two_replicas(databases: Databases, method: str) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t SELECT i, i FROM generate_series(1, 5000) i"
    )
    await databases.on("r1", "UPDATE t SET v = -1 WHERE id <= 3")
    await databases.on("r2", "UPDATE t SET v = -2 WHERE id = 3")

    result = await databases.compare("t", options=replace(QUICK, method=Method(method)))

    assert result.tables[0].pairs == {"r1": {"r2": 3, "r3": 3}, "r2": {"r1": 3, "r3": 1}, "r3": {"r1": 3, "r2": 1}}


async def test_checksums_of_a_large_table_are_not_sorted_on_the_servers_disk(databases: Databases) -> None:
    """With little memory a small table is what a large one is otherwise."""
    await databases.everywhere(
        "SET work_mem = '64MB'",
        "CREATE TABLE t (id bigint PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 100000) i",
        "ANALYZE t",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET work_mem = ''256kB''', current_database()); END $$",
    )

    result = await databases.compare("t", options=replace(QUICK, method=Method.NATIVE))

    assert result.verdict is Verdict.EQUAL
    for endpoint in databases.endpoints:
        await databases.on(endpoint.name, "SELECT pg_stat_force_next_flush()", "SELECT pg_stat_clear_snapshot()")
        used = "SELECT temp_bytes FROM pg_stat_database WHERE datname = current_database()"
        assert (await databases.fetch(endpoint.name, used))[0]["temp_bytes"] == 0
