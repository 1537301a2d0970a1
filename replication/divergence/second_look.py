"""Looks at suspicious rows again before they are reported, and has what is still different explained.

On replicas that are read at one log number the second look only confirms. On databases that follow each other by other
means, a row that was on its way at the first look has arrived by the second.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Protocol

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from replication.divergence import rows
from replication.divergence.background import in_thread, while_alive
from replication.divergence.catalog import LostConnection
from replication.divergence.explain import Circumstances, explain
from replication.divergence.folder import DIFFERENCES, Spool, chunks, difference_batch, writer
from replication.divergence.model import Difference, Suspect
from replication.divergence.ports import (
    Barrier,
    Key,
    LogRecord,
    ReplicaEndpoint,
    SnapshotHandle,
    TransactionLog,
)
from replication.divergence.schema import CommonTable

EXAMPLES_PER_KIND = 5
BATCH_KEYS = 1_000


class Progress(Protocol):
    """Hears how far the check is."""

    def step(self, table: str, phase: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a table's check works with."""

    endpoints: Sequence[ReplicaEndpoint]
    handles: Mapping[str, SnapshotHandle]
    new_barrier: Callable[[], Barrier]
    spark: "asyncio.Future[SparkSession]"
    log: TransactionLog | None
    progress: Progress
    primary: str
    cap: int
    settle_s: float
    looks_max: int


@dataclass(slots=True)
class Findings:
    """What is counted while differences stream by."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    pairs: dict[str, Counter[str]] = field(default_factory=dict)
    columns: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    buckets: Counter[int] = field(default_factory=Counter)
    examples: dict[tuple[str, str], list[Difference]] = field(default_factory=dict)
    settled: int = 0

    def add_suspect(self, suspect: Suspect) -> None:
        for (one, version), (other, another) in combinations(suspect.versions.items(), 2):
            if version != another:
                self.pairs.setdefault(one, Counter())[other] += 1
                self.pairs.setdefault(other, Counter())[one] += 1

    def add(self, difference: Difference) -> None:
        self.counts.setdefault(difference.replica, Counter())[difference.kind.value] += 1
        self.columns.update(difference.columns)
        self.buckets[difference.bucket] += 1
        if difference.cause is not None:
            self.causes[difference.cause.summary] += 1
        examples = self.examples.setdefault((difference.replica, difference.kind.value), [])
        if len(examples) < EXAMPLES_PER_KIND:
            examples.append(difference)


class SecondLook:
    """Confirms the suspects of one table."""

    def __init__(
        self, around: Surroundings, table: CommonTable, request_at: Callable[[SnapshotHandle], rows.RowsRequest]
    ) -> None:
        self._around, self._table, self._request_at = around, table, request_at
        self._found = Findings()
        self._seen_at = min(handle.taken_at for handle in around.handles.values())

    async def confirm(self, spool: Spool, part: Path) -> Findings:
        """Write what is still different to `part`; what differs each time but moves is reported as not steady."""
        with writer(part, DIFFERENCES) as out:
            pending: Iterable[list[Suspect]] = spool.batches() if spool.count else []
            for look in range(2, self._around.looks_max + 1):
                moving = await self._look(pending, look, out) if spool.count else []
                if not moving:
                    break
                pending = chunks(iter(moving), BATCH_KEYS)
        return self._found

    async def _look(self, pending: Iterable[list[Suspect]], look: int, out: pq.ParquetWriter) -> list[Suspect]:
        await self._settle()
        barrier = self._around.new_barrier()
        try:
            handles = await barrier.open(self._around.endpoints)
            for endpoint in self._around.endpoints:
                if endpoint.name not in handles:
                    raise LostConnection(endpoint.name, ConnectionError("it did not answer at the second look"))
            return await while_alive(barrier, self._compare(pending, handles, look, out))
        finally:
            await barrier.release()

    async def _settle(self) -> None:
        """Let enough time pass since the last snapshots for a row that was on its way to arrive."""
        if any(handle.position is None for handle in self._around.handles.values()):
            passed = (datetime.now(UTC) - self._seen_at).total_seconds()
            await asyncio.sleep(max(0.0, self._around.settle_s - passed))
        self._seen_at = datetime.now(UTC)

    async def _compare(
        self,
        pending: Iterable[list[Suspect]],
        handles: Mapping[str, SnapshotHandle],
        look: int,
        out: pq.ParquetWriter,
    ) -> list[Suspect]:
        moving = []
        for batch in pending:
            now = await self._read_again([suspect.key for suspect in batch], handles)
            confirmed: list[tuple[Suspect, bool]] = []
            for before in batch:
                again = Suspect(
                    before.key, before.bucket, {name: now[name].get(before.key) for name in before.versions}
                )
                versions = list(again.versions.values())
                if all(version == versions[0] for version in versions):
                    self._found.settled += 1
                elif again == before or look == self._around.looks_max:
                    confirmed.append((again, again == before))
                else:
                    moving.append(again)
            if confirmed:
                out.write_batch(difference_batch(self._explained(confirmed, handles, look)))
        return moving

    async def _read_again(
        self, keys: Sequence[Key], handles: Mapping[str, SnapshotHandle]
    ) -> dict[str, dict[Key, tuple[str | None, ...]]]:
        where = rows.Where(keys=tuple(keys))
        names = list(handles)
        requests = [self._request_at(handles[name]).at(where) for name in names]
        found = await asyncio.gather(*(in_thread(partial(rows.by_key, request)) for request in requests))
        return dict(zip(names, found, strict=True))

    def _explained(
        self, confirmed: Sequence[tuple[Suspect, bool]], handles: Mapping[str, SnapshotHandle], look: int
    ) -> list[Difference]:
        records: dict[Key, list[LogRecord]] = defaultdict(list)
        if self._around.log is not None:
            for record in self._around.log.by_key(self._table.label, [suspect.key for suspect, _ in confirmed]):
                records[record.key].append(record)
        positions = {name: handle.position for name, handle in handles.items() if handle.position is not None}
        known = Circumstances(
            self._table.names, self._table.key, self._around.primary, max(positions.values(), default=None), positions
        )
        found = []
        for suspect, steady in confirmed:
            self._found.add_suspect(suspect)
            found += explain(self._table.label, suspect, records[suspect.key], known, looks=look, steady=steady)
        for difference in found:
            self._found.add(difference)
        return found
