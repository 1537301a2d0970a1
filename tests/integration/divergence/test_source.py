"""The Spark data source `replica`, as a user's own notebook meets it."""

import sqlite3
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql import functions as f

from replication.divergence.read.rows import RowsRequest, Where, postgres_query
from replication.divergence.read.session import register
from replication.divergence.read.snapshots import SnapshotBarrier
from replication.tables.buckets import HashBuckets, KeyRange, RangeBuckets
from replication.tables.endpoints import Engine, Key, SnapshotHandle
from replication.tables.schema import Column, TableSchema, ValueKind
from tests.integration.divergence.conftest import Databases

TABLE = (
    "CREATE TABLE accounts (id bigint PRIMARY KEY, name text, balance numeric, rate float8, open boolean, since date, "
    "at timestamptz, raw bytea, doc jsonb)",
    "INSERT INTO accounts SELECT i, 'name ' || i, i * 1.5, i / 4.0, i % 2 = 0, '2024-01-01'::date + i, "
    "'2024-01-01 12:00Z', '\\x01', '{\"a\": 1}' FROM generate_series(1, 1000) i",
    "ANALYZE accounts",
)


@pytest.fixture(autouse=True)
def registered(spark: SparkSession) -> None:
    register(spark)


def config(databases: Databases, folder: Path) -> str:
    replicas = "".join(
        f'[[replica_set.replica]]\nname = "{e.name}"\nbroker = "b1"\ndsn = "{e.dsn}"\n' for e in databases.endpoints
    )
    file = folder / "tops.toml"
    file.write_text(
        '[cluster]\nname = "shop"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:7420"\ndata = "data"\n'
        f'[[replica_set]]\nname = "shop"\npolicy = "quorum"\ntables = ["accounts"]\n{replicas}'
    )
    return str(file)


def accounts(databases: Databases) -> DataFrameReader:
    reader = databases.spark.read.format("replica").option("dsn", databases.endpoints[0].dsn)
    return reader.option("table", "accounts")


async def test_a_table_of_a_set_is_a_frame_in_sparks_own_types(databases: Databases, tmp_path: Path) -> None:
    await databases.everywhere(*TABLE)
    reader = databases.spark.read.format("replica").option("config", config(databases, tmp_path))

    frame = reader.option("set", "shop").option("replica", "r2").option("table", "accounts").load()

    assert frame.count() == 1000
    row = frame.where(f.col("id") == 7).collect()[0]
    assert row.asDict() == {
        "id": 7,
        "name": "name 7",
        "balance": "10.5",
        "rate": 1.75,
        "open": False,
        "since": date(2024, 1, 8),
        "at": datetime(2024, 1, 1, 12, tzinfo=UTC).replace(tzinfo=None),
        "raw": b"\x01",
        "doc": '{"a": 1}',
    }


async def test_every_row_is_in_exactly_one_partition(databases: Databases) -> None:
    await databases.everywhere(*TABLE, "INSERT INTO accounts (id) VALUES (-5), (99999)")
    reader = (
        databases.spark.read.format("replica").option("dsn", databases.endpoints[0].dsn).option("table", "accounts")
    )

    ids = [row.id for row in reader.option("partitions", "7").load().select("id").collect()]

    assert sorted(ids) == [-5, *range(1, 1001), 99999]


async def test_filters_and_columns_run_in_the_database(databases: Databases) -> None:
    await databases.everywhere(*TABLE)
    reader = (
        databases.spark.read.format("replica").option("dsn", databases.endpoints[0].dsn).option("table", "accounts")
    )

    narrow = reader.option("columns", "id, name").load()
    found = narrow.where((f.col("id") > 990) & (f.col("name") != "name 995")).collect()

    assert narrow.columns == ["id", "name"]
    assert [row.id for row in found] == [991, 992, 993, 994, 996, 997, 998, 999, 1000]
    assert narrow.where(f.col("name") == "name 3").count() == 1
    plan = narrow.where(f.col("id") > 990)._jdf.queryExecution().executedPlan().toString()
    assert " Filter " not in plan


async def test_all_partitions_read_the_snapshot_they_are_given(databases: Databases) -> None:
    await databases.everywhere(*TABLE)
    barrier = SnapshotBarrier()
    handles = await barrier.open(databases.endpoints[:1])
    await databases.on("r1", "DELETE FROM accounts")
    reader = (
        databases.spark.read.format("replica").option("dsn", databases.endpoints[0].dsn).option("table", "accounts")
    )

    inside = reader.option("snapshot", handles["r1"].snapshot or "").option("partitions", "3").load().count()
    await barrier.release()

    assert inside == 1000
    assert accounts(databases).load().count() == 0


async def test_canonical_form_is_text_that_all_databases_agree_on(databases: Databases, tmp_path: Path) -> None:
    await databases.on("r1", "CREATE TABLE t (id bigint PRIMARY KEY, n numeric)", "INSERT INTO t VALUES (1, 1.500)")
    path = tmp_path / "t.db"
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("CREATE TABLE t (id integer PRIMARY KEY, n numeric)")
        connection.execute("INSERT INTO t VALUES (1, 1.5)")
    connection.close()

    rows = []
    for dsn in (databases.endpoints[0].dsn, f"sqlite:///{path}"):
        reader = databases.spark.read.format("replica").option("dsn", dsn).option("table", "t")
        rows.append(reader.option("form", "canonical").load().select("id", "n").collect())
        assert reader.load().count() == 1

    assert rows[0] == rows[1]


def test_wrong_options_are_refused_by_name(spark: SparkSession, tmp_path: Path) -> None:
    for options, message in (
        ({"table": "t"}, 'set the option "dsn"'),
        ({"dsn": "postgresql://x"}, 'set the option "table"'),
        ({"dsn": "oracle://x", "table": "t"}, "'oracle' is no known database"),
        ({"set": "shop", "replica": "r9", "table": "t", "config": str(tmp_path / "none.toml")}, "No such file"),
    ):
        with pytest.raises(PySparkException, match=message):
            spark.read.format("replica").options(**options).load()


def request(where: Where, *, native: bool = True, keys: tuple[str, ...] = ("id",)) -> RowsRequest:
    columns = (Column("id", "bigint", ValueKind.INTEGER, False), Column("name", "text", ValueKind.TEXT))
    schema = TableSchema(Engine.POSTGRES, "public", "t", columns, keys, 10)
    handle = SnapshotHandle("r1", "postgresql://x", None, None, datetime.now(UTC))
    buckets = RangeBuckets(10) if keys == ("id",) else HashBuckets(16)
    return RowsRequest(handle, schema, columns, keys, buckets, native, where)


def test_key_ranges_buckets_and_keys_are_part_of_the_statement() -> None:
    key: Key = ("7",)

    assert "BETWEEN tops_low AND tops_high" in postgres_query(request(Where(ranges=(KeyRange(1, 5),))))
    assert "= ANY ('{3,5}'::int8[])" in postgres_query(request(Where(buckets=(3, 5)), keys=("name",)))
    assert "('7')" in postgres_query(request(Where(keys=(key,))))
    assert "ctid >= '(10,0)'::tid" in postgres_query(request(Where(blocks=(10, 20))))
