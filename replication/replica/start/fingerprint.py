"""What one database holds of a set, small enough to be compared with others: schema, row counts, checksums, server.

Everything is read in one snapshot, by several connections. How a table is cut for reading differs from server to
server and does not show: checksums are sums over buckets, and buckets depend on the smallest and largest key alone.
"""

import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import asyncpg
import msgspec

from adapters.changes import split_table_name
from replication.tables import catalog
from replication.tables.buckets import Buckets, HashBuckets, KeyRange, RangeBuckets
from replication.tables.checksums import checksum_query
from replication.tables.cuts import key_ranges
from replication.tables.endpoints import ReplicaEndpoint, SnapshotHandle
from replication.tables.errors import CheckRejected
from replication.tables.schema import CommonTable, TableSchema, quoted
from replication.tables.table_schema import schema_lines

READERS = 4  # connections that compute checksums side by side
READ_ROWS = 200_000  # rows per query where key ranges can be read from an index
BUCKETS = 32  # per table: enough to say where a difference is
NO_CHECKSUM = ""

_DATABASE = """
select current_setting('server_version_num')::int / 10000 as major, current_setting('server_encoding') as encoding,
       to_jsonb(d)::text as described
  from pg_database d where datname = current_database()
"""
# Time zone data has no version that could be asked for: this is what it says about zones whose rules changed lately.
_TIME_ZONES = """
select md5(string_agg(concat_ws(' ', name, at, at at time zone name), ',' order by name, at))
  from unnest(array['Africa/Cairo', 'Africa/Juba', 'America/Asuncion', 'America/Godthab', 'America/Mexico_City',
                    'America/Sao_Paulo', 'Asia/Almaty', 'Asia/Amman', 'Asia/Beirut', 'Asia/Damascus', 'Asia/Gaza',
                    'Asia/Manila', 'Asia/Qyzylorda', 'Asia/Tehran', 'Europe/Kiev', 'Europe/Volgograd', 'Pacific/Apia',
                    'Pacific/Fiji', 'Pacific/Norfolk', 'America/New_York', 'Europe/Berlin']) as name,
       unnest(array['1890-01-15Z', '1950-07-15Z', '1990-01-15Z', '2023-07-15Z', '2030-01-15Z', '2030-07-15Z']
              ::timestamptz[]) as at
"""


class TableDigest(msgspec.Struct, frozen=True, array_like=True):
    """One table in short. `data` is empty where checksums were left out."""

    schema: str
    rows: int
    data: str


class Fingerprint(msgspec.Struct, frozen=True):
    """`server` must be equal; `libraries` should be."""

    server: dict[str, str]
    libraries: dict[str, str]
    tables: dict[str, TableDigest]


class TableDetail(msgspec.Struct, frozen=True, array_like=True):
    """One table in full, to tell what differs: the schema's lines, and (rows, checksum) per bucket."""

    lines: tuple[str, ...]
    buckets: dict[int, tuple[int, str]]
    shift: int | None  # of an integer key: bucket n holds the keys from n << shift on


class Described(msgspec.Struct, frozen=True):
    """A fingerprint and what it was made of."""

    fingerprint: Fingerprint
    details: dict[str, TableDetail]


class Progress:
    """How far a comparison or a copy has come. What was there before it began does not count for its rate."""

    def __init__(self, rows: int = 0, total: int = 0) -> None:
        self.rows, self.total, self.bytes = rows, total, 0
        self.stage = ""  # what is done after the rows
        self._before, self._began = rows, time.monotonic()

    def text(self, done: str) -> str:
        """Empty before anything is known; `done` is what becomes of rows."""
        if self.stage or not self.total:
            return self.stage
        elapsed = time.monotonic() - self._began
        moved = f", {self.bytes / 2**20:,.0f} MB at {self.bytes / 2**20 / elapsed:,.1f} MB/s" if self.bytes else ""
        left = self.left_s
        remaining = f", about {left:.0f} s left" if left is not None else ""
        return f"{self.rows:,} of about {self.total:,} rows {done}{moved}{remaining}"

    @property
    def rows_per_s(self) -> float:
        return (self.rows - self._before) / max(time.monotonic() - self._began, 1e-6)

    @property
    def left_s(self) -> float | None:
        """None as long as nothing is known."""
        return max(self.total - self.rows, 0) / self.rows_per_s if self.rows > self._before else None


async def take(dsn: str, replica: str, tables: Sequence[str], progress: Progress, *, checksums: bool) -> Described:
    """The fingerprint of these tables; those that do not exist are left out."""
    endpoint = ReplicaEndpoint(replica, dsn)
    async with _snapshot(endpoint) as (connection, handle):
        server, libraries = await _server(connection)
        schemas: dict[str, TableSchema] = {}
        lines: dict[str, tuple[str, ...]] = {}
        for table in tables:
            with suppress(CheckRejected):  # there is no such table
                schema = await catalog.describe_postgres(connection, endpoint, table)
                oid = await connection.fetchval("select $1::text::regclass::oid", schema.qualified)
                lines[table] = await schema_lines(connection, oid)
                schemas[table] = schema if _has_primary_key(lines[table]) else replace(schema, key=())
        progress.total = sum(max(0, schema.rows_estimate) for schema in schemas.values())
        sums = await _Checksums(connection, handle, schemas, progress, checksums=checksums).run()
    details = {table: TableDetail(lines[table], sums[table], _shift(schema)) for table, schema in schemas.items()}
    digests = {
        table: TableDigest(
            _digest(detail.lines),
            sum(rows for rows, _ in detail.buckets.values()),
            _digest(sorted(detail.buckets.items())) if checksums else NO_CHECKSUM,
        )
        for table, detail in details.items()
    }
    return Described(Fingerprint(server, libraries, digests), details)


async def schemas(dsn: str, replica: str, tables: Sequence[str]) -> dict[str, str]:
    """The digests of these tables' schemas alone."""
    found = {}
    async with _snapshot(ReplicaEndpoint(replica, dsn)) as (connection, _):
        for table in tables:
            schema, name = split_table_name(table)
            sql_name = f"{quoted(schema or 'public')}.{quoted(name)}"
            oid = await connection.fetchval("select to_regclass($1)::oid", sql_name)
            if oid is not None:
                found[table] = _digest(await schema_lines(connection, oid))
    return found


@asynccontextmanager
async def _snapshot(endpoint: ReplicaEndpoint) -> AsyncIterator[tuple[asyncpg.Connection, SnapshotHandle]]:
    """A connection in a snapshot, and what others need to read in the same one."""
    async with catalog.postgres(endpoint.name, endpoint.dsn) as connection:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; SET LOCAL search_path = pg_catalog")
        exported = await connection.fetchrow("select pg_export_snapshot() as snapshot, now() as at")
        assert exported is not None
        yield connection, SnapshotHandle(endpoint.name, endpoint.dsn, exported["snapshot"], None, exported["at"])


async def _server(connection: asyncpg.Connection) -> tuple[dict[str, str], dict[str, str]]:
    found = await connection.fetchrow(_DATABASE)
    assert found is not None
    described: dict[str, Any] = json.loads(found["described"])
    collation = {key: str(described.get(key)) for key in ("datlocprovider", "datcollate", "datctype")}
    locale = described.get("datlocale") or described.get("daticulocale") or ""
    server = {
        "major version": str(found["major"]),
        "encoding": found["encoding"],
        "collation": f"{collation['datcollate']}/{collation['datctype']} by {collation['datlocprovider']}{locale}",
    }
    libraries = {
        "collation version": str(described.get("datcollversion")),
        "time zone data": str(await connection.fetchval(_TIME_ZONES)),
    }
    return server, libraries


class _Checksums:
    """Counts or checksums of all tables, by some readers that share the work."""

    def __init__(
        self,
        first: asyncpg.Connection,
        handle: SnapshotHandle,
        schemas: dict[str, TableSchema],
        progress: Progress,
        *,
        checksums: bool,
    ) -> None:
        """`first` is a connection that is in the snapshot already."""
        self._first, self._handle, self._schemas, self._progress, self._full = (
            first,
            handle,
            schemas,
            progress,
            checksums,
        )
        self._work = [(table, part) for table, schema in schemas.items() for part in self._parts(schema)]
        self._sums: dict[str, dict[int, list[int]]] = {
            table: defaultdict(lambda: [0, 0]) for table in schemas
        }  # table, bucket: rows and the sum of their checksums

    def _parts(self, schema: TableSchema) -> list[KeyRange]:
        parts = schema.rows_estimate // READ_ROWS + 1
        by_key = self._full and parts > 1 and schema.integer_key and schema.key_follows_storage
        return key_ranges(schema, parts) if by_key else [KeyRange()]

    async def run(self) -> dict[str, dict[int, tuple[int, str]]]:
        self._work.sort(key=lambda work: -self._schemas[work[0]].rows_estimate)
        if sum(schema.rows_estimate for schema in self._schemas.values()) < READ_ROWS:
            await self._read(self._first)  # too little to be worth more connections
        async with asyncio.TaskGroup() as readers:
            for _ in range(min(READERS, len(self._work))):
                readers.create_task(self._read_beside())
        return {
            table: {bucket: (rows, str(total)) for bucket, (rows, total) in sorted(sums.items())}
            for table, sums in self._sums.items()
        }

    async def _read_beside(self) -> None:
        async with catalog.postgres_at(self._handle) as connection:
            await self._read(connection)

    async def _read(self, connection: asyncpg.Connection) -> None:
        while self._work:
            table, part = self._work.pop(0)
            await self._add(connection, table, part)

    async def _add(self, connection: asyncpg.Connection, table: str, part: KeyRange) -> None:
        schema, sums = self._schemas[table], self._sums[table]
        sql = f"select 0 as bucket, count(*) as rows, 0 as total from {schema.qualified}"
        if self._full:
            common = CommonTable(table, schema.key, _key_first(schema), {self._handle.replica: schema}, ())
            sql = checksum_query(common, schema, _buckets(schema), (part,))
        for record in await connection.fetch(sql):
            sums[record["bucket"]][0] += record["rows"]
            sums[record["bucket"]][1] += int(record["total"])
            self._progress.rows += record["rows"]


def _has_primary_key(lines: Sequence[str]) -> bool:
    """Which unique index would stand in for it differs from server to server: without it the whole row counts."""
    return any(line.startswith("constraint PRIMARY KEY") for line in lines)


def _key_first(schema: TableSchema) -> tuple[Any, ...]:
    key = [schema.column(name) for name in schema.key]
    return (*key, *(column for column in schema.columns if column not in key))


def _shift(schema: TableSchema) -> int | None:
    if not schema.integer_key:
        return None
    span = (schema.key_high or 0) - (schema.key_low or 0)
    return min(63, (span // BUCKETS).bit_length())


def _buckets(schema: TableSchema) -> Buckets:
    shift = _shift(schema)
    return HashBuckets(BUCKETS) if shift is None else RangeBuckets(shift)


def _digest(value: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=16).hexdigest()
