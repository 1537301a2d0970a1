"""Reads: one query, or a whole consistent copy, in one snapshot and together with its position."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import MappingProxyType
from uuid import UUID

import asyncpg
from asyncpg.pgproto import pgproto

from adapters.changes import InvalidChange, Row, Value
from adapters.fair_share import FairShare
from adapters.postgres.apply.orphans import Orphans
from adapters.postgres.apply.progress import Progress
from adapters.postgres.apply.session import Connection, Options, connect, meter_of
from adapters.postgres.sql.catalog import Table, find_table, find_types
from adapters.postgres.sql.literals import SqlType, identifier, literal
from adapters.postgres.sql.sqlstates import is_connection_loss, is_transient
from adapters.resource import Position, ReadResult, SharedSnapshot
from adapters.sql import check_query
from tops.model.errors import NotReachable, ResourceError, ResourceRejected, ResultTooLarge, TopsError
from tops.model.log_points import LogPoint

_PLAIN = frozenset(
    {type(None), bool, int, float, str, bytes, Decimal, datetime, date, time, timedelta, UUID, pgproto.UUID}
)
BEYOND_PYTHON = "a value that Python has no type for (a date before Christ, 24:00): cast it to text"
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# What of DISCARD ALL a query could need: settings go back with the transaction and once more by themselves, locks of
# the session are let go. Prepared statements stay: they are the driver's, and to prepare them again costs a round trip.
_END = "ROLLBACK;RESET ALL;SELECT pg_advisory_unlock_all()"
_END_S = 2.0
# What a client's query may send: several times what fits into a response, since PostgreSQL's form of small values is
# longer than ours.
RESULT_BYTES_MAX = 16 * 2**20
_SLICE_ROWS = 2_000  # converted in one event-loop iteration
_READ_ONLY = {"default_transaction_read_only": "on"}
_POSITION = """
select coalesce((select prefix from tops.position where replica_set = $1), 0) as prefix,
       coalesce((select array_agg(number order by number) from tops.applied where replica_set = $1), '{}') as numbers
"""


def read_error(where: str, error: Exception) -> TopsError:
    """What the database's or the driver's complaint about a client's query means to the client."""
    if is_connection_loss(error):
        return NotReachable(f"{where}: the connection broke during a read")
    if is_transient(error):
        return ResourceRejected(where, f"the read was cut short: {error}")
    return ResourceError(where, f"the query fails: {error}")


class Readers:
    """A few connections of one login that can't write, and hold nothing of the writing session's locks.

    An identity has at most `share` of them, so that its slow queries do not keep the queries of others waiting. A
    connection that was given up counts until its backend has ended."""

    def __init__(
        self, dsn: str, agent_dsn: str, where: str, options: Options, count: int, share: int | None = None
    ) -> None:
        self._dsn, self.where, self.options = dsn, where, options
        self.turns = FairShare(count, share or count)
        self._idle: list[Connection] = []
        self.orphans = Orphans(agent_dsn, where, options)
        self.orphans.on_limit = self.turns.fail_waiting

    async def read(
        self, replica_set: str, sql: str, args: Sequence[Value], *, with_position: bool, who: str = ""
    ) -> ReadResult:
        """A client's query, in a transaction that leaves nothing behind for the next one. Raises ResultTooLarge as soon
        as the server has sent too much."""
        check_query(sql)

        async def work(connection: Connection) -> ReadResult:
            try:
                with meter_of(connection).bounded(RESULT_BYTES_MAX):
                    rows = await _fetch(connection, sql, args)
                return ReadResult(rows, await position_in(connection, replica_set) if with_position else None)
            finally:
                await _end(connection)

        return await self._tried(work, who, _BEGIN)

    @asynccontextmanager
    async def client_transaction(self, who: str) -> AsyncIterator[Connection]:
        """One in which a client's query may run, or be analysed, and that leaves nothing behind."""
        async with self.connection(who) as connection:
            await connection.execute(_BEGIN)
            try:
                yield connection
            finally:
                await _end(connection)

    async def read_own(self, sql: str, args: Sequence[Value]) -> ReadResult:
        """A query that no client has written."""

        async def work(connection: Connection) -> ReadResult:
            return ReadResult(await _fetch(connection, sql, args))

        return await self._tried(work)

    async def _tried(
        self, work: Callable[[Connection], Awaitable[ReadResult]], who: str = "", begin: str = ""
    ) -> ReadResult:
        """`begin` comes before a client's query, which runs once: where it succeeds, the connection is not broken, and
        what breaks it later may be the query."""
        for last_try in (False, True):
            started = False
            try:
                async with self.connection(who) as connection:
                    if begin:
                        await connection.execute(begin)
                        started = True
                    try:
                        return await work(connection)
                    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
                        if meter_of(connection).exceeded:
                            raise ResultTooLarge(self.where, RESULT_BYTES_MAX) from error
                        raise
            except asyncpg.exceptions.InvalidCachedStatementError as error:
                if last_try:  # the driver has forgotten the old statement by now
                    raise ResourceRejected(self.where, "the tables are being changed under the read") from error
            except TimeoutError as error:
                raise ResourceError(self.where, self._not_ended()) from error
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
                # An idle connection may be of a server that has restarted since.
                if not is_connection_loss(error) or last_try or started:
                    raise read_error(self.where, error) from error
                self._drop_idle()
            except (ValueError, OverflowError) as error:
                raise ResourceError(self.where, f"the query returns {BEYOND_PYTHON}: {error}") from error
        raise AssertionError("the second try returns or raises")

    def _not_ended(self) -> str:
        return (
            f"the query was cancelled after {self.options.statement_timeout_s:g} s and did not end: it counts as one "
            "of its client's connections until it does; functions on very long values can't be cancelled"
        )

    @asynccontextmanager
    async def connection(self, who: str = "") -> AsyncIterator[Connection]:
        """Raises QueriesLeft if too many earlier queries of the identity do not end."""
        self.orphans.check(who)
        await self.turns.take(who)
        try:
            connection = self._idle.pop() if self._idle else await self.connect()
        except BaseException:
            self.turns.give_back(who)
            raise
        pid, clean = connection.get_server_pid(), False
        try:
            yield connection
            clean = _is_clean(connection)
        except asyncpg.PostgresError as error:
            clean = not is_connection_loss(error) and _is_clean(connection)
            raise
        finally:
            if clean:
                self._idle.append(connection)
                self.turns.give_back(who)
            else:
                connection.terminate()
                self.orphans.watch(pid, who, lambda: self.turns.give_back(who))

    @asynccontextmanager
    async def dedicated_connection(self) -> AsyncIterator[Connection]:
        """For what may last long: a connection that takes no turn away from the others."""
        connection = await self.connect()
        try:
            yield connection
        finally:
            connection.terminate()

    async def connect(self, more_settings: Mapping[str, str] = MappingProxyType({})) -> Connection:
        """A connection besides those that are shared here; whoever has it counts it among the `turns`."""
        return await connect(self._dsn, self.where, "tops-reader", self.options, {**_READ_ONLY, **more_settings})

    def close(self) -> None:
        self.orphans.close()
        self._drop_idle()

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().terminate()


def _is_clean(connection: Connection) -> bool:
    return not connection.is_closed() and not connection.is_in_transaction()


async def _end(connection: Connection) -> None:
    """End a client's transaction. A query that was cancelled, and does not end, keeps its connection from this."""
    if connection.is_closed():
        return
    try:
        async with asyncio.timeout(_END_S):
            await connection.execute(_END)
    except TimeoutError:
        connection.terminate()


async def position_in(connection: Connection, replica_set: str) -> Position:
    """The position of the snapshot that the connection's transaction sees."""
    row = await connection.fetchrow(_POSITION, replica_set)
    assert row is not None
    prefix, above = row["prefix"], {number for number in row["numbers"] if number > row["prefix"]}
    while prefix + 1 in above:
        prefix += 1
        above.remove(prefix)
    return Position(prefix, frozenset(above))


async def _fetch(connection: Connection, sql: str, args: Sequence[Value]) -> list[Row]:
    try:
        return await _plain(await connection.fetch(sql, *args))
    except asyncpg.InternalClientError as error:
        raise InvalidChange(f"the query returns what no client can read: {error}") from error
    except (asyncpg.DataError, asyncpg.InterfaceError) as error:
        # The server's complaints have a class of their own below DataError; these are the driver's about arguments.
        if type(error) not in (asyncpg.DataError, asyncpg.InterfaceError) or connection.is_closed():
            raise
    # The driver wants other Python types; values that came over the wire may be the text of theirs.
    statement = await connection.prepare(sql)
    types = await find_types(connection, [parameter.oid for parameter in statement.get_parameters()])
    if len(types) != len(args):
        raise InvalidChange(f"the query takes {len(types)} parameter(s), not {len(args)}")
    literals = ",".join(literal(value, sql_type) for value, sql_type in zip(args, types, strict=True))
    return await _plain(await connection.fetch(f"EXECUTE {statement.get_name()}({literals})"))


async def _plain(records: list[asyncpg.Record]) -> list[Row]:
    """As `plain_rows`; others have their turn meanwhile."""
    rows = plain_rows(records[:_SLICE_ROWS])
    for start in range(_SLICE_ROWS, len(records), _SLICE_ROWS):
        await asyncio.sleep(0)
        rows += plain_rows(records[start : start + _SLICE_ROWS])
    return rows


def plain_rows(records: list[asyncpg.Record]) -> list[Row]:
    return [
        dict(record)
        if _PLAIN.issuperset(map(type, record))
        else {name: _plain_value(value) for name, value in record.items()}
        for record in records
    ]


def _plain_value(value: Value) -> Value:
    """Types of the driver's own (ranges, addresses, rows) as text; they could not travel."""
    if isinstance(value, list):
        return [_plain_value(element) for element in value]
    return value if type(value) in _PLAIN else str(value)


class PostgresSnapshot:
    """One state of the database, held open by a read-only transaction."""

    def __init__(self, connection: Connection, progress: Progress) -> None:
        self._connection, self._progress = connection, progress

    @property
    def position(self) -> Position:
        return self._progress.position

    @property
    def point(self) -> LogPoint:
        return self._progress.point

    @property
    def connection(self) -> Connection:
        """For what else is to be read in this snapshot."""
        return self._connection

    async def rows(self, table: str, *, chunk: int = 10_000) -> AsyncIterator[list[Row]]:
        """All rows in key order, by a cursor; values as integers, booleans, bytes, or the text of their type."""
        found = await find_table(self._connection, table)
        statement = await self._connection.prepare(_all_rows(found))
        cursor = await statement.cursor()
        while records := await cursor.fetch(chunk):
            yield plain_rows(records)

    async def share(self) -> SharedSnapshot:
        """Export the snapshot: `set transaction snapshot` with this name reads the same state."""
        return SharedSnapshot(name=await self._connection.fetchval("select pg_export_snapshot()"))


@asynccontextmanager
async def snapshot(readers: Readers, replica_set: str, *, dedicated: bool) -> AsyncIterator[PostgresSnapshot]:
    # A block of asyncpg's own making, since its cursors ask for one; nothing is ever prepared in it.
    async with (
        readers.dedicated_connection() if dedicated else readers.connection() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await connection.execute("set local statement_timeout = 0")
        yield PostgresSnapshot(connection, await Progress.read(connection, replica_set))


def _all_rows(table: Table) -> str:
    columns = ", ".join(
        f"{_readable(name, sql_type)} as {identifier(name)}" for name, sql_type in table.columns.items()
    )
    order = ", ".join(map(identifier, table.key)) or "ctid"
    return f"select {columns} from {table.sql_name} order by {order}"


def _readable(name: str, sql_type: SqlType) -> str:
    plain = sql_type.is_integer or sql_type.is_bytes or sql_type.category == "B"
    return identifier(name) if plain else f"{identifier(name)}::text"
