"""The history of checks as a Parquet table, and the Spark job that shows trends in it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from replication.divergence.results.model import CheckResult, Kind
from tops.model.errors import ConfigError

HISTORY = pa.schema(
    [
        ("run", pa.string()),
        ("set_name", pa.string()),
        ("policy", pa.string()),
        ("started_at", pa.timestamp("us", "UTC")),
        ("finished_at", pa.timestamp("us", "UTC")),
        ("verdict", pa.string()),
        ("table", pa.string()),
        ("replica", pa.string()),
        ("rows", pa.int64()),
        ("differences", pa.int64()),
        ("settled", pa.int64()),
        ("position", pa.int64()),
        ("lag_entries", pa.int64()),
        *((kind.value.replace(" ", "_"), pa.int64()) for kind in Kind if kind is not Kind.SCHEMA),
        ("causes", pa.map_(pa.string(), pa.int64())),
        ("buckets", pa.list_(pa.int64())),
        ("seconds", pa.float64()),
    ]
)


def history_table(result: CheckResult) -> pa.Table:
    """One line per table and replica."""
    lines: list[dict[str, Any]] = []
    for table in result.tables:
        for replica in result.replicas:
            kinds = table.counts.get(replica.name, {})
            lines.append(
                {
                    "run": result.id,
                    "set_name": result.set_name,
                    "policy": result.policy,
                    "started_at": result.started_at,
                    "finished_at": result.finished_at,
                    "verdict": result.verdict.value,
                    "table": table.table,
                    "replica": replica.name,
                    "rows": table.rows.get(replica.name),
                    "differences": _differences(kinds) if replica.name in table.rows else None,  # not seen is not clean
                    "settled": table.settled,
                    "position": replica.position,
                    "lag_entries": replica.lag_entries,
                    **{kind.replace(" ", "_"): count for kind, count in kinds.items()},
                    "causes": list(table.causes.items()),
                    "buckets": [bucket.bucket for bucket in table.buckets_differing if bucket.differences],
                    "seconds": table.seconds,
                }
            )
    return pa.Table.from_pylist(lines, HISTORY)


def _differences(kinds: Mapping[str, int]) -> int:
    return sum(n for kind, n in kinds.items() if kind != Kind.IN_FLIGHT)


class Trends:
    """What the history of a folder of checks tells."""

    def __init__(self, spark: SparkSession, out: Path) -> None:
        folder = out / "history"
        if not folder.is_dir() or not any(folder.glob("*.parquet")):
            raise ConfigError(f"{folder}: no history of checks there; run a check first")
        self._checks = spark.read.parquet(str(folder)).where("differences IS NOT NULL")

    def divergence_rate(self) -> DataFrame:
        """By policy: how many checks found something, and differing rows per million compared."""
        return (
            self._checks.groupBy("policy", "run")
            .agg(f.sum("differences").alias("differences"), f.sum("rows").alias("rows"))
            .groupBy("policy")
            .agg(
                f.count("*").alias("checks"),
                f.sum((f.col("differences") > 0).cast("int")).alias("with_differences"),
                f.round(f.sum("differences") * 1e6 / f.sum("rows"), 3).alias("per_million_rows"),
            )
            .orderBy("policy")
        )

    def time_to_converge(self) -> DataFrame:
        """By set, table and replica: how long differences lasted, from the first check that saw them to a clean one."""
        steps = Window.partitionBy("set_name", "table", "replica").orderBy("started_at")
        diverged = f.col("differences") > 0
        spells = (
            self._checks.withColumn("before", f.lag(diverged, 1, False).over(steps))
            .withColumn("begins", (diverged & ~f.col("before")).cast("int"))
            .withColumn("spell", f.sum("begins").over(steps))
            .where((f.col("spell") > 0) & (diverged | f.col("before")))
        )
        return (
            spells.groupBy("set_name", "table", "replica", "spell")
            .agg(
                f.min("started_at").alias("seen_at"),
                f.max(f.when(~diverged, f.col("started_at"))).alias("clean_at"),
                f.max("differences").alias("worst"),
            )
            .withColumn("seconds", f.unix_timestamp("clean_at") - f.unix_timestamp("seen_at"))
            .orderBy("seen_at", "table", "replica")
        )

    def hot_spots(self) -> DataFrame:
        """Buckets that differed in most checks."""
        return (
            self._checks.where(f.col("differences") > 0)
            .select("set_name", "table", "run", f.explode("buckets").alias("bucket"))
            .groupBy("set_name", "table", "bucket")
            .agg(f.countDistinct("run").alias("checks"))
            .orderBy(f.desc("checks"), "table", "bucket")
        )

    def causes(self) -> DataFrame:
        """By set and table: what the log named as the cause, and how often."""
        return (
            self._checks.select("set_name", "table", "run", f.explode("causes").alias("cause", "rows"))
            .distinct()
            .groupBy("set_name", "table", "cause")
            .agg(f.sum("rows").alias("rows"), f.countDistinct("run").alias("checks"))
            .orderBy(f.desc("rows"))
        )
