"""A check that says "equal" is right: the ways in which checkers have been fooled."""

import random
from dataclasses import replace

import asyncpg
import pytest

from replication.divergence.check.options import Method
from replication.divergence.results.model import Verdict
from replication.tables.buckets import HIGHEST, LOWEST, RangeBuckets, integer_buckets
from replication.tables.errors import CheckRejected
from tests.integration.divergence.conftest import QUICK, Databases, kinds

METHODS = [Method.NATIVE, Method.CANONICAL]
NUMBERS = "CREATE TABLE t (id bigint PRIMARY KEY, v bigint)"


@pytest.mark.parametrize("method", METHODS)
async def test_rows_on_both_sides_of_every_bucket_boundary_are_seen_once(databases: Databases, method: Method) -> None:
    await databases.everywhere(NUMBERS, "INSERT INTO t SELECT i, i FROM generate_series(1, 4000) i")
    cut = integer_buckets(4000, 1, 4000)
    edges = [bucket << cut.shift for bucket in range(1, cut.of(4000) + 1)]
    planted = sorted({edge + step for edge in edges for step in (-1, 0)})
    await databases.on("r2", f"UPDATE t SET v = v + 1 WHERE id IN ({', '.join(map(str, planted))})")

    result = await databases.compare("t", options=replace(QUICK, method=method))

    assert {d.key for d in databases.differences(result)} == {(str(key),) for key in planted}
    assert result.tables[0].rows == {"r1": 4000, "r2": 4000, "r3": 4000}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE t SET v = v + 1 WHERE id IN (10, 11)",  # two equal changes
        "UPDATE t SET v = CASE id WHEN 10 THEN 11 ELSE 10 END WHERE id IN (10, 11)",  # two rows swap their values
        "UPDATE t SET v = CASE id WHEN 10 THEN 9 WHEN 11 THEN 12 END WHERE id IN (10, 11)",  # the sum stays
        "UPDATE t SET v = NULL WHERE id IN (10, 11)",
        "DELETE FROM t WHERE id IN (10, 11)",
    ],
)
async def test_changes_that_would_cancel_out_do_not(databases: Databases, change: str, method: Method) -> None:
    await databases.everywhere(NUMBERS, "INSERT INTO t SELECT i, i FROM generate_series(1, 100) i")
    await databases.on("r2", change)

    result = await databases.compare("t", options=replace(QUICK, method=method))

    assert {d.key for d in databases.differences(result)} == {("10",), ("11",)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", ["bigint", "text"])
async def test_what_sparks_workers_read_in_parts_is_the_same(
    databases: Databases, monkeypatch: pytest.MonkeyPatch, key: str, method: Method
) -> None:
    monkeypatch.setattr("replication.divergence.check.table_check.ROWS_MAX", -1)
    monkeypatch.setattr("replication.divergence.check.table_check.PARTITION_ROWS", 400)
    await databases.everywhere(
        f"CREATE TABLE t (k {key} PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i FROM generate_series(-600, 600) i",
        "ANALYZE t",
    )
    await databases.on("r2", "UPDATE t SET v = 1000 WHERE v IN (-600, -1, 0, 600)", "DELETE FROM t WHERE v = 77")

    result = await databases.compare("t", options=replace(QUICK, method=method))

    changed = {((str(k),), "r2", "changed", ("v",)) for k in (-600, -1, 0, 600)}
    assert kinds(databases.differences(result)) == {*changed, (("77",), "r2", "missing", ())}


async def test_values_swapped_between_two_columns_are_seen(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, a int, b int)", "INSERT INTO t VALUES (1, 5, 6)")
    await databases.on("r3", "UPDATE t SET a = b, b = a")

    found = databases.differences(await databases.compare("t"))

    assert kinds(found) == {(("1",), "r3", "changed", ("a", "b"))}


async def test_a_null_that_moves_to_the_next_column_is_seen(databases: Databases) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, a text, b text)")
    for method in METHODS:
        await databases.on("r1", "INSERT INTO t VALUES (1, 'x', NULL) ON CONFLICT DO NOTHING")
        for replica in ("r2", "r3"):
            await databases.on(replica, "INSERT INTO t VALUES (1, NULL, 'x') ON CONFLICT DO NOTHING")

        found = databases.differences(await databases.compare("t", options=replace(QUICK, method=method)))

        assert kinds(found) == {(("1",), "r1", "changed", ("a", "b"))}


@pytest.mark.parametrize("method", METHODS)
async def test_rows_beyond_the_ends_of_the_other_side_are_seen(databases: Databases, method: Method) -> None:
    await databases.everywhere(NUMBERS, "INSERT INTO t SELECT i, i FROM generate_series(1, 3000) i", "ANALYZE t")
    far = [LOWEST, -7, 0, 3001, HIGHEST]
    await databases.on("r3", *(f"INSERT INTO t VALUES (({key + 1})::int8 - 1, 0)" for key in far[:-1]))
    await databases.on("r3", f"INSERT INTO t VALUES ({HIGHEST}, 0)")

    result = await databases.compare("t", options=replace(QUICK, method=method))

    assert kinds(databases.differences(result)) == {((str(key),), "r3", "extra", ()) for key in far}


async def test_an_empty_replica_lacks_every_row(databases: Databases) -> None:
    await databases.everywhere(NUMBERS, "INSERT INTO t SELECT i, i FROM generate_series(1, 2500) i")
    await databases.on("r1", "TRUNCATE t")

    result = await databases.compare("t")

    assert result.tables[0].counts == {"r1": {"missing": 2500}}


async def test_three_empty_replicas_are_equal(databases: Databases) -> None:
    await databases.everywhere(NUMBERS)

    assert (await databases.compare("t")).verdict is Verdict.EQUAL


KEYS = {
    "text": ("k text PRIMARY KEY", "'Key ' || i || ' é'", ["'ZZ'", "'aa'", "'ß'"]),
    "text in another order": ('k text COLLATE "C" PRIMARY KEY', "chr(64 + i % 26) || i", ["'_'", "'a'"]),
    "uuid": ("k uuid PRIMARY KEY", "md5(i::text)::uuid", ["'00000000-0000-0000-0000-000000000000'"]),
    "timestamptz": ("k timestamptz PRIMARY KEY", "'2024-01-01Z'::timestamptz + i * interval '1 ms'", ["'infinity'"]),
    "numeric": ("k numeric PRIMARY KEY", "i * 1.50", ["-0.001"]),
    "bytea": ("k bytea PRIMARY KEY", "decode(md5(i::text), 'hex')", ["'\\x00'"]),
    "composite": ("a int, k text, PRIMARY KEY (k, a)", "'k' || i % 7", []),
    "unique index": ("k int NOT NULL UNIQUE", "i", ["-1"]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KEYS)
async def test_keys_of_any_type(databases: Databases, kind: str, method: Method) -> None:
    columns, value, extra = KEYS[kind]
    names = "k, a, v" if "a int" in columns else "k, v"
    values = f"{value}, i, i" if "a int" in columns else f"{value}, i"
    await databases.everywhere(
        f"CREATE TABLE t ({columns}, v int)", f"INSERT INTO t ({names}) SELECT {values} FROM generate_series(1, 3000) i"
    )
    await databases.on("r1", "UPDATE t SET v = -1 WHERE v IN (1, 1500, 3000)")
    await databases.on("r2", "DELETE FROM t WHERE v = 2")
    await databases.on("r3", *(f"INSERT INTO t (k, v) VALUES ({key}, 0)" for key in extra))

    result = await databases.compare("t", options=replace(QUICK, method=method))

    assert result.tables[0].counts == {
        "r1": {"changed": 3},
        "r2": {"missing": 1},
        **({"r3": {"extra": len(extra)}} if extra else {}),
    }


async def test_text_that_a_collation_calls_equal_is_different(databases: Databases) -> None:
    try:
        await databases.everywhere(
            "CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    except asyncpg.FeatureNotSupportedError:
        pytest.skip("these servers are built without ICU, so they have no such collation")
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v text COLLATE nocase)",
        "INSERT INTO t VALUES (1, 'abc')",
    )
    await databases.on("r2", "UPDATE t SET v = 'ABC'")

    assert kinds(databases.differences(await databases.compare("t"))) == {(("1",), "r2", "changed", ("v",))}


async def test_floats_that_differ_in_the_last_bit_are_different(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, f float8, s real)", "INSERT INTO t VALUES (1, 0.3, 0.3)"
    )
    await databases.on("r2", "UPDATE t SET f = 0.1::float8 + 0.2::float8, s = 0.30000004")

    assert kinds(databases.differences(await databases.compare("t"))) == {(("1",), "r2", "changed", ("f", "s"))}


async def test_a_change_at_the_end_of_ten_megabytes_is_seen_and_not_carried_around(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v text, b bytea)",
        "INSERT INTO t VALUES (1, repeat('x', 10485760), decode(repeat('00', 10485760), 'hex'))",
    )
    await databases.on("r2", "UPDATE t SET v = left(v, -1) || 'y'")
    await databases.on("r3", "UPDATE t SET b = set_byte(b, 10485759, 1)")

    for method in METHODS:
        found = databases.differences(await databases.compare("t", options=replace(QUICK, method=method)))

        assert kinds(found) == {(("1",), "r2", "changed", ("v",)), (("1",), "r3", "changed", ("b",))}
        assert all(len(value or "") < 2000 for d in found for value in (d.actual or {}).values())


@pytest.mark.parametrize("method", METHODS)
async def test_a_text_that_spells_the_digest_of_a_long_one_is_not_taken_for_it(
    databases: Databases, method: Method
) -> None:
    await databases.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text, doc jsonb)")
    await databases.everywhere("INSERT INTO t VALUES (1, repeat('x', 2000))")
    digest = "repeat('x', 48) || '… [2000 bytes, sha256 ' || encode(sha256(convert_to(v, 'UTF8')), 'hex') || ']'"
    await databases.on("r2", f"UPDATE t SET v = {digest}")

    result = await databases.compare("t", options=replace(QUICK, method=method))

    assert kinds(databases.differences(result)) == {(("1",), "r2", "changed", ("v",))}


async def test_rows_that_a_policy_hides_from_the_reader_are_not_called_equal(databases: Databases) -> None:
    await databases.everywhere(
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t VALUES (1, 1)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "DROP ROLE IF EXISTS tenant",
        "CREATE ROLE tenant LOGIN PASSWORD 'x'",
        "GRANT SELECT ON t TO tenant",
    )
    await databases.on("r2", "UPDATE t SET v = 2")
    seen = [replace(e, dsn=f"postgresql://tenant:x@{e.dsn.partition('@')[2]}") for e in databases.endpoints]

    with pytest.raises(CheckRejected, match="row-level security"):
        await databases.compare("t", endpoints=seen)


@pytest.mark.parametrize("method", METHODS)
async def test_columns_whose_names_differ_in_case_only_are_two(databases: Databases, method: Method) -> None:
    await databases.everywhere(
        'CREATE TABLE t (id int PRIMARY KEY, v int, "V" int)', "INSERT INTO t VALUES (1, 5, 6), (2, 5, 6)"
    )
    await databases.on("r3", 'UPDATE t SET "V" = 5 WHERE id = 1')

    result = await databases.compare("t", options=replace(QUICK, method=method))

    assert kinds(databases.differences(result)) == {(("1",), "r3", "changed", ("V",))}


async def test_a_partitioned_table_is_read_in_all_its_partitions(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replication.divergence.check.table_check.PARTITION_ROWS", 100)
    await databases.everywhere(
        "CREATE TABLE t (k text PRIMARY KEY, v int) PARTITION BY HASH (k)",
        *(f"CREATE TABLE t{i} PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER {i})" for i in (0, 1)),
        "INSERT INTO t SELECT i, i FROM generate_series(1, 500) i",
        "ANALYZE t",
    )
    await databases.on("r2", "UPDATE t SET v = -1 WHERE v % 100 = 0")

    result = await databases.compare("t")

    assert {d.key for d in databases.differences(result)} == {(str(i * 100),) for i in range(1, 6)}


async def test_replica_names_that_begin_alike_are_not_mixed_up(databases: Databases) -> None:
    await databases.everywhere(NUMBERS, "INSERT INTO t VALUES (1, 1)")
    first, second, third = databases.endpoints
    renamed = [replace(first, name="n1"), replace(second, name="n10"), replace(third, name="n100")]
    await databases.on("r2", "UPDATE t SET v = 2")

    found = databases.differences(await databases.compare("t", endpoints=renamed))

    assert kinds(found) == {(("1",), "n10", "changed", ("v",))}


async def test_a_crowded_bucket_is_cut_again_before_it_is_read(databases: Databases) -> None:
    """One far key makes the buckets so wide that all other rows share one."""
    await databases.everywhere(
        NUMBERS, "INSERT INTO t SELECT i, i FROM generate_series(1, 40000) i", f"INSERT INTO t VALUES ({HIGHEST}, 0)"
    )
    await databases.on("r2", "UPDATE t SET v = 0 WHERE id = 20000")

    result = await databases.compare("t")

    assert result.tables[0].counts == {"r2": {"changed": 1}}
    assert result.tables[0].rows_read < 30_000


def test_every_key_is_in_the_range_of_its_own_bucket_and_of_no_other() -> None:
    generator = random.Random(1)
    for shift in (0, 1, 9, 31, 62, 63):
        cut = RangeBuckets(shift)
        for key in (LOWEST, -1, 0, 1, HIGHEST, *(generator.randint(LOWEST, HIGHEST) for _ in range(100))):
            own = cut.range_of(cut.of(key))
            assert own.low <= key <= own.high
            assert own.low >= LOWEST
            assert own.high <= HIGHEST
            assert cut.of(own.low) == cut.of(own.high) == cut.of(key)
