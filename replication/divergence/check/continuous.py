"""Watches a set without pause: every row that the log says was written is compared on all replicas soon after.

Structured Streaming reads committed log records as they are exported; a row that is not the same everywhere is looked
at again with every batch until it is, and a replica that stays divergent for longer than `grace_s` raises a metric.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from replication.divergence.explain.explain import Circumstances, explain
from replication.divergence.read import rows
from replication.divergence.read.background import in_thread
from replication.divergence.read.snapshots import SnapshotBarrier
from replication.divergence.results.model import Suspect
from replication.tables import catalog
from replication.tables.buckets import HashBuckets
from replication.tables.catalog import LostConnection
from replication.tables.endpoints import Barrier, Key, ReplicaEndpoint, SnapshotHandle
from replication.tables.schema import CommonTable, common_table

LOG_SCHEMA = "number long, tx string, site string, committed_at timestamp, `table` string, key array<string>"
KEYS_AT_ONCE = 1_000


@dataclass(slots=True)
class Metrics:
    """What a monitoring system sees."""

    registry: CollectorRegistry
    divergent: Gauge = field(init=False)
    oldest: Gauge = field(init=False)
    alert: Gauge = field(init=False)
    compared: Counter = field(init=False)
    converged: Histogram = field(init=False)

    def __post_init__(self) -> None:
        of_set, of_replica, registry = ("set",), ("set", "replica"), self.registry
        text = "Number of rows that differ from the other replicas."
        self.divergent = Gauge("tops_divergence_rows", text, of_replica, registry=registry)
        text = "Age of the oldest difference in seconds."
        self.oldest = Gauge("tops_divergence_oldest_seconds", text, of_replica, registry=registry)
        text = "Whether a replica differs for longer than allowed (1) or not (0)."
        self.alert = Gauge("tops_divergence_stays", text, of_replica, registry=registry)
        text = "Number of written rows that were compared."
        self.compared = Counter("tops_divergence_compared_rows", text, of_set, registry=registry)
        text = "Duration from a write of a row until all replicas have it, in seconds."
        self.converged = Histogram("tops_divergence_converge_seconds", text, of_set, registry=registry)


@dataclass(slots=True)
class _Open:
    """A written row that has not been seen equal everywhere yet."""

    since: float
    replicas: tuple[str, ...] = ()  # those that differed at the last look


class Watch:
    """Continuous comparison of one set; `start` returns the running query."""

    def __init__(
        self,
        spark: SparkSession,
        endpoints: Sequence[ReplicaEndpoint],
        log: Path,
        *,
        set_name: str = "databases",
        grace_s: float = 60.0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._spark, self._endpoints, self._log = spark, list(endpoints), log
        self._set, self._grace_s = set_name, grace_s
        self.metrics = Metrics(registry or CollectorRegistry())
        self._open: dict[tuple[str, Key], _Open] = {}
        self._tables: dict[str, CommonTable] = {}

    def start(self, checkpoint: Path, every_s: float = 1.0) -> StreamingQuery:
        """From the log's position in the checkpoint on; a new checkpoint starts at the log's beginning."""
        written = self._spark.readStream.schema(LOG_SCHEMA).parquet(str(self._log)).select("table", "key")
        # Without new writes there is no batch; the ticks keep open rows being looked at.
        ticks = self._spark.readStream.format("rate").option("rowsPerSecond", 1).load()
        nothing = ticks.select(
            f.lit(None).cast("string").alias("table"), f.lit(None).cast("array<string>").alias("key")
        )
        return (
            written.union(nothing)
            .writeStream.foreachBatch(self._on_batch)
            .option("checkpointLocation", str(checkpoint))
            .trigger(processingTime=f"{every_s} seconds")
            .start()
        )

    def _on_batch(self, batch: DataFrame, _: int) -> None:
        now = time.monotonic()
        for row in batch.where(f.col("table").isNotNull()).distinct().toLocalIterator():
            self._open.setdefault((row["table"], tuple(row["key"])), _Open(now))
        asyncio.run(self._look())
        self._publish()

    async def _look(self) -> None:
        by_table: dict[str, list[Key]] = {}
        for table, key in self._open:
            by_table.setdefault(table, []).append(key)
        for table, keys in by_table.items():
            for first in range(0, len(keys), KEYS_AT_ONCE):
                await self._compare(table, keys[first : first + KEYS_AT_ONCE])

    async def _compare(self, name: str, keys: Sequence[Key]) -> None:
        table = await self._table(name)
        barrier: Barrier = SnapshotBarrier()
        try:
            handles = await barrier.open(self._endpoints)
            for endpoint in self._endpoints:
                if endpoint.name not in handles:
                    raise LostConnection(endpoint.name, ConnectionError("it did not answer"))
            found = await asyncio.gather(*(_read(table, handle, keys) for handle in handles.values()))
        finally:
            await barrier.release()
        by_replica = dict(zip(handles, found, strict=True))
        self.metrics.compared.labels(self._set).inc(len(keys))
        for key in keys:
            self._judge(table, key, {replica: versions.get(key) for replica, versions in by_replica.items()})

    def _judge(self, table: CommonTable, key: Key, versions: Mapping[str, tuple[str | None, ...] | None]) -> None:
        known = Circumstances(table.names, table.key)
        found = explain(table.label, Suspect(key, 0, dict(versions)), [], known, looks=1, steady=True)
        entry = self._open[table.label, key]
        if found:
            entry.replicas = tuple(difference.replica for difference in found)
        else:
            self.metrics.converged.labels(self._set).observe(time.monotonic() - entry.since)
            del self._open[table.label, key]

    def _publish(self) -> None:
        now = time.monotonic()
        for endpoint in self._endpoints:
            ages = [now - entry.since for entry in self._open.values() if endpoint.name in entry.replicas]
            oldest = max(ages, default=0.0)
            self.metrics.divergent.labels(self._set, endpoint.name).set(len(ages))
            self.metrics.oldest.labels(self._set, endpoint.name).set(oldest)
            self.metrics.alert.labels(self._set, endpoint.name).set(oldest > self._grace_s)

    async def _table(self, name: str) -> CommonTable:
        if name not in self._tables:
            described = await asyncio.gather(*(catalog.describe(endpoint, name) for endpoint in self._endpoints))
            schemas = {e.name: schema for e, schema in zip(self._endpoints, described, strict=True)}
            self._tables[name] = common_table(name, schemas, common_columns_only=True)
        return self._tables[name]


async def _read(table: CommonTable, handle: SnapshotHandle, keys: Sequence[Key]) -> dict[Key, tuple[str | None, ...]]:
    request = rows.request_for(table, handle, HashBuckets(1), native_buckets=False).at(rows.Where(keys=tuple(keys)))
    return await in_thread(lambda: rows.by_key(request))
