"""A consistent copy of tables between two databases, in PostgreSQL's own text format."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

import asyncpg

from adapters.postgres.catalog import find_table
from adapters.postgres.literals import identifier
from adapters.postgres.reading import PostgresSnapshot
from adapters.postgres.session import Connection, Options, connect
from tops.digests import LogPoint
from tops.errors import NotReachable, ResourceError

_OPTIONS = Options(lock_timeout_s=30.0, statement_timeout_s=3600.0, connect_timeout_s=10.0)
_CHUNK_BYTES = 512 * 1024
_QUEUE_MAX = 4


class Target(NamedTuple):
    """A table and the columns of it that can be written."""

    sql_name: str
    schema: str
    table: str
    columns: list[str]


async def _target(connection: Connection, table: str) -> Target | None:
    """None if there is no such table."""
    if await connection.fetchval("select to_regclass($1)", table if "." in table else identifier(table)) is None:
        return None
    found = await find_table(connection, table)
    rows = await connection.fetch(
        "select n.nspname, c.relname, a.attname from pg_attribute a join pg_class c on c.oid = a.attrelid "
        "join pg_namespace n on n.oid = c.relnamespace where a.attrelid = $1::text::regclass and a.attnum > 0 "
        "and not a.attisdropped and a.attgenerated = '' order by a.attnum",
        found.sql_name,
    )
    return Target(found.sql_name, rows[0]["nspname"], rows[0]["relname"], [row["attname"] for row in rows])


async def copy_out(snapshot: PostgresSnapshot, table: str) -> AsyncIterator[bytes]:
    """A table's rows as the snapshot sees them; nothing for a table that does not exist."""
    connection = snapshot.connection
    found = await _target(connection, table)
    if found is None:
        return
    columns = ", ".join(map(identifier, found.columns))
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_MAX)

    async def copy() -> None:
        pending = bytearray()

        async def take(data: bytes) -> None:
            pending.extend(data)
            if len(pending) >= _CHUNK_BYTES:
                await queue.put(bytes(pending))
                pending.clear()

        try:
            await connection.copy_from_query(f"select {columns} from {found.sql_name}", output=take, format="text")
            if pending:
                await queue.put(bytes(pending))
        finally:
            await queue.put(None)

    task = asyncio.ensure_future(copy())
    try:
        while (data := await queue.get()) is not None:
            yield data
        await task
    finally:
        task.cancel()


class Loader:
    """Fills a replica's tables in one transaction: all of the copy and its position are there, or nothing is."""

    def __init__(self, dsn: str, replica_set: str) -> None:
        self._dsn, self._replica_set = dsn, replica_set
        self._connection: Connection
        self._table = ""
        self._target: Target | None = None

    async def __aenter__(self) -> Self:
        self._connection = await connect(self._dsn, "the new replica", "tops-copy", _OPTIONS)
        await self._connection.execute("BEGIN")
        await self._connection.execute("SAVEPOINT tops_role")
        try:
            # Rows arrive table by table: keys between them hold again at the end. A superuser's right.
            await self._connection.execute("set local session_replication_role = replica")
        except asyncpg.InsufficientPrivilegeError:
            await self._connection.execute("ROLLBACK TO SAVEPOINT tops_role")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.terminate() if kind is not None else await self._connection.close()

    async def load(self, table: str, data: bytes) -> None:
        """Some rows of a table; the first call for a table empties it."""
        try:
            if table != self._table:
                self._table, self._target = table, await _target(self._connection, table)
                if self._target is not None:
                    await self._connection.execute(f"delete from {self._target.sql_name}")
            if data and self._target is not None:
                await self._copy(self._target, data)
        except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError) as error:
            raise NotReachable(f"the connection broke while a copy was loaded: {error}") from error
        except asyncpg.PostgresError as error:
            raise ResourceError("the new replica", f"table {table} does not take the copy: {error}") from error

    async def _copy(self, target: Target, data: bytes) -> None:
        async def source() -> AsyncIterator[bytes]:
            yield data

        await self._connection.copy_to_table(
            target.table, schema_name=target.schema, columns=target.columns, source=source(), format="text"
        )

    async def execute(self, script: str) -> None:
        """Something else in the same transaction."""
        try:
            await self._connection.execute(script)
        except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError) as error:
            raise NotReachable(f"the connection broke while a copy was loaded: {error}") from error
        except asyncpg.PostgresError as error:
            raise ResourceError("the new replica", f"it does not take the schema of the copy: {error}") from error

    async def set_sequences(self, values: Mapping[str, int]) -> None:
        """Let the sequences that exist here go on where those of the source are."""
        for name, value in values.items():
            await self._connection.execute(
                "select setval(to_regclass($1), $2) where to_regclass($1) is not null", name, value
            )

    @property
    def connection(self) -> Connection:
        """For what else is to be read here."""
        return self._connection

    async def finish(self, point: LogPoint) -> None:
        """The copy is whole: it counts, as of this point of the log."""
        await self._connection.execute(
            "insert into tops.position (replica_set, prefix, history, digest) values ($1, $2, $3, $4) "
            "on conflict (replica_set) do update "
            "set prefix = excluded.prefix, history = excluded.history, digest = excluded.digest",
            self._replica_set,
            point.index,
            point.history,
            point.digest,
        )
        await self._connection.execute("delete from tops.applied where replica_set = $1", self._replica_set)
        await self._connection.execute("COMMIT")
