"""Repairs of a running set: transactions in its log, each for one replica, ordered with all writes.

A round looks at the rows anew, at a barrier, and plans from what is there. Before that, the agents begin to remember
which of these rows are written; so a row that is written between the look and the repair is left alone, and the next
round looks again. The statement itself compares once more: it changes the row only while that is what the look saw.
Rows are written as images (`as_images.py`): no trigger fires. A row that waits for another one, as a child does for its
parent, is repaired after it.
"""

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from adapters.changes import InvalidChange, Repair, Statement
from adapters.postgres.sql.catalog import find_table
from adapters.postgres.sql.literals import text_form
from replication.conflicts.own_statements import REPAIR_CALL
from replication.conflicts.tables import CLOCKS
from replication.divergence.explain.clock_keys import clock_keys
from replication.divergence.explain.explain import Circumstances, RowClock, explain, logged_row
from replication.divergence.explain.leads import SetKnowledge
from replication.divergence.explain.set_barrier import WAIT_S, SetBarrier
from replication.divergence.explain.set_link import SetLink
from replication.divergence.explain.set_log import SetLog
from replication.divergence.read import rows
from replication.divergence.read.background import in_thread
from replication.divergence.repair.as_images import OFF, ON, AsImages, fails
from replication.divergence.repair.repair import Planner, Repaired
from replication.divergence.results.model import Difference, Kind, Suspect
from replication.model.touched_rows import RowKey, row_key, table_name
from replication.policies import EntryKind
from replication.rpc import calls
from replication.tables.buckets import HashBuckets
from replication.tables.canonical import postgres_text
from replication.tables.catalog import LostConnection, describe, postgres_at
from replication.tables.endpoints import Engine, Key, ReplicaEndpoint, RowChange, SnapshotHandle
from replication.tables.errors import CheckRejected
from replication.tables.schema import CommonTable, ValueKind, common_table, generated_in, literal, quoted
from tops.model.errors import OutcomeUnknown, TransactionAborted

BATCH_ROWS = 200
ROUNDS = 5
STUCK_LOOKS = 2
TRANSACTION_BYTES = 1 << 20
StoredRow = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class _Look:
    """Some rows of one table on all replicas at one number of the log."""

    position: int
    handles: Mapping[str, SnapshotHandle]
    canonical: Mapping[str, Mapping[Key, StoredRow]]
    exact: Mapping[str, Mapping[Key, StoredRow]]
    differences: Mapping[Key, list[Difference]]
    logged: Mapping[Key, Mapping[str, str | None]]  # rows that the log holds as a whole, by column
    clocks: Mapping[Key, Mapping[str, RowClock]]


@dataclass(slots=True)
class _Progress:
    """What has become of the rows so far."""

    open: list[Key]
    touched: set[Key] = field(default_factory=set)
    last: dict[Key, list[Difference]] = field(default_factory=dict)  # of the look before
    unchanged: Counter[Key] = field(default_factory=Counter)  # looks that found the row as the look before
    stuck: list[Key] = field(default_factory=list)  # written in vain: it breaks a constraint


class SetRepair:
    """Makes the rows of a set equal again, as a planner decides."""

    def __init__(
        self, link: SetLink, endpoints: Sequence[ReplicaEndpoint], planner: Planner, wait_s: float = WAIT_S
    ) -> None:
        for endpoint in endpoints:
            if endpoint.engine is not Engine.POSTGRES:
                raise CheckRejected(
                    f"replica {endpoint.name}: only PostgreSQL replicas are repaired through the set; "
                    f"stop it and give the databases with --dsn"
                )
        self._link, self._endpoints, self._planner, self._wait_s = link, list(endpoints), planner, wait_s
        self._knowledge, self._log = SetKnowledge(link), SetLog(link)
        self._done = Repaired()
        self._left: list[tuple[str, list[Key]]] = []  # rows that could not be repaired so far
        self._written_before = 0

    async def run(self, differences: Iterable[Difference]) -> Repaired:
        """Repair the rows that a check found; rows that were written at every look are left alone and counted."""
        await self._pass(differences)
        while self._left and self._done.written > self._written_before:
            self._written_before = self._done.written
            again, self._left = self._left, []
            for table, keys in again:
                await self._batch(table, keys)
        self._done.moved = sum(len(keys) for _, keys in self._left)
        return self._done

    async def _pass(self, differences: Iterable[Difference]) -> None:
        found = (d for d in differences if d.kind is not Kind.IN_FLIGHT)
        keys: list[tuple[str, Key]] = []
        for table_and_key, _ in groupby(found, key=lambda d: (d.table, d.key)):
            if keys and (keys[-1][0] != table_and_key[0] or len(keys) == BATCH_ROWS):
                await self._batch(keys[0][0], [key for _, key in keys])
                keys.clear()
            keys.append(table_and_key)
        if keys:
            await self._batch(keys[0][0], [key for _, key in keys])

    async def _batch(self, name: str, keys: Sequence[Key]) -> None:
        table = await self._table(name)
        progress = _Progress(list(keys))
        for number in range(ROUNDS + 1):
            async with self._guarded(table, progress.open) as ident, self._look(table, progress.open) as look:
                self._settle(progress, look)
                if not progress.open or number == ROUNDS:
                    break
                changes = self._planned(look, progress.open)
                decided = {change.key for change in changes}
                waiting = {k for k, d in look.differences.items() if any(x.kind is Kind.IN_FLIGHT for x in d)}
                progress.open = [key for key in progress.open if key in decided or key in waiting]
                await self._write(table, look, changes, ident)
                progress.touched |= decided
        if left := progress.open + progress.stuck:
            self._left.append((name, left))

    def _settle(self, progress: _Progress, look: _Look) -> None:
        equal = [key for key in progress.open if key not in look.differences]
        self._done.written += sum(key in progress.touched for key in equal)
        left = [key for key in progress.open if key in look.differences]
        for key in left:
            as_before = key in progress.touched and _same(progress.last.get(key, ()), look.differences[key])
            progress.unchanged[key] = progress.unchanged[key] + 1 if as_before else 0
        progress.stuck += [key for key in left if progress.unchanged[key] == STUCK_LOOKS]
        progress.open = [key for key in left if progress.unchanged[key] < STUCK_LOOKS]
        progress.last = dict(look.differences)

    def _planned(self, look: _Look, keys: Iterable[Key]) -> list[RowChange]:
        settled = [
            difference
            for key in keys
            for difference in look.differences[key]
            if all(other.kind is not Kind.IN_FLIGHT for other in look.differences[key])
        ]
        planned = self._planner.changes(settled)
        return [change for change in planned if change.wanted is None or change.source or change.key in look.logged]

    # ---------------------------------------------------------------------------------------------------- looking

    async def _table(self, name: str) -> CommonTable:
        schemas = {endpoint.name: await describe(endpoint, name) for endpoint in self._endpoints}
        return common_table(name, schemas, common_columns_only=True)

    @asynccontextmanager
    async def _guarded(self, table: CommonTable, keys: Sequence[Key]) -> AsyncIterator[str]:
        ident = secrets.token_hex(8)
        row_keys = tuple(_row_key(table, key) for key in keys)
        for endpoint in self._endpoints:
            await self._link.request(endpoint.name, calls.GuardRows(repair=ident, row_keys=row_keys), 30.0)
        try:
            yield ident
        finally:
            for endpoint in self._endpoints:
                await self._link.request(endpoint.name, calls.GuardDone(repair=ident), 30.0)

    @asynccontextmanager
    async def _look(self, table: CommonTable, keys: Sequence[Key]) -> AsyncIterator[_Look]:
        barrier = SetBarrier(self._link, self._wait_s)
        try:
            handles = await barrier.open(self._endpoints)
            for endpoint in self._endpoints:
                if endpoint.name not in handles:
                    raise LostConnection(endpoint.name, ConnectionError(barrier.absent.get(endpoint.name, "")))
            yield await self._seen(table, keys, handles)
        finally:
            await barrier.release()

    async def _seen(self, table: CommonTable, keys: Sequence[Key], handles: Mapping[str, SnapshotHandle]) -> _Look:
        canonical, exact = {}, {}
        for name, handle in handles.items():
            request = rows.request_for(table, handle, HashBuckets(1), native_buckets=False)
            wanted = request.at(rows.Where(keys=tuple(keys)))
            canonical[name] = await in_thread(partial(rows.by_key, wanted))
            exact[name] = await in_thread(partial(rows.by_key, replace(wanted, exact=True)))
        (position,) = {handle.position or 0 for handle in handles.values()}
        records = await self._log.records_of(table, keys, position)
        leads = await self._knowledge.leads(table, handles)
        rejected = await self._knowledge.rejected(handles)
        clocks = await self._knowledge.clocks(table, keys, handles)
        found: dict[Key, list[Difference]] = {}
        logged: dict[Key, Mapping[str, Any]] = {}
        for key in keys:
            versions = {name: seen.get(key) for name, seen in canonical.items()}
            one, *others = versions.values()
            if one is not None and all(version == one for version in others):
                continue  # equal, even if the server has written a value in another way than the log has it
            known = Circumstances(
                table.names,
                table.key,
                self._planner.primary,
                position,
                leads={name: lead.of(key) for name, lead in leads.items()},
                rejected=rejected,
                log_decides=self._knowledge.log_decides,
                generated=generated_in(table),
                clocks=clocks.get(key, {}),
            )
            if (row := logged_row(records.get(key, ()), known)) is not None:
                logged[key] = row
            suspect = Suspect(key, 0, versions)
            if differences := explain(table.label, suspect, records.get(key, ()), known, looks=1, steady=True):
                found[key] = differences
        texts = await self._as_stored(table, logged, handles)
        return _Look(position, handles, canonical, exact, found, texts, clocks)

    async def _as_stored(
        self, table: CommonTable, logged: Mapping[Key, Mapping[str, Any]], handles: Mapping[str, SnapshotHandle]
    ) -> dict[Key, dict[str, str | None]]:
        """Values as they were passed to the log, as the texts of stored ones."""
        if not logged:
            return {}
        async with postgres_at(next(iter(handles.values()))) as connection:
            types = (await find_table(connection, table.label)).columns
        kinds = {column.name: column.kind for column in table.columns if not column.generated}
        found: dict[Key, dict[str, str | None]] = {}
        for key, passed in logged.items():
            with suppress(InvalidChange):  # then the row is not repaired
                texts = {name: text_form(passed[name], types[name]) for name in kinds}
                found[key] = {n: t[2:] if t and kinds[n] is ValueKind.BYTES else t for n, t in texts.items()}
        return found

    # ---------------------------------------------------------------------------------------------------- writing

    async def _write(self, table: CommonTable, look: _Look, changes: Sequence[RowChange], ident: str) -> None:
        """One transaction per replica, or as many as its rows need; all in the set's log."""
        by_replica: dict[str, list[RowChange]] = {}
        for change in changes:
            by_replica.setdefault(change.replica, []).append(change)
        for replica, planned in by_replica.items():
            repairs = await self._statements(table, look, look.handles[replica], planned)
            for part, some in enumerate(_cut(repairs)):
                site = self._link.config.site_of(replica)
                repair = Repair(site, ident, look.position, part, self._planner.force)
                try:
                    number = await self._link.publish(repair, some)
                except (TransactionAborted, OutcomeUnknown):
                    continue  # the next round sees what has become of it
                await self._link.applied(replica, number, self._wait_s)  # until then the rows are guarded
                self._done.transactions.append(f"{replica}: number {number} of the log")

    async def _statements(
        self, table: CommonTable, look: _Look, handle: SnapshotHandle, changes: Sequence[RowChange]
    ) -> list[Statement]:
        statements = []
        async with postgres_at(handle) as connection:
            images = AsImages(connection)
            for change in changes:
                texts = [_statement(table, look, change), *await self._versions(table, look, change)]
                violations = await images.violations({change.table: table}, [change])
                if violations is not None:
                    texts = [ON, *texts, OFF, *(fails(violation.query) for violation in violations)]
                row_key = msgspec.json.encode(_row_key(table, change.key)).decode()
                statements.append(Statement(REPAIR_CALL, (row_key, texts)))
        return statements

    async def _versions(self, table: CommonTable, look: _Look, change: RowChange) -> list[str]:
        """In a peer-to-peer set the row's version is copied with the row, so that later writes follow it."""
        if self._link.policy.entry_kind is not EntryKind.VERSIONED:
            return []
        known = look.clocks.get(change.key, {})
        source = change.source or max(known, key=lambda name: known[name].rank, default=change.replica)
        if source == change.replica:
            return []
        async with postgres_at(look.handles[source]) as connection:
            (key,) = await clock_keys(connection, table, [change.key])
            clock = await connection.fetchrow(
                f"SELECT * FROM {CLOCKS} WHERE table_name = $1 AND key = $2", table_name(table.label), key
            )
        if clock is None:
            return []
        version = {name: literal(str(value)) for name, value in clock.items()}
        updates = ", ".join(f"{name} = {value}" for name, value in version.items() if name not in ("table_name", "key"))
        return [
            f"INSERT INTO {CLOCKS} ({', '.join(version)}) VALUES ({', '.join(version.values())}) "
            f"ON CONFLICT (table_name, key) DO UPDATE SET {updates}"
        ]


def _same(before: Iterable[Difference], now: Iterable[Difference]) -> bool:
    return [(d.replica, d.actual) for d in before] == [(d.replica, d.actual) for d in now]


def _row_key(table: CommonTable, key: Key) -> RowKey:
    return row_key(table.label, dict(zip(table.key, key, strict=True)))


def _cut(repairs: Sequence[Statement]) -> list[list[Statement]]:
    parts: list[list[Statement]] = [[]]
    size = 0
    for repair in repairs:
        length = sum(len(text) for text in repair.args[1])
        if parts[-1] and size + length > TRANSACTION_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(repair)
        size += length
    return parts


def _statement(table: CommonTable, look: _Look, change: RowChange) -> str:
    """What makes the row right, if it is still what the look saw."""
    schema = table.schemas[change.replica]
    key = " AND ".join(
        f"{quoted(name)} = {rows.from_text(schema.column(name), literal(part))}"
        for name, part in zip(table.key, change.key, strict=True)
    )
    condition = f"{key} AND {_as_seen(table, look, change)}" if change.seen is not None else key
    if change.wanted is None:
        return f"DELETE FROM {schema.qualified} WHERE {condition}"
    wanted = _wanted(table, look, change)
    if change.seen is None:
        names, values = ", ".join(map(quoted, wanted)), ", ".join(wanted.values())
        # Not ON CONFLICT: it takes no table with a deferrable constraint.
        absent = f"NOT EXISTS (SELECT FROM {schema.qualified} WHERE {key})"
        return f"INSERT INTO {schema.qualified} ({names}) OVERRIDING SYSTEM VALUE SELECT {values} WHERE {absent}"
    updates = ", ".join(f"{quoted(name)} = {value}" for name, value in wanted.items() if name not in table.key)
    return f"UPDATE {schema.qualified} SET {updates} WHERE {condition}"


def _wanted(table: CommonTable, look: _Look, change: RowChange) -> dict[str, str]:
    """The wanted values as SQL, by column."""
    schema = table.schemas[change.replica]
    if change.source is None:
        texts = look.logged[change.key]
    else:
        stored = look.exact[change.source][change.key]
        texts = {c.name: text for c, text in zip(table.columns, stored, strict=True) if not c.generated}
    return {
        name: "NULL" if text is None else rows.from_text(schema.column(name), literal(text))
        for name, text in texts.items()
    }


def _as_seen(table: CommonTable, look: _Look, change: RowChange) -> str:
    canonical = dict(zip(table.names, look.canonical[change.replica][change.key], strict=True))
    exact = dict(zip(table.names, look.exact[change.replica][change.key], strict=True))
    conditions = []
    for column in table.columns:
        if column.name in table.key:
            continue
        if column.kind is ValueKind.JSON:
            text, seen = f"{quoted(column.name)}::text", exact[column.name]
        else:
            text, seen = postgres_text(column), canonical[column.name]
        conditions.append(f"{text} IS NOT DISTINCT FROM {'NULL' if seen is None else literal(seen)}")
    return " AND ".join(conditions) or "true"
