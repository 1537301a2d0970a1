"""Compares one table, or one key range of it, on all replicas at once.

Checksums find the buckets that differ, Spark reads only those and finds the rows, a second look keeps only what is
still different, and the log says what it is. Each step narrows what the next one reads.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from replication.divergence.check import diff
from replication.divergence.check.second_look import Findings, SecondLook, Surroundings
from replication.divergence.read import rows
from replication.divergence.read.background import in_thread
from replication.divergence.read.small_reads import ROWS_MAX, read_here
from replication.divergence.read.splits import PARTITION_ROWS, share_ranges, split
from replication.divergence.read.task_errors import failure_in
from replication.divergence.results.folder import Spool
from replication.divergence.results.model import BucketDifference, Limit, LimitKind, TableResult
from replication.tables import checksums
from replication.tables.buckets import (
    Buckets,
    HashBuckets,
    KeyRange,
    RangeBuckets,
    closer,
    hash_buckets,
    integer_buckets,
    split_further,
)
from replication.tables.catalog import postgres_at
from replication.tables.checksums import Checksum
from replication.tables.endpoints import Key, SnapshotHandle
from replication.tables.errors import CheckRejected
from replication.tables.schema import CommonTable, ValueKind
from tops.model.errors import InvariantBroken, TopsError

T = TypeVar("T")

_PARTS_MAX = 64
_FEW_ROWS = 2_000
_RANGES_MAX = 500


class TableCheck:
    """One table, or one key range of it."""

    def __init__(
        self, around: Surroundings, table: CommonTable, key_range: KeyRange, *, native: bool, part: Path
    ) -> None:
        self._around, self._table, self._range, self._native = around, table, key_range, native
        self._part = part
        self._buckets = self._cut()
        self._rows_read = 0

    async def run(self) -> tuple[TableResult, list[Limit]]:
        began = time.monotonic()
        spool = Spool(self._part.with_suffix(".suspects"))
        limits: list[Limit] = []
        try:
            self._tell("checksums", 0)
            sums = await self._checksums()
            suspicious = checksums.differing(sums)
            if suspicious:
                self._tell("rows", 1)
                requests = await self._requests(suspicious, sums)
                await self._fill(spool, requests)
            if spool.count > self._around.cap:
                limits.append(self._capped())
            else:
                self._must_account_for(suspicious, spool)
            self._tell("second look", 2)
            found = await SecondLook(self._around, self._table, self._request_at, self._covers).confirm(
                spool, self._part
            )
        finally:
            spool.remove()
        self._tell("done", 3)
        return self._result(found, sums, suspicious, time.monotonic() - began), limits

    def _cut(self) -> Buckets:
        table = self._table
        if not table.integer_key:
            return hash_buckets(table.rows_estimate)
        lows = [s.key_low for s in table.schemas.values() if s.key_low is not None]
        highs = [s.key_high for s in table.schemas.values() if s.key_high is not None]
        return integer_buckets(table.rows_estimate, min(lows, default=0), max(highs, default=0))

    def _covers(self, key: Key) -> bool:
        if self._range == KeyRange():
            return True
        return self._range.low <= int(key[0]) <= self._range.high  # only integer keys are cut

    def _tell(self, phase: str, done: int) -> None:
        self._around.progress.step(self._table.label, phase, done, 3)

    async def _checksums(self) -> dict[str, dict[int, Checksum]]:
        if not self._native:
            requests = self._everything()
            frame = await self._frame(requests, self._rows_everywhere)
            return await self._spark(lambda spark: diff.bucket_checksums(frame(spark), requests))
        names = list(self._around.handles)
        done = await asyncio.gather(*(self._native_checksums(name, self._buckets, [self._range]) for name in names))
        return dict(zip(names, done, strict=True))

    async def _native_checksums(
        self, replica: str, buckets: Buckets, ranges: Sequence[KeyRange]
    ) -> dict[int, Checksum]:
        query = checksums.checksum_query(self._table, self._table.schemas[replica], buckets, ranges)
        async with postgres_at(self._around.handles[replica]) as connection:
            # The planner takes every key for a bucket of its own, and would sort a large table on disk.
            await connection.execute("SET enable_sort = off")
            if tuple(ranges) != (KeyRange(),):
                # The planner can't know how narrow the ranges are; the index is always right for them.
                await connection.execute("SET enable_seqscan = off")
            return checksums.from_records(await connection.fetch(query))

    def _request(self, replica: str) -> rows.RowsRequest:
        return self._request_at(self._around.handles[replica])

    def _request_at(self, handle: SnapshotHandle) -> rows.RowsRequest:
        return rows.request_for(self._table, handle, self._buckets, native_buckets=self._native)

    def _everything(self) -> list[rows.RowsRequest]:
        """The whole range on every replica, in parts that Spark can read side by side."""
        parts = _parts(self._table.rows_estimate)
        whole = [self._request(replica) for replica in self._around.handles]
        if self._range != KeyRange():
            return [request.at(rows.Where(ranges=(self._range,))) for request in whole]
        return [share for request in whole for share in split(request, parts)]

    async def _requests(
        self, suspicious: Mapping[int, int], sums: Mapping[str, Mapping[int, Checksum]]
    ) -> list[rows.RowsRequest]:
        """The reads of the differing buckets."""
        if isinstance(self._buckets, HashBuckets):
            where = rows.Where(buckets=tuple(sorted(suspicious)))
            parts = _parts(self._table.rows_estimate) if self._native else 1
            requests = [self._request(replica).at(where) for replica in self._around.handles]
            self._rows_read = sum(s[b].rows for s in sums.values() for b in suspicious if b in s)
            return [share for request in requests for share in split(request, parts)]
        ranges, expected = await self._narrowed(self._buckets, suspicious)
        self._rows_read = expected * len(self._around.handles)
        return [
            share
            for replica in self._around.handles
            for share in share_ranges(self._request(replica), ranges, _parts(expected))
        ]

    async def _narrowed(self, buckets: RangeBuckets, suspicious: Mapping[int, int]) -> tuple[list[KeyRange], int]:
        """Key ranges to read, and about how many rows they hold; a crowded bucket is cut and compared again first."""
        finer = split_further(buckets, max(suspicious.values())) if self._native else None
        crowded = {b for b, n in suspicious.items() if finer is not None and split_further(buckets, n) is not None}
        ranges, expected = await self._closer(buckets, {b: n for b, n in suspicious.items() if b not in crowded})
        if finer is None or not crowded:
            return ranges, expected
        again = await self._differing(finer, _within(buckets.ranges(crowded), self._range))
        more, more_expected = await self._narrowed(finer, again) if again else ([], 0)
        return sorted(ranges + more, key=lambda r: r.low), expected + more_expected

    async def _closer(self, buckets: RangeBuckets, suspicious: Mapping[int, int]) -> tuple[list[KeyRange], int]:
        """The same for buckets of a common size: where few of many differ, the servers say in which part of each."""
        ranges, expected = _within(buckets.ranges(suspicious), self._range), sum(suspicious.values())
        few_of_many = _FEW_ROWS < expected < self._table.rows_estimate // 4 and len(ranges) <= _RANGES_MAX
        if not self._native or not few_of_many:
            return ranges, expected
        again = await self._differing(closer(buckets), ranges)
        return _within(closer(buckets).ranges(again), self._range), sum(again.values())

    async def _differing(self, buckets: RangeBuckets, ranges: Sequence[KeyRange]) -> dict[int, int]:
        names = list(self._around.handles)
        sums = await asyncio.gather(*(self._native_checksums(name, buckets, ranges) for name in names))
        return checksums.differing(dict(zip(names, sums, strict=True)))

    async def _fill(self, spool: Spool, requests: Sequence[rows.RowsRequest]) -> None:
        """Have Spark compare the rows of the differing buckets."""
        if not requests:
            return
        # Where only we know a row's bucket, finding it means reading the table.
        frame = await self._frame(requests, self._rows_read if self._native else self._rows_everywhere)
        await self._spark(lambda spark: spool.fill(diff.suspects(frame(spark), requests, self._around.cap + 1)))

    @property
    def _rows_everywhere(self) -> int:
        return self._table.rows_estimate * len(self._around.handles)

    async def _frame(
        self, requests: Sequence[rows.RowsRequest], rows_expected: int
    ) -> Callable[[SparkSession], DataFrame]:
        """Canonical rows: read here if they are few, else by Spark's workers."""
        at_hand = await read_here(requests) if rows_expected <= ROWS_MAX else None
        if at_hand is not None:
            return lambda spark: diff.rows_at_hand(spark, at_hand)
        return lambda spark: diff.canonical_rows(spark, requests)

    def _must_account_for(self, suspicious: Mapping[int, int], spool: Spool) -> None:
        """Checksums that differ without a row that does would mean that rows were not read: better no verdict."""
        unaccounted = suspicious.keys() - spool.buckets
        # Only JSON is compared more kindly by row than by checksum: servers hash its spelling too.
        if unaccounted and not (self._native and any(c.kind is ValueKind.JSON for c in self._table.columns)):
            raise InvariantBroken(
                f"{self._table.label}: buckets {sorted(unaccounted)[:5]} differ, but none of their rows"
            )

    def _capped(self) -> Limit:
        cap = self._around.cap
        reason = f"table {self._table.label} has more than {cap:,} differing rows; the rest was not looked at"
        return Limit(LimitKind.CAPPED, self._table.label, reason)

    async def _spark(self, work: Callable[[SparkSession], T]) -> T:
        """Run a Spark job; when the check gives up, the job is cancelled rather than left running."""
        spark = await asyncio.shield(self._around.spark)
        group = f"tops divergence {self._part.name}"

        def run() -> T:
            spark.sparkContext.setJobGroup(group, f"compare {self._table.label}", interruptOnCancel=True)
            return work(spark)

        try:
            return await in_thread(run)
        except PySparkException as error:
            raise failure_of(error) from error
        except asyncio.CancelledError:
            spark.sparkContext.cancelJobGroup(group)
            raise

    def _result(
        self,
        found: Findings,
        sums: Mapping[str, Mapping[int, Checksum]],
        suspicious: Mapping[int, int],
        seconds: float,
    ) -> TableResult:
        table, every = self._table, set().union(*sums.values())
        return TableResult(
            table=table.label,
            key=table.key,
            columns=table.names,
            rows={replica: sum(c.rows for c in buckets.values()) for replica, buckets in sums.items()},
            method="native" if self._native else "canonical",
            buckets=len(every),
            bucket_ends=(min(every), max(every)) if every else (),
            buckets_differing=[BucketDifference(b, suspicious[b], found.buckets[b]) for b in sorted(suspicious)],
            rows_read=self._rows_read,
            settled=found.settled,
            counts={replica: dict(kinds) for replica, kinds in found.counts.items()},
            pairs={replica: dict(others) for replica, others in found.pairs.items()},
            columns_differing=dict(found.columns),
            causes=dict(found.causes),
            bases=dict(found.bases),
            schema=list(table.differences),
            examples=[difference for kind in found.examples.values() for difference in kind],
            seconds=seconds,
        )


def _parts(rows_expected: int) -> int:
    return min(_PARTS_MAX, max(1, -(-rows_expected // PARTITION_ROWS)))


def _within(ranges: Sequence[KeyRange], limits: KeyRange) -> list[KeyRange]:
    """The ranges cut to what this check is for."""
    cut = (KeyRange(max(r.low, limits.low), min(r.high, limits.high)) for r in ranges)
    return [r for r in cut if r.low <= r.high]


def failure_of(error: PySparkException) -> TopsError:
    """What went wrong inside a Spark task, as the task has encoded it."""
    text = str(error)
    return failure_in(text) or CheckRejected(f"Spark could not run the check: {text.strip().splitlines()[0]}")
