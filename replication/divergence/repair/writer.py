"""Repairs of plain databases: rows are copied from the replica that holds the wanted version, one transaction a batch.

Each write is guarded: the row must still be what the check saw, and the source's row must still be the wanted one.
In a replica set the set's own writer takes this place, and repairs are ordered with live writes.
"""

import asyncio
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import asyncpg

from adapters.postgres.apply.replica_mode import Violation
from replication.divergence.read import rows
from replication.divergence.read.background import in_thread
from replication.divergence.read.snapshots import SnapshotBarrier
from replication.divergence.repair.as_images import OFF, ON, AsImages
from replication.tables.buckets import HashBuckets
from replication.tables.canonical import json_text, postgres_text, sqlite_text
from replication.tables.catalog import CONNECT_TIMEOUT_S, LostConnection, describe, postgres
from replication.tables.endpoints import Applied, Engine, Key, ReplicaEndpoint, RowChange, Values
from replication.tables.errors import CheckRejected, RowMoved
from replication.tables.schema import Column, CommonTable, TableSchema, ValueKind, common_table, quoted

StoredRow = tuple[str | None, ...]


class DirectWriter:
    """Writes straight into the databases."""

    def __init__(self, endpoints: Sequence[ReplicaEndpoint]) -> None:
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._tables: dict[str, CommonTable] = {}

    async def apply(self, changes: Sequence[RowChange]) -> Applied:
        (replica,) = {change.replica for change in changes}
        endpoint = self._endpoints[replica]
        rows_wanted = [(change, await self._table(change.table)) for change in changes]
        stored = await self._stored(changes)
        if endpoint.engine is Engine.SQLITE:
            return await asyncio.to_thread(_apply_sqlite, endpoint, rows_wanted, stored)
        return await _apply_postgres(endpoint, rows_wanted, stored)

    async def _table(self, name: str) -> CommonTable:
        if name not in self._tables:
            described = await asyncio.gather(*(describe(endpoint, name) for endpoint in self._endpoints.values()))
            schemas = dict(zip(self._endpoints, described, strict=True))
            self._tables[name] = common_table(name, schemas, common_columns_only=True)
        return self._tables[name]

    async def _stored(self, changes: Sequence[RowChange]) -> dict[tuple[str, Key], StoredRow]:
        """The wanted rows, whole, from the replicas that hold them."""
        found: dict[tuple[str, Key], StoredRow] = {}
        by_source: dict[tuple[str, str], list[RowChange]] = {}
        for change in changes:
            if change.source is not None:
                by_source.setdefault((change.source, change.table), []).append(change)
        for (source, table), group in by_source.items():
            keys = tuple(change.key for change in group)
            copied = await self._copies(source, await self._table(table), keys)
            for change in group:
                canonical, stored = copied.get(change.key, (None, None))
                if stored is None or not _same(canonical, change.wanted):
                    raise RowMoved(source, table, change.key)
                found[table, change.key] = stored
        return found

    async def _copies(
        self, source: str, table: CommonTable, keys: tuple[Key, ...]
    ) -> dict[Key, tuple[Values, StoredRow]]:
        """Rows in both forms, canonical to be compared and exact to be written, of one snapshot."""
        barrier = SnapshotBarrier()
        try:
            handles = await barrier.open([self._endpoints[source]])
            if source not in handles:
                raise LostConnection(source, ConnectionError("it did not answer"))
            whole = rows.request_for(table, handles[source], HashBuckets(1), native_buckets=False)
            request = whole.at(rows.Where(keys=keys))
            exact = await in_thread(lambda: rows.by_key(replace(request, exact=True)))
            canonical = await in_thread(lambda: rows.by_key(request))
        finally:
            await barrier.release()
        return {key: (dict(zip(table.names, row, strict=True)), exact[key]) for key, row in canonical.items()}


def _same(row: Values | None, seen: Values | None) -> bool:
    if row is None or seen is None:
        return row is None and seen is None
    return all(row.get(column) == value for column, value in seen.items())


async def _apply_postgres(
    endpoint: ReplicaEndpoint,
    changes: Sequence[tuple[RowChange, CommonTable]],
    stored: Mapping[tuple[str, Key], StoredRow],
) -> Applied:
    tables = {change.table: table for change, table in changes}
    async with postgres(endpoint.name, endpoint.dsn) as connection:
        try:
            async with connection.transaction():
                await connection.execute("SET CONSTRAINTS ALL DEFERRED")
                violations = await AsImages(connection).violations(tables, [change for change, _ in changes])
                if violations is not None:
                    await _switch_triggers_off(connection, endpoint.name, list(tables))
                for change, table in changes:
                    await _change_postgres(connection, change, table, stored.get((change.table, change.key)))
                if violations is not None:
                    await _check(connection, endpoint.name, violations)
                transaction = await connection.fetchval("SELECT pg_current_xact_id()::text")
        except asyncpg.IntegrityConstraintViolationError as error:
            raise CheckRejected(
                f"{endpoint.name}: the repair breaks a constraint ({error}); nothing of its batch was written"
            ) from error
    return Applied(len(changes), (f"{endpoint.name}:{transaction}",))


async def _switch_triggers_off(connection: asyncpg.Connection, replica: str, tables: Sequence[str]) -> None:
    user = await connection.fetchval("SELECT session_user::text")
    try:
        await connection.execute(ON)
    except asyncpg.InsufficientPrivilegeError as error:
        raise CheckRejected(
            f"{replica}: {', '.join(tables)}: a table has triggers, rules or referential actions, which a repair must "
            f"not run, and login {user!r} may not switch them off; as a superuser run: "
            f"GRANT SET ON PARAMETER session_replication_role TO {quoted(user)}"
        ) from error


async def _check(connection: asyncpg.Connection, replica: str, violations: Sequence[Violation]) -> None:
    await connection.execute(OFF)
    for constraint, query in violations:
        if await connection.fetchval(f"SELECT EXISTS ({query})"):
            raise CheckRejected(
                f"{replica}: the repair breaks the constraint {constraint}; nothing of its batch was written"
            )


async def _change_postgres(
    connection: asyncpg.Connection, change: RowChange, table: CommonTable, stored: StoredRow | None
) -> None:
    schema = table.schemas[change.replica]
    condition = " AND ".join(f"{quoted(k)} = {_argument(schema, k, i + 1)}" for i, k in enumerate(table.key))
    texts = ", ".join(postgres_text(column, digest=column.name not in table.key) for column in table.columns)
    now = await connection.fetchrow(f"SELECT {texts} FROM {schema.qualified} WHERE {condition} FOR UPDATE", *change.key)
    if not _same(_canonical(now, table), change.seen):
        raise RowMoved(change.replica, change.table, change.key)
    if stored is None:
        await connection.execute(f"DELETE FROM {schema.qualified} WHERE {condition}", *change.key)
        return
    written = [
        (column.name, value) for column, value in zip(table.columns, stored, strict=True) if not column.generated
    ]
    if change.seen is not None:
        others = [(name, value) for name, value in written if name not in table.key]
        first = len(change.key) + 1
        updates = ", ".join(f"{quoted(n)} = {_argument(schema, n, i)}" for i, (n, _) in enumerate(others, first))
        update = f"UPDATE {schema.qualified} SET {updates} WHERE {condition}"
        await connection.execute(update, *change.key, *(value for _, value in others))
        return
    # A row that appeared since we looked is not overwritten: the insert of a missing row must be an insert.
    names = ", ".join(quoted(name) for name, _ in written)
    values = ", ".join(_argument(schema, name, i) for i, (name, _) in enumerate(written, 1))
    try:
        await connection.execute(
            f"INSERT INTO {schema.qualified} ({names}) OVERRIDING SYSTEM VALUE VALUES ({values})",
            *(value for _, value in written),
        )
    except asyncpg.UniqueViolationError as error:
        raise RowMoved(change.replica, change.table, change.key) from error


def _argument(schema: TableSchema, name: str, position: int) -> str:
    return rows.from_text(schema.column(name), f"${position}::text")


def _canonical(record: asyncpg.Record | None, table: CommonTable) -> Values | None:
    if record is None:
        return None
    values = dict(zip(table.names, record.values(), strict=True))
    for column in table.columns:
        if column.kind is ValueKind.JSON:
            values[column.name] = json_text(values[column.name])
    return values


def _apply_sqlite(
    endpoint: ReplicaEndpoint,
    changes: Sequence[tuple[RowChange, CommonTable]],
    stored: Mapping[tuple[str, Key], StoredRow],
) -> Applied:
    with closing(sqlite3.connect(endpoint.path, timeout=CONNECT_TIMEOUT_S, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            for change, table in changes:
                _change_sqlite(connection, change, table, stored.get((change.table, change.key)))
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise LostConnection(endpoint.name, error) from error
    return Applied(len(changes), (f"{endpoint.name}:{uuid.uuid4().hex[:12]}",))


def _change_sqlite(
    connection: sqlite3.Connection, change: RowChange, table: CommonTable, stored: StoredRow | None
) -> None:
    name = quoted(table.schemas[change.replica].name)
    columns = ", ".join(map(quoted, table.names))
    key_columns = table.columns[: len(table.key)]
    condition = " AND ".join(f"{quoted(column.name)} = ?" for column in key_columns)
    key = [_sqlite_value(column, part) for column, part in zip(key_columns, change.key, strict=True)]
    now = connection.execute(f"SELECT {columns} FROM {name} WHERE {condition}", key).fetchone()
    texts = None
    if now is not None:
        both = zip(table.columns, now, strict=True)
        texts = {c.name: sqlite_text(c.kind, value, digest=c.name not in table.key) for c, value in both}
    if not _same(texts, change.seen):
        raise RowMoved(change.replica, change.table, change.key)
    if stored is None:
        connection.execute(f"DELETE FROM {name} WHERE {condition}", key)
        return
    kept = [(c, value) for c, value in zip(table.columns, stored, strict=True) if not c.generated]
    values = [_sqlite_value(column, value) for column, value in kept]
    names, marks = ", ".join(quoted(column.name) for column, _ in kept), ", ".join("?" for _ in kept)
    updates = ", ".join(f"{quoted(c.name)} = excluded.{quoted(c.name)}" for c, _ in kept if c.name not in table.key)
    on_conflict = f" ON CONFLICT ({', '.join(map(quoted, table.key))}) DO UPDATE SET {updates}" if updates else ""
    connection.execute(f"INSERT INTO {name} ({names}) VALUES ({marks}){on_conflict}", values)


def _sqlite_value(column: Column, text: str | None) -> object:
    if text is None:
        return None
    match column.kind:
        case ValueKind.INTEGER:
            return int(text)
        case ValueKind.FLOAT4 | ValueKind.FLOAT8:
            return float(text)
        case ValueKind.BYTES:
            return bytes.fromhex(text)
        case ValueKind.BOOLEAN:
            return int(text.lower() in ("t", "true", "1"))
        case _:
            return text
