"""Asks a database what it is and what its tables look like.

Speaks asyncpg to PostgreSQL and sqlite3 to SQLite, and translates their failures to reach anyone into `NotReachable`.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import asyncpg

from adapters.changes import split_table_name
from replication.tables.canonical import SESSION_SETTINGS
from replication.tables.endpoints import Engine, ReplicaEndpoint, SnapshotHandle
from replication.tables.errors import CheckRejected, SnapshotLost
from replication.tables.schema import Column, TableSchema, ValueKind, quoted
from tops.model.errors import NotReachable

CONNECT_TIMEOUT_S = 10.0
OWN_SCHEMA = "tops"  # the middleware's tables; their content differs between replicas by design


@dataclass(frozen=True, slots=True)
class Server:
    """What decides whether two servers hash alike."""

    engine: Engine
    version: str
    major: int
    encoding: str


class LostConnection(NotReachable):
    """A replica went silent while it was being read; what was learned from it so far does not count."""

    def __init__(self, replica: str, error: BaseException) -> None:
        self.replica, self.detail = replica, str(error) or type(error).__name__
        super().__init__(f"replica {replica} can't be read: {self.detail}; bring it back, then resume the check")


@asynccontextmanager
async def postgres(replica: str, dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection whose text output is canonical; every way of losing it is a `LostConnection`."""
    try:
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S, server_settings=SESSION_SETTINGS)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise LostConnection(replica, error) from error
    try:
        yield connection
    except (
        OSError,
        TimeoutError,
        asyncpg.PostgresConnectionError,
        asyncpg.OperatorInterventionError,
        asyncpg.InterfaceError,
    ) as error:
        raise LostConnection(replica, error) from error
    except asyncpg.PostgresError as error:
        raise CheckRejected(f"replica {replica} refused a statement: {error}") from error
    finally:
        connection.terminate()


@asynccontextmanager
async def postgres_at(handle: SnapshotHandle) -> AsyncIterator[asyncpg.Connection]:
    """A connection inside a snapshot."""
    async with postgres(handle.replica, handle.dsn) as connection:
        await enter_snapshot(connection, handle)
        yield connection


async def enter_snapshot(connection: asyncpg.Connection, handle: SnapshotHandle) -> None:
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    if handle.snapshot is not None:
        try:
            await connection.execute(f"SET TRANSACTION SNAPSHOT '{handle.snapshot}'")
        except asyncpg.PostgresError as error:
            raise SnapshotLost(f"replica {handle.replica}: its snapshot is gone ({error}); resume the check") from error


@contextmanager
def sqlite(replica: str, path: str) -> Iterator[sqlite3.Connection]:
    """A read-only connection; a file that is not there is not created."""
    if not Path(path).exists():
        raise LostConnection(replica, FileNotFoundError(f"no such file: {path}"))
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=CONNECT_TIMEOUT_S, check_same_thread=False)
    try:
        yield connection
    except sqlite3.OperationalError as error:
        raise LostConnection(replica, error) from error
    finally:
        connection.close()


async def server_of(endpoint: ReplicaEndpoint) -> Server:
    if endpoint.engine is Engine.SQLITE:
        with sqlite(endpoint.name, endpoint.path) as lite:
            lite.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return Server(Engine.SQLITE, sqlite3.sqlite_version, 3, "UTF8")
    async with postgres(endpoint.name, endpoint.dsn) as connection:
        [(version, number, encoding)] = await connection.fetch(
            "SELECT current_setting('server_version'), current_setting('server_version_num')::int, "
            "current_setting('server_encoding')"
        )
    return Server(Engine.POSTGRES, version, number // 10_000, encoding)


async def tables_of(endpoint: ReplicaEndpoint) -> list[str]:
    """All tables a user made; outside the schema `public` with their schema's name."""
    if endpoint.engine is Engine.SQLITE:
        with sqlite(endpoint.name, endpoint.path) as lite:
            query = "SELECT name FROM sqlite_master WHERE type = 'table' AND substr(name, 1, 7) <> 'sqlite_' ORDER BY 1"
            return [_plain_or_quoted(name) for (name,) in lite.execute(query) if not name.startswith(f"{OWN_SCHEMA}_")]
    async with postgres(endpoint.name, endpoint.dsn) as connection:
        rows = await connection.fetch(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname !~ '^pg_' "
            "AND n.nspname NOT IN ('information_schema', $1) ORDER BY 1, 2",
            OWN_SCHEMA,
        )
    named = [(_plain_or_quoted(schema), _plain_or_quoted(name)) for schema, name in rows]
    return [name if schema == "public" else f"{schema}.{name}" for schema, name in named]


def _plain_or_quoted(name: str) -> str:
    """As users name it: a dot inside a name is not the one after a schema."""
    return quoted(name) if "." in name or '"' in name else name


async def describe(endpoint: ReplicaEndpoint, table: str) -> TableSchema:
    """The table on this replica; refuses a name that it does not have."""
    if endpoint.engine is Engine.SQLITE:
        return await asyncio.to_thread(_describe_sqlite, endpoint, table)
    async with postgres(endpoint.name, endpoint.dsn) as connection:
        return await describe_postgres(connection, endpoint, table)


async def describe_postgres(connection: asyncpg.Connection, endpoint: ReplicaEndpoint, table: str) -> TableSchema:
    schema, name = split_table_name(table)
    schema = schema or "public"
    found = await connection.fetchrow(
        "SELECT c.oid, c.reltuples::int8 AS tuples, c.relpages FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = $1 AND c.relname = $2 AND c.relkind IN ('r', 'p')",
        schema,
        name,
    )
    if found is None:
        raise CheckRejected(f"replica {endpoint.name} has no table {table}; name tables as schema.table outside public")
    columns = tuple(_postgres_column(r) for r in await connection.fetch(_COLUMNS, found["oid"]))
    key = tuple(r["attname"] for r in await connection.fetch(_KEY, found["oid"]))
    estimate = found["tuples"]
    if estimate < 0:  # never analysed
        estimate = await connection.fetchval(f"SELECT count(*) FROM {quoted(schema)}.{quoted(name)}")
    pages = max(0, found["relpages"])  # a partitioned table has -1: its partitions have the pages
    described = TableSchema(Engine.POSTGRES, schema, name, columns, key, estimate, pages)
    return await _with_key_range(connection, described) if described.integer_key else described


async def _with_key_range(connection: asyncpg.Connection, table: TableSchema) -> TableSchema:
    name = quoted(table.key[0])
    [(low, high)] = await connection.fetch(f"SELECT min({name})::int8, max({name})::int8 FROM {table.qualified}")
    correlation = await connection.fetchval(
        "SELECT abs(correlation) FROM pg_stats WHERE schemaname = $1 AND tablename = $2 AND attname = $3",
        table.schema,
        table.name,
        table.key[0],
    )
    return replace(table, key_follows_storage=(correlation or 0) > 0.9, key_low=low, key_high=high)


_COLUMNS = """
    WITH RECURSIVE base(oid, typname, typtype, attnum) AS (
        SELECT t.oid, t.typname, t.typtype, a.attnum
        FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
        WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT b.oid, b.typname, b.typtype, base.attnum
        FROM base JOIN pg_type d ON d.oid = base.oid JOIN pg_type b ON b.oid = d.typbasetype
        WHERE base.typtype = 'd'
    )
    SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS declared, base.typname,
           a.attnotnull AND NOT EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                                        WHERE i.inhparent = $1 AND NOT c.relispartition) AS never_null,
           a.attgenerated <> '' AS generated
    FROM pg_attribute a JOIN base ON base.attnum = a.attnum AND base.typtype <> 'd'
    WHERE a.attrelid = $1 ORDER BY a.attnum
"""
_KEY = """
    WITH candidates AS (
        SELECT i.indexrelid, i.indkey, i.indisprimary, i.indnkeyatts
        FROM pg_index i
        WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
          AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = $1 AND NOT a.attnotnull
                          AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))
        ORDER BY i.indisprimary DESC, i.indnkeyatts, i.indexrelid LIMIT 1
    )
    SELECT a.attname FROM candidates, unnest(indkey[0:indnkeyatts - 1]) WITH ORDINALITY AS k(attnum, position)
    JOIN pg_attribute a ON a.attrelid = $1 AND a.attnum = k.attnum ORDER BY k.position
"""
_POSTGRES_KINDS = {
    "bool": ValueKind.BOOLEAN,
    "int2": ValueKind.INTEGER,
    "int4": ValueKind.INTEGER,
    "int8": ValueKind.INTEGER,
    "numeric": ValueKind.NUMERIC,
    "float4": ValueKind.FLOAT4,
    "float8": ValueKind.FLOAT8,
    "text": ValueKind.TEXT,
    "varchar": ValueKind.TEXT,
    "bpchar": ValueKind.CHAR,
    "bytea": ValueKind.BYTES,
    "date": ValueKind.DATE,
    "time": ValueKind.TIME,
    "timestamp": ValueKind.TIMESTAMP,
    "timestamptz": ValueKind.TIMESTAMPTZ,
    "uuid": ValueKind.UUID,
    "json": ValueKind.JSON,
    "jsonb": ValueKind.JSON,
}


def _postgres_column(record: Any) -> Column:
    kind = _POSTGRES_KINDS.get(record["typname"], ValueKind.OTHER)
    return Column(record["attname"], record["declared"], kind, not record["never_null"], record["generated"])


def _describe_sqlite(endpoint: ReplicaEndpoint, table: str) -> TableSchema:
    name = split_table_name(table)[1]
    with sqlite(endpoint.name, endpoint.path) as connection:
        columns = connection.execute(f"PRAGMA table_xinfo({quoted(name)})").fetchall()
        if not columns:
            raise CheckRejected(f"replica {endpoint.name} has no table {table}")
        # pk is the position within the key, from 1; hidden 2 and 3 are generated columns.
        key = tuple(c[1] for c in sorted((c for c in columns if c[5]), key=lambda c: c[5]))
        described = tuple(
            Column(c[1], c[2] or "any", _sqlite_kind(c[2]), not c[3] and not c[5], c[6] in (2, 3)) for c in columns
        )
        (rows,) = connection.execute(f"SELECT count(*) FROM {quoted(name)}").fetchone()
        schema = TableSchema(Engine.SQLITE, "main", name, described, key, rows)
        if not schema.integer_key:
            return schema
        low, high = connection.execute(
            f"SELECT min({quoted(key[0])}), max({quoted(key[0])}) FROM {quoted(name)} "
            f"WHERE typeof({quoted(key[0])}) = 'integer'"
        ).fetchone()
    return TableSchema(Engine.SQLITE, "main", name, described, key, rows, 0, True, low, high)


def _sqlite_kind(declared: str) -> ValueKind:
    """By what the declared type contains, most telling first, as SQLite's own affinity rules go."""
    lowered = declared.lower()
    return next((kind for part, kind in _SQLITE_KINDS if part in lowered), ValueKind.TEXT)


_SQLITE_KINDS = (
    ("timestamptz", ValueKind.TIMESTAMPTZ),
    ("with time zone", ValueKind.TIMESTAMPTZ),
    ("timestamp", ValueKind.TIMESTAMP),
    ("datetime", ValueKind.TIMESTAMP),
    ("date", ValueKind.DATE),
    ("interval", ValueKind.OTHER),
    ("time", ValueKind.TIME),
    ("uuid", ValueKind.UUID),
    ("json", ValueKind.JSON),
    ("bool", ValueKind.BOOLEAN),
    ("int", ValueKind.INTEGER),
    ("serial", ValueKind.INTEGER),
    ("numeric", ValueKind.NUMERIC),
    ("decimal", ValueKind.NUMERIC),
    ("real", ValueKind.FLOAT8),
    ("float", ValueKind.FLOAT8),
    ("double", ValueKind.FLOAT8),
    ("blob", ValueKind.BYTES),
    ("bytea", ValueKind.BYTES),
)
