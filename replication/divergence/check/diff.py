"""The Spark jobs of a check: canonical bucket checksums, and the row diff of all replicas at once."""

from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from replication.divergence.read.rows import BUCKET, RowsRequest
from replication.divergence.read.session import register
from replication.divergence.read.source import REPLICA, encode_plan
from replication.divergence.read.vault import vault
from replication.divergence.results.model import Suspect
from replication.tables.checksums import Checksum
from replication.tables.errors import CheckRejected

_HASH, _VERSIONS, _KEY = "tops_hash", "tops_versions", "tops_key"
_LOW_WORD = 0xFFFFFFFF


def canonical_rows(spark: SparkSession, requests: Sequence[RowsRequest]) -> DataFrame:
    """Read by Spark's workers."""
    register(spark)
    hidden = [vault.hidden(spark, request) for request in requests]
    return spark.read.format("replica").option("plan", encode_plan(hidden)).load()


def rows_at_hand(spark: SparkSession, rows: pa.Table) -> DataFrame:
    """Read already, and few: one partition needs no shuffle."""
    return spark.createDataFrame(rows).coalesce(1)


def bucket_checksums(rows: DataFrame, requests: Sequence[RowsRequest]) -> dict[str, dict[int, Checksum]]:
    """Checksums of all buckets of all replicas, from canonical text: for databases that do not hash alike.

    `rows` holds what the requests are for.
    """
    names = [column.name for column in requests[0].columns]
    hashed = rows.select(REPLICA, BUCKET, _row_hash(names).alias(_HASH))
    # Two sums of half words: the exact sum of 64-bit hashes does not fit a long, and a decimal is slow.
    sums = hashed.groupBy(REPLICA, BUCKET).agg(
        f.count("*").alias("rows"),
        f.sum(f.col(_HASH).bitwiseAND(f.lit(_LOW_WORD))).alias("low"),
        f.sum(f.shiftright(_HASH, 32)).alias("high"),
    )
    found: dict[str, dict[int, Checksum]] = {request.handle.replica: {} for request in requests}
    for row in sums.collect():
        found[row[REPLICA]][row[BUCKET]] = Checksum(row["rows"], f"{row['low']}/{row['high']}")
    return found


def suspects(rows: DataFrame, requests: Sequence[RowsRequest], cap: int) -> Iterator[Suspect]:
    """All keys whose rows differ, at most `cap` of them; arrives partition by partition, so memory stays bounded.

    `rows` holds what the requests are for.
    """
    columns = [column.name for column in requests[0].columns]
    replicas = list(dict.fromkeys(request.handle.replica for request in requests))
    key = [f.col(_quoted(name)) for name in requests[0].key]
    version = f.struct(f.col(REPLICA), f.col(_HASH), f.array(*(f.col(_quoted(name)) for name in columns)).alias("row"))
    versions = (
        rows.withColumn(_HASH, _row_hash(columns))
        .groupBy(f.array(*key).alias(_KEY))
        .agg(
            f.min(BUCKET).alias(BUCKET),
            f.count("*").alias("rows"),
            f.min(_HASH).alias("lowest"),
            f.max(_HASH).alias("highest"),
            f.collect_list(version).alias(_VERSIONS),
        )
        .where((f.col("rows") != len(replicas)) | (f.col("lowest") != f.col("highest")))
        .select(_KEY, BUCKET, _VERSIONS)
    )
    # Not Spark's own limit: it would shuffle everything once more, to one place.
    for row in islice(versions.toLocalIterator(), cap):
        yield _suspect(row, replicas)


def _suspect(row: Row, replicas: Sequence[str]) -> Suspect:
    key = tuple(row[_KEY])
    seen = {version[REPLICA]: tuple(version["row"]) for version in row[_VERSIONS]}
    # Children of an inherited table do not share its key, and SQLite lets a key be NULL.
    if len(seen) < len(row[_VERSIONS]) or None in key:
        raise CheckRejected(f"rows with the key {key} can't be told apart: it must be there and unique in each replica")
    return Suspect(key, row[BUCKET], {replica: seen.get(replica) for replica in replicas})


def _row_hash(names: Sequence[str]) -> Column:
    """Spark's hash skips NULLs, so which columns are NULL is hashed first."""
    nulls = f.concat(*(f.when(f.col(_quoted(name)).isNull(), "0").otherwise("1") for name in names))
    return f.xxhash64(nulls, *(f.col(_quoted(name)) for name in names))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
