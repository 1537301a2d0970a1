"""What the suite needs of a database, so that a new adapter is a small class here and one parameter."""

import sqlite3
from pathlib import Path
from typing import Any, Protocol

import asyncpg

from adapters import EmbeddedPostgres, Logins, PostgresAdapter, SqliteAdapter
from adapters.changes import Change, Member, RowChange, Update, known_by_id, members_digest, own_key
from adapters.postgres.proof import SHIPPED, Prover, Verdict
from adapters.resource import Attempt, Entry, Epoch, MemberVote, Resource, SharedSnapshot, Why
from tests.support.logins import logins_in
from tops.model.ids import NodeId, TxId, counted_id

TABLES = """
create table acct (id int primary key, bal bigint not null check (bal >= 0), email text unique, note text);
create table transfer (id int primary key, acct int not null references acct (id), amount int);
create table pair (id int primary key, partner int references pair (id) deferrable initially deferred);
create table "We""ird ta.ble" ("Id" int, "na me" text, "va'lue" text, primary key ("Id", "na me"));
create table nokey (a int);
insert into acct (id, bal, email) values (1, 100, 'one'), (2, 100, 'two'), (3, 100, 'three');
"""


class Database(Protocol):
    """One fresh database with the suite's tables; `open` makes an adapter for it, `sql` goes round the adapter."""

    def open(self, replica_set: str = "shop", **options: Any) -> Resource: ...

    async def sql(self, text: str) -> list[tuple[Any, ...]]: ...

    async def shared_sql(self, shared: SharedSnapshot, query: str) -> list[tuple[Any, ...]]:
        """Run a query in a snapshot that an adapter has shared, as another process would."""
        ...

    async def drop(self) -> None: ...


class PostgresDatabase:
    def __init__(self, server: EmbeddedPostgres, name: str) -> None:
        self._server, self.name = server, name
        self.logins: Logins

    @classmethod
    async def create(cls, server: EmbeddedPostgres, name: str, *, provisioned: bool = True) -> "PostgresDatabase":
        connection = await asyncpg.connect(server.dsn)
        await connection.execute(f"create database {name}")
        await connection.close()
        database = cls(server, name)
        await database.sql(TABLES)
        if provisioned:
            await database.provision()
        return database

    async def provision(self) -> None:
        """Give the logins their rights, also on what came into the database since."""
        self.logins = await logins_in(self._server, self.name)

    @property
    def dsn(self) -> str:
        return self._server.dsn_for(self.name)

    def dsn_as(self, user: str) -> str:
        """For a role whose password is its name."""
        return self._server.dsn_for(self.name, user=user, password=user)

    def open(self, replica_set: str = "shop", **options: Any) -> PostgresAdapter:
        return PostgresAdapter(self.logins, cluster="test", replica_set=replica_set, **options)

    async def sql(self, text: str) -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(self.dsn)
        try:
            if text.lstrip().lower().startswith("select"):
                return [tuple(row) for row in await connection.fetch(text)]
            await connection.execute(text)
            return []
        finally:
            await connection.close()

    async def shared_sql(self, shared: SharedSnapshot, query: str) -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(self.dsn)
        try:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                await connection.execute(f"set transaction snapshot '{shared.name}'")
                return [tuple(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()

    async def drop(self) -> None:
        for (gid,) in await self.sql("select gid from pg_prepared_xacts where database = current_database()"):
            await self.sql(f"rollback prepared '{gid}'")
        connection = await asyncpg.connect(self._server.dsn)
        await connection.execute(f"drop database {self.name} with (force)")
        await connection.close()


class SqliteDatabase:
    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    async def create(cls, path: Path) -> "SqliteDatabase":
        database = cls(path)
        await database.sql(TABLES)
        return database

    def open(self, replica_set: str = "shop", **options: Any) -> SqliteAdapter:
        return SqliteAdapter(self._path, cluster="test", replica_set=replica_set, **options)

    async def sql(self, text: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            if text.lstrip().lower().startswith("select"):
                return connection.execute(text).fetchall()
            connection.executescript(text)
            return []
        finally:
            connection.close()

    async def shared_sql(self, shared: SharedSnapshot, query: str) -> list[tuple[Any, ...]]:
        return await SqliteDatabase(Path(shared.path)).sql(query)

    async def drop(self) -> None:
        return


class AlwaysShip(Prover):
    """No proof at all: for tests of what comes behind it, and of those who must notice when it is missing."""

    async def statement(self, sql: str) -> Verdict:
        return SHIPPED

    async def row_change(self, change: RowChange, oid: int) -> Verdict:
        return SHIPPED


def member(tx: str, *changes: Change, key: str = "", ttl_s: int = 86_400) -> Member:
    return Member(tx=TxId(tx), changes=changes, idempotency_key=key, key_ttl_s=ttl_s)


def attempt(number: int, attempt: int = 0, incarnation: int = 1, coordinator: str = "b1") -> Attempt:
    return Attempt(number=number, incarnation=incarnation, attempt=attempt, coordinator=NodeId(coordinator))


def epoch(number: int, *members: Member, of: Attempt | None = None, at_ms: int = 1_000_000) -> Epoch:
    return Epoch(attempt=of or attempt(number), members=members, digest=members_digest(members), at_ms=at_ms)


def entry(number: int, *members: Member, at_ms: int = 1_000_000) -> Entry:
    return Entry(number=number, members=members, at_ms=at_ms)


def numbered(number: int, writer: str = "till", row: int = 1) -> Member:
    changes = (Update("acct", {"id": row}, add={"bal": 1}),)
    tx = counted_id(writer, "life", number, "", "r1")
    return known_by_id(Member(tx, changes), tx)


def settling(number: int) -> Member:
    """What somebody writes who asks what became of that transaction: either it is there, or it can't come any more."""
    tx = counted_id("till", "life", number, "", "r1")
    return Member(tx, (), own_key(tx))


def told(votes: list[MemberVote]) -> list[Why | None]:
    return [vote.excluded.why if vote.excluded is not None else None for vote in votes]
