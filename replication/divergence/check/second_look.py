"""Looks at suspicious rows again before they are reported, and has what is still different explained.

On replicas that are read at one log number the second look only confirms. On databases that follow each other by other
means, a row that was on its way at the first look has arrived by the second.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from replication.divergence.explain.explain import Circumstances, RowClock, Twin, explain
from replication.divergence.read import rows
from replication.divergence.read.background import in_thread, while_alive
from replication.divergence.results.folder import DIFFERENCES, Spool, chunks, difference_batch, writer
from replication.divergence.results.model import Difference, Kind, Suspect
from replication.tables.catalog import LostConnection
from replication.tables.endpoints import (
    Barrier,
    Key,
    LogRecord,
    ReplicaEndpoint,
    SnapshotHandle,
    TransactionLog,
)
from replication.tables.schema import CommonTable, generated_in

if TYPE_CHECKING:
    from replication.divergence.explain.leads import Influences, Lead, SetKnowledge

EXAMPLES_PER_KIND = 5
BATCH_KEYS = 1_000
NO_BUCKET = -1  # of a row that no replica holds


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
    knowledge: "SetKnowledge | None"
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
    bases: Counter[str] = field(default_factory=Counter)
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
        self.bases[difference.basis.value] += 1
        if difference.cause is not None:
            self.causes[difference.cause.summary] += 1
        examples = self.examples.setdefault((difference.replica, difference.kind.value), [])
        if len(examples) < EXAMPLES_PER_KIND:
            examples.append(difference)


@dataclass(frozen=True, slots=True)
class _Look:
    """One look: the snapshots, and what is known of their moment."""

    number: int
    handles: Mapping[str, SnapshotHandle]
    records: Mapping[Key, Sequence[LogRecord]]
    leads: "Mapping[str, Lead]"
    rejected: Mapping[str, Mapping[str, str]]
    clocks: Mapping[Key, Mapping[str, RowClock]] = field(default_factory=dict)
    influences: "Influences | None" = None

    @property
    def exact(self) -> bool:
        """Every replica was read at one number of the log: what differs, differs."""
        return all(handle.position is not None for handle in self.handles.values())


def _is_logged(records: Sequence[LogRecord]) -> bool:
    return any(record.key for record in records)


class SecondLook:
    """Confirms the suspects of one table, and finds rows that the log wrote and no replica holds.

    The latter are looked for only if there are rows that some replicas hold and the log says nothing about: these may
    be the former under other keys. `covers` tells whether a key is in the range that is checked."""

    def __init__(
        self,
        around: Surroundings,
        table: CommonTable,
        request_at: Callable[[SnapshotHandle], rows.RowsRequest],
        covers: Callable[[Key], bool] = lambda _: True,
    ) -> None:
        self._around, self._table, self._request_at, self._covers = around, table, request_at, covers
        self._twins: dict[tuple[str | None, ...], Twin] = {}  # by the values beside the key
        self._found = Findings()
        self._seen_at = min(handle.taken_at for handle in around.handles.values())
        self._statements_before: dict[str, set[str]] = {}  # transactions in the leads of the look before

    async def confirm(self, spool: Spool, part: Path) -> Findings:
        """Write what is still different to `part`; what differs each time but moves is reported as not steady."""
        with writer(part, DIFFERENCES) as out:
            pending: Iterable[list[Suspect]] = spool.batches() if spool.count else []
            keys: set[Key] = set()
            somewhere: set[Key] = set()
            for suspect in (suspect for batch in spool.batches() for suspect in batch) if spool.count else ():
                keys.add(suspect.key)
                if None in suspect.versions.values():
                    somewhere.add(suspect.key)
            for look in range(2, self._around.looks_max + 1):
                moving = await self._look(pending, keys, look, out, somewhere if look == 2 else set()) if keys else []
                if not moving:
                    break
                pending, keys = chunks(iter(moving), BATCH_KEYS), {suspect.key for suspect in moving}
        return self._found

    async def _look(
        self,
        pending: Iterable[list[Suspect]],
        keys: set[Key],
        number: int,
        out: pq.ParquetWriter,
        somewhere: set[Key],
    ) -> list[Suspect]:
        await self._settle()
        barrier = self._around.new_barrier()
        try:
            handles = await barrier.open(self._around.endpoints)
            for endpoint in self._around.endpoints:
                if endpoint.name not in handles:
                    reason = barrier.absent.get(endpoint.name, "it did not answer at the second look")
                    raise LostConnection(endpoint.name, ConnectionError(reason))
            look = await self._known_at(handles, keys, number)
            if look.exact and any(not _is_logged(look.records.get(key, ())) for key in somewhere):
                await while_alive(barrier, self._find_lost(look, out))
            return await while_alive(barrier, self._compare(pending, look, out))
        finally:
            await barrier.release()

    async def _known_at(self, handles: Mapping[str, SnapshotHandle], keys: set[Key], number: int) -> _Look:
        around = self._around
        upto = max((h.position for h in handles.values() if h.position is not None), default=None)
        records = await around.log.records_of(self._table, keys, upto) if around.log is not None else {}
        if around.knowledge is None:
            return _Look(number, handles, records, {}, {})
        return _Look(
            number,
            handles,
            records,
            await around.knowledge.leads(self._table, handles),
            await around.knowledge.rejected(handles),
            await around.knowledge.clocks(self._table, keys, handles),
            await around.knowledge.influences(self._table, handles),
        )

    async def _find_lost(self, look: _Look, out: pq.ParquetWriter) -> None:
        """Report rows that the log inserted and no replica holds."""
        log, upto = self._around.log, max(handle.position or 0 for handle in look.handles.values())
        if log is None:
            return
        inserted = [key for key in await log.inserted(self._table, upto) if self._covers(key)]
        for batch in chunks(iter(inserted), BATCH_KEYS):
            held = await self._read_again(batch, look.handles)
            lost = [key for key in batch if not any(key in rows_of for rows_of in held.values())]
            if lost:
                await self._report_lost(lost, look, upto, out)

    async def _report_lost(self, lost: Sequence[Key], look: _Look, upto: int, out: pq.ParquetWriter) -> None:
        assert self._around.log is not None
        told = replace(look, records=await self._around.log.records_of(self._table, lost, upto))
        for key in lost:
            suspect = Suspect(key, NO_BUCKET, dict.fromkeys(look.handles))
            found = self._explained(suspect, told, steady=True)
            if not found or found[0].expected is None:
                continue
            row = found[0].expected
            others = tuple(row.get(name) for name in self._table.names if name not in self._table.key)
            if others:
                self._twins[others] = Twin(key, told.records[key][-1])
            self._add(suspect, found)
            out.write_batch(difference_batch(found))

    def _twin(self, suspect: Suspect) -> Twin | None:
        beside_key = len(self._table.key)
        held = (version[beside_key:] for version in suspect.versions.values() if version is not None)
        return next((self._twins[others] for others in held if others in self._twins), None)

    async def _settle(self) -> None:
        """Let enough time pass since the last snapshots for a row that was on its way to arrive."""
        if any(handle.position is None for handle in self._around.handles.values()):
            passed = (datetime.now(UTC) - self._seen_at).total_seconds()
            await asyncio.sleep(max(0.0, self._around.settle_s - passed))
        self._seen_at = datetime.now(UTC)

    async def _compare(self, pending: Iterable[list[Suspect]], look: _Look, out: pq.ParquetWriter) -> list[Suspect]:
        moving = []
        for batch in pending:
            now = await self._read_again([suspect.key for suspect in batch], look.handles)
            confirmed: list[Difference] = []
            for before in batch:
                again = Suspect(
                    before.key, before.bucket, {name: now[name].get(before.key) for name in before.versions}
                )
                versions = list(again.versions.values())
                if all(version == versions[0] for version in versions):
                    self._found.settled += 1
                    continue
                found = self._explained(again, look, steady=again == before)
                if look.number < self._around.looks_max and self._may_pass(found, look, steady=again == before):
                    moving.append(again)
                else:
                    self._add(again, found)
                    confirmed += found
            if confirmed:
                out.write_batch(difference_batch(confirmed))
        self._statements_before = {n: {r.tx for r in lead.any_row} for n, lead in look.leads.items()}
        return moving

    @staticmethod
    def _may_pass(found: Sequence[Difference], look: _Look, *, steady: bool) -> bool:
        """Whether one more look may find the row equal."""
        if look.exact:
            return all(difference.kind is Kind.IN_FLIGHT for difference in found)
        return not steady

    async def _read_again(
        self, keys: Sequence[Key], handles: Mapping[str, SnapshotHandle]
    ) -> dict[str, dict[Key, tuple[str | None, ...]]]:
        where = rows.Where(keys=tuple(keys))
        names = list(handles)
        requests = [self._request_at(handles[name]).at(where) for name in names]
        found = await asyncio.gather(*(in_thread(partial(rows.by_key, request)) for request in requests))
        return dict(zip(names, found, strict=True))

    def _explained(self, suspect: Suspect, look: _Look, *, steady: bool) -> list[Difference]:
        knowledge, influences = self._around.knowledge, look.influences
        positions = {name: h.position for name, h in look.handles.items() if h.position is not None}
        known = Circumstances(
            self._table.names,
            self._table.key,
            self._around.primary,
            max(positions.values(), default=None),
            positions,
            {name: self._lead(name, suspect.key, lead, steady) for name, lead in look.leads.items()},
            look.rejected,
            knowledge is None or knowledge.log_decides,
            knowledge is not None,
            generated_in(self._table),
            look.clocks.get(suspect.key, {}),
            influences.direct_writes if influences is not None else {},
            influences.with_triggers if influences is not None else frozenset(),
            self._twin(suspect),
        )
        records = look.records.get(suspect.key, ())
        return explain(self._table.label, suspect, records, known, looks=look.number, steady=steady)

    def _lead(self, replica: str, key: Key, lead: "Lead", steady: bool) -> list[LogRecord]:
        """A statement may have changed any row; but a row that stayed as it was while statements came and went, and
        differs all the same, is not explained by them."""
        before = self._statements_before.get(replica)
        if not steady or before is None:
            return lead.of(key)
        return [r for r in lead.any_row if r.tx in before] + list(lead.rows.get(key, ()))

    def _add(self, suspect: Suspect, found: Sequence[Difference]) -> None:
        self._found.add_suspect(suspect)
        for difference in found:
            self._found.add(difference)
