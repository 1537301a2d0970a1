"""Reads rows of one replica as Arrow batches of canonical text; runs in Spark's Python workers and in the driver.

A `RowsRequest` is everything a worker needs, so a partition is one request. PostgreSQL is read through ADBC, SQLite
through its own driver.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa

from replication.divergence.read.vault import resolved
from replication.tables.buckets import HIGHEST, LOWEST, Buckets, HashBuckets, KeyRange, RangeBuckets
from replication.tables.canonical import (
    SESSION_SETTINGS,
    is_marked,
    json_text,
    marked,
    postgres_text,
    sqlite_text,
)
from replication.tables.catalog import LostConnection, sqlite
from replication.tables.checksums import bucket_expression, key_expression
from replication.tables.endpoints import Engine, Key, SnapshotHandle
from replication.tables.errors import CheckRejected, SnapshotLost
from replication.tables.schema import Column, CommonTable, TableSchema, ValueKind, literal, quoted

BUCKET = "tops_bucket"
BATCH_ROWS = 10_000
_OPTIONS = "connect_timeout=10&tcp_user_timeout=30000&keepalives_idle=10"


@dataclass(frozen=True, slots=True)
class Where:
    """Which rows: everything by default; several conditions hold together."""

    ranges: tuple[KeyRange, ...] = ()  # of an integer key
    buckets: tuple[int, ...] = ()
    keys: tuple[Key, ...] = ()
    blocks: tuple[int, int] | None = None  # pages of the table, from and up to; only within one snapshot
    conditions: tuple[str, ...] = ()  # further SQL, from a user's own filters


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """One reader's share of one table on one replica."""

    handle: SnapshotHandle
    schema: TableSchema
    columns: tuple[Column, ...]  # in the order wanted, with the kinds to be compared by
    key: tuple[str, ...]
    buckets: Buckets
    native_buckets: bool  # the server numbers the buckets of a hashed key; otherwise we do, from canonical text
    where: Where = Where()
    exact: bool = False  # values as they are stored, whole, to be written elsewhere; not canonical

    def at(self, where: Where) -> "RowsRequest":
        return replace(self, where=where)


def request_for(table: CommonTable, handle: SnapshotHandle, buckets: Buckets, *, native_buckets: bool) -> RowsRequest:
    schema = table.schemas[handle.replica]
    return RowsRequest(handle, schema, table.columns, table.key, buckets, native_buckets)


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([(BUCKET, pa.int64()), *((column.name, pa.string()) for column in columns)])


def read(request: RowsRequest) -> Iterator[pa.RecordBatch]:
    """Rows as canonical text, with their bucket in front."""
    if request.schema.engine is Engine.SQLITE:
        yield from _read_sqlite(request)
    else:
        yield from _read_postgres(request)


def by_key(request: RowsRequest) -> dict[Key, tuple[str | None, ...]]:
    """The rows in memory, by their key; for a bounded number of keys. The key's columns must come first."""
    found = {}
    for batch in read(request):
        for row in zip(*(column.to_pylist() for column in batch.columns[1:]), strict=True):
            found[row[: len(request.key)]] = row
    return found


@contextmanager
def session(handle: SnapshotHandle) -> Iterator[Any]:
    """An ADBC cursor inside a snapshot, with canonical text output."""
    dsn = resolved(handle.dsn)
    separator = "&" if "?" in dsn else "?"
    try:
        with closing(adbc.connect(f"{dsn}{separator}{_OPTIONS}")) as connection, connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            if handle.snapshot is not None:
                _enter(cursor, handle)
            for name, value in SESSION_SETTINGS.items():
                cursor.execute(f"SET {name} = {literal(value)}")
            try:
                yield cursor
            except OSError as error:  # while batches arrive, whatever goes wrong is this, without a code
                if _is_alive(connection):
                    raise CheckRejected(f"replica {handle.replica} refused a statement: {error}") from error
                raise LostConnection(handle.replica, error) from error
    except (adbc_driver_manager.OperationalError, adbc_driver_manager.InternalError) as error:
        raise LostConnection(handle.replica, error) from error
    except adbc_driver_manager.Error as error:
        raise CheckRejected(f"replica {handle.replica} refused a statement: {error}") from error
    except OSError as error:
        raise LostConnection(handle.replica, error) from error


def _is_alive(connection: Any) -> bool:
    """Whether the session goes on after an error: then it was the server that has rejected the statement."""
    try:
        connection.rollback()
    except adbc_driver_manager.Error:
        return False
    return True


def _enter(cursor: Any, handle: SnapshotHandle) -> None:
    try:
        cursor.execute(f"SET TRANSACTION SNAPSHOT {literal(handle.snapshot or '')}")
    except adbc_driver_manager.Error as error:
        raise SnapshotLost(f"replica {handle.replica}: its snapshot is gone ({error}); resume the check") from error


def _read_postgres(request: RowsRequest) -> Iterator[pa.RecordBatch]:
    if request.where.keys:
        # What is not even a value of the key's type is nowhere in this database.
        keys = tuple(key for key in request.where.keys if not any(map(is_marked, key)))
        if not keys:
            return
        request = request.at(replace(request.where, keys=keys))
    wanted = arrow_schema(request.columns)
    with session(request.handle) as cursor:
        if request.where.ranges or request.where.keys:
            # The planner can't know how narrow the ranges are; the index is always right for them.
            cursor.execute("SET enable_seqscan = off")
        cursor.execute(postgres_query(request))
        for batch in cursor.fetch_record_batch():
            arrays = [array.cast(field.type) for array, field in zip(batch.columns, wanted, strict=True)]
            for index, column in enumerate(request.columns, start=1):
                if column.kind is ValueKind.JSON and not request.exact:
                    arrays[index] = pa.array(map(json_text, arrays[index].to_pylist()), pa.string())
            if not _numbered_by_server(request):
                yield from _with_buckets(request, pa.record_batch(arrays, wanted))
            else:
                yield pa.record_batch(arrays, wanted)


def _numbered_by_server(request: RowsRequest) -> bool:
    return request.native_buckets or isinstance(request.buckets, RangeBuckets)


def _with_buckets(request: RowsRequest, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    assert isinstance(request.buckets, HashBuckets)
    keys = zip(*(batch.column(name).to_pylist() for name in request.key), strict=True)
    numbers = pa.array([request.buckets.of(key) for key in keys], pa.int64())
    numbered = batch.set_column(0, BUCKET, numbers)
    if request.where.buckets:
        wanted = set(request.where.buckets)
        numbered = numbered.filter(pa.array([number in wanted for number in numbers.to_pylist()]))
    if numbered.num_rows:
        yield numbered


def postgres_query(request: RowsRequest) -> str:
    """The statement that one partition runs."""
    table = CommonTable("", request.key, request.columns, {"": request.schema}, ())
    bucket = "0::int8"
    if _numbered_by_server(request):
        bucket = bucket_expression(request.buckets, f"({key_expression(table, request.schema)})")
    texts = (f"{_text_of(column, request)} AS {quoted(column.name)}" for column in request.columns)
    source, filtered = conditions_of(request)
    return f"SELECT {bucket} AS {BUCKET}, {', '.join(texts)} FROM {source}{filtered}"


def _text_of(column: Column, request: RowsRequest) -> str:
    if request.exact and column.name not in request.key:
        return (
            f"encode({quoted(column.name)}, 'hex')"
            if column.kind is ValueKind.BYTES
            else f"{quoted(column.name)}::text"
        )
    return postgres_text(column, digest=column.name not in request.key)


def conditions_of(request: RowsRequest) -> tuple[str, str]:
    """What to select from, and the WHERE clause."""
    source, where, conditions = request.schema.qualified, request.where, list(request.where.conditions)
    if request.schema.engine is Engine.SQLITE:
        if where.ranges:
            alternatives = (_sqlite_range(quoted(request.key[0]), r) for r in where.ranges)
            conditions.append("(" + " OR ".join(alternatives) + ")")
        if where.keys and request.schema.integer_key and not any(is_marked(k) for (k,) in where.keys):
            conditions.append(f"{quoted(request.key[0])} IN ({', '.join(str(int(k)) for (k,) in where.keys)})")
        return quoted(request.schema.name), _where(conditions)
    if where.ranges:
        # A join with the ranges reads each by the index, however many there are.
        values = ", ".join(f"({_int8(r.low)}, {_int8(r.high)})" for r in where.ranges)
        source += f" JOIN (VALUES {values}) AS wanted_range(tops_low, tops_high) "
        source += f"ON {quoted(request.key[0])} BETWEEN tops_low AND tops_high"
    if where.keys:
        source += f" JOIN ({_keys_as_values(request)}) AS wanted_key ON {_keys_match(request)}"
    if where.blocks:
        first, end = where.blocks
        conditions.append(f"ctid >= '({first},0)'::tid AND ctid < '({end},0)'::tid")
    if where.buckets and request.native_buckets and isinstance(request.buckets, HashBuckets):
        table = CommonTable("", request.key, request.columns, {"": request.schema}, ())
        bucket = bucket_expression(request.buckets, f"({key_expression(table, request.schema)})")
        conditions.append(f"{bucket} = ANY ('{{{','.join(map(str, where.buckets))}}}'::int8[])")
    return source, _where(conditions)


def _sqlite_range(name: str, keys: KeyRange) -> str:
    """Ranges that leave no gap: SQLite lets a key be any value, and sorts text and bytes after all numbers."""
    if keys.high == HIGHEST:
        return f"({name} >= {keys.low} OR {name} IS NULL)" if keys.low > LOWEST else "true"
    low = f"{name} >= {keys.low}" if keys.low > LOWEST else "true"
    return f"({low} AND {name} < {keys.high + 1})"


def _where(conditions: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _int8(value: int) -> str:
    return f"({literal(str(value))})::int8"


def _keys_as_values(request: RowsRequest) -> str:
    rows = ", ".join("(" + ", ".join(map(literal, key)) + ")" for key in request.where.keys)
    names = ", ".join(f"tops_k{i}" for i in range(len(request.key)))
    return f"SELECT * FROM (VALUES {rows}) AS k({names})"


def _keys_match(request: RowsRequest) -> str:
    return " AND ".join(
        f"{request.schema.qualified}.{quoted(name)} = {from_text(request.schema.column(name), f'wanted_key.tops_k{i}')}"
        for i, name in enumerate(request.key)
    )


def from_text(column: Column, expression: str) -> str:
    """SQL that turns canonical text back into a value of the column."""
    if column.kind is ValueKind.BYTES:
        return f"decode({expression}, 'hex')"
    return f"({expression})::{column.declared}"


def _read_sqlite(request: RowsRequest) -> Iterator[pa.RecordBatch]:
    path = request.handle.dsn.removeprefix("sqlite:///")
    wanted_keys, wanted_buckets = set(request.where.keys), set(request.where.buckets)
    names = [column.name for column in request.columns]
    key_at = [names.index(name) for name in request.key if name in names]
    with sqlite(request.handle.replica, path) as connection:
        connection.text_factory = _decoded
        cursor = _sqlite_rows(connection, request)
        while rows := cursor.fetchmany(BATCH_ROWS):
            kept = []
            for row in rows:
                both = zip(request.columns, row, strict=True)
                texts = [
                    marked(sqlite_text(column.kind, value, digest=column.name not in request.key))
                    for column, value in both
                ]
                key = tuple(texts[index] for index in key_at)
                bucket = _bucket_of(request.buckets, key)
                if (wanted_keys and key not in wanted_keys) or (wanted_buckets and bucket not in wanted_buckets):
                    continue
                if request.exact:
                    stored = enumerate(zip(texts, row, strict=True))
                    texts = [text if index in key_at else _as_stored(value) for index, (text, value) in stored]
                kept.append((bucket, *texts))
            if kept:
                arrays = [pa.array(values, field.type) for values, field in _columns(kept, request)]
                yield pa.record_batch(arrays, arrow_schema(request.columns))


def _as_stored(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.hex()
    return None if value is None else str(value)


def _columns(rows: Sequence[tuple[Any, ...]], request: RowsRequest) -> Iterator[tuple[tuple[Any, ...], pa.Field]]:
    return zip(zip(*rows, strict=True), arrow_schema(request.columns), strict=True)


def _sqlite_rows(connection: sqlite3.Connection, request: RowsRequest) -> sqlite3.Cursor:
    names = ", ".join(quoted(column.name) for column in request.columns)
    source, filtered = conditions_of(request)
    return connection.execute(f"SELECT {names} FROM {source}{filtered}")


def _bucket_of(buckets: Buckets, key: Sequence[str | None]) -> int:
    if isinstance(buckets, HashBuckets):
        return buckets.of(key)
    number = key[0] if key else None
    return buckets.of(HIGHEST if number is None or is_marked(number) else int(number))


def _decoded(raw: bytes) -> str | bytes:
    """Text that is not UTF-8 stays bytes and is reported as a value that is not of its type."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw
