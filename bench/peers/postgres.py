"""What all PostgreSQL peers share: the servers' settings, the tables, the client, and how a node is looked at."""

import asyncio
from collections.abc import Mapping
from typing import ClassVar

import asyncpg

from adapters import EmbeddedPostgres
from bench.systems import Client, OperationAborted, OperationUnknown, System
from bench.workloads import Add, Append, Dataset, Operation, Read, Totals, Transfer

# Durable in every way; large enough that neither buffers nor checkpoints are what is measured.
SETTINGS: Mapping[str, str | int] = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "wal_level": "logical",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "max_connections": 200,
    "max_prepared_transactions": 200,
}
SCHEMA = """
create table accounts (id int primary key, bal bigint not null, pad text not null);
create table transfers (id bigint primary key, source int not null, target int not null, amount bigint not null);
create table entries (id bigint primary key, payload text not null);
"""
UPDATE = "update accounts set bal = bal + $2 where id = $1"
INSERT_TRANSFER = "insert into transfers (id, source, target, amount) values ($1, $2, $3, $4)"
INSERT_ENTRY = "insert into entries (id, payload) values ($1, $2)"
READ = "select bal from accounts where id = $1"
# Sums of row hashes: the order of rows does not matter, their content does.
TOTALS = """
select (select coalesce(sum(bal), 0)::bigint from accounts) as balance,
       (select count(*) from transfers) as transfers,
       (select count(*) from entries) as entries,
       (select coalesce(sum(hash_record_extended(a, 0)), 0) from accounts a)::text || '/' ||
       (select coalesce(sum(hash_record_extended(t, 0)), 0) from transfers t)::text || '/' ||
       (select coalesce(sum(hash_record_extended(e, 0)), 0) from entries e)::text as digest
"""

# Errors after which nobody has told us whether a commit happened.
CUT_OFF = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # what the driver says when the server goes in the middle of an operation
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
)
POLL_S = 0.005

Connection = asyncpg.Connection
Prepared = asyncpg.prepared_stmt.PreparedStatement


class PostgresClient(Client):
    """One connection with prepared statements; a single-row operation is one round trip."""

    def __init__(self, connection: Connection, statements: "PreparedStatements") -> None:
        self._connection, self._statements = connection, statements

    @classmethod
    async def connect(cls, dsn: str) -> "PostgresClient":
        connection = await asyncpg.connect(dsn)
        return cls(connection, await PreparedStatements.on(connection))

    async def execute(self, operation: Operation) -> None:
        try:
            if isinstance(operation, Transfer):
                async with self._connection.transaction():
                    await self._statements.run(operation)
            else:
                await self._statements.run(operation)
        except CUT_OFF as error:
            raise OperationUnknown(str(error)) from error
        except asyncpg.PostgresError as error:  # the server's own refusal: it has rolled back
            raise OperationAborted(str(error)) from error

    async def close(self) -> None:
        await self._connection.close()


class PreparedStatements:
    """The statements of every operation, prepared on one connection."""

    def __init__(self, update: Prepared, transfer: Prepared, entry: Prepared, read: Prepared) -> None:
        self._update, self._transfer, self._entry, self._read = update, transfer, entry, read

    @classmethod
    async def on(cls, connection: Connection) -> "PreparedStatements":
        return cls(*[await connection.prepare(sql) for sql in (UPDATE, INSERT_TRANSFER, INSERT_ENTRY, READ)])

    async def run(self, operation: Operation) -> None:
        """The operation's statements, one after the other, in whatever transaction is open."""
        match operation:
            case Add(key, amount):
                await self._update.fetch(key, amount)
                self._expect_one_row(operation)
            case Transfer(id, source, target, amount):
                for leg in operation.updates():
                    await self.run(leg)
                await self._transfer.fetch(id, source, target, amount)
            case Append(id, payload):
                await self._entry.fetch(id, payload)
            case Read(key):
                await self._read.fetch(key)

    def _expect_one_row(self, operation: Add) -> None:
        if self._update.get_statusmsg() != "UPDATE 1":
            raise OperationAborted(f"{operation} changed no row: {self._update.get_statusmsg()}")


class PostgresSystem(System):
    """A system made of embedded servers, of which the first takes the clients. Subclasses say how they are wired."""

    settings: ClassVar[Mapping[str, str | int]] = SETTINGS

    def __init__(self) -> None:
        self.servers: dict[str, EmbeddedPostgres] = {}

    @property
    def writer(self) -> EmbeddedPostgres:
        return next(iter(self.servers.values()))

    async def load(self, dataset: Dataset) -> None:
        await load_accounts(self.writer.dsn, dataset)
        await self.settle()

    async def client(self) -> Client:
        return await PostgresClient.connect(self.writer.dsn)

    async def totals(self) -> Mapping[str, Totals]:
        return {name: await node_totals(server.dsn) for name, server in self.servers.items()}

    async def stop(self) -> None:
        # Backwards: a follower whose source vanishes first would log errors until its own turn comes.
        for server in reversed(self.servers.values()):
            await server.stop()
        self.servers.clear()

    def processes(self) -> Mapping[str, int]:
        return {name: server.pid for name, server in self.servers.items()}

    async def fsyncs(self) -> int | None:
        """Of the write-ahead logs; servers count a backend's syncs at the latest when it disconnects."""
        return sum(
            [await fetch_int(server.dsn, "select wal_sync from pg_stat_wal") for server in self.servers.values()]
        )

    async def versions(self) -> Mapping[str, str]:
        return {"postgresql": await fetch_text(self.writer.dsn, "show server_version")}


async def load_accounts(dsn: str, dataset: Dataset) -> None:
    """The tables, the accounts, and statistics that are right from the first transaction on."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(SCHEMA)
        # Made inside the server: dozens of servers are loaded in one benchmark, and this process is needed elsewhere.
        await connection.execute(
            "insert into accounts select key, 0, repeat('x', $2) from generate_series(1, $1) as key",
            dataset.rows,
            dataset.pad_bytes,
        )
        await connection.execute("vacuum analyze accounts")
    finally:
        await connection.close()


async def node_totals(dsn: str) -> Totals:
    connection = await asyncpg.connect(dsn)
    try:
        row = await connection.fetchrow(TOTALS)
    finally:
        await connection.close()
    assert row is not None  # a select without "from" has one row
    return Totals(row["balance"], row["transfers"], row["entries"], row["digest"])


async def execute(dsn: str, *statements: str) -> None:
    """Each statement on its own: none of them in a transaction block, which some refuse."""
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def until(dsn: str, condition: str, *arguments: object) -> None:
    """Return once the query answers true; callers that need a bound set it."""
    connection = await asyncpg.connect(dsn)
    try:
        while not await connection.fetchval(condition, *arguments):  # noqa: ASYNC110 - servers announce no such thing
            await asyncio.sleep(POLL_S)
    finally:
        await connection.close()


async def fetch_int(dsn: str, sql: str, *arguments: object) -> int:
    return int(await _fetch_value(dsn, sql, *arguments))


async def fetch_text(dsn: str, sql: str, *arguments: object) -> str:
    return str(await _fetch_value(dsn, sql, *arguments))


async def _fetch_value(dsn: str, sql: str, *arguments: object) -> str:
    connection = await asyncpg.connect(dsn)
    try:
        return str(await connection.fetchval(sql, *arguments))
    finally:
        await connection.close()
