"""The state of a set's start in a replica's own database, and the transitions that must be atomic with its data."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import msgspec

from adapters.postgres.access import guard_triggers
from adapters.postgres.access.guard_triggers import Guard
from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.sql.schema import as_owner
from replication.replica.start.decisions import Report, State
from replication.replica.start.fingerprint import Described
from tops.model.errors import NotReachable, ResourceError

# A table's guard waits for direct writers of that table for as long as a lock may take; then it is tried again.
_OPTIONS = Options(lock_timeout_s=2.0, statement_timeout_s=600.0, connect_timeout_s=10.0)
DDL = f"""
{guard_triggers.DDL}
create table if not exists tops.start (
    replica_set text primary key, state text not null, attempt text not null default '',
    basis text not null default '', fingerprint bytea, seeded boolean not null default false,
    policy text not null default '');
-- Sets that an earlier version began.
do $$ begin
    if to_regclass('tops.began') is not null then
        insert into tops.start (replica_set, state) select replica_set, 'started' from tops.began
            on conflict do nothing;
    end if;
end $$;
"""
_decoder = msgspec.msgpack.Decoder(Described)


class Record(msgspec.Struct, frozen=True):
    """`seeded`: the rows are a copy that this replica took; nothing else was ever written here."""

    state: State = State.NEW
    attempt: str = ""
    basis: str = ""
    described: Described | None = None
    seeded: bool = False

    @property
    def report(self) -> Report:
        fingerprint = self.described.fingerprint if self.described is not None else None
        return Report(self.state, self.attempt, self.basis, fingerprint)


class StartRecord:
    """`tops.start` of one database. `agent` is the login whose writes the guard lets through."""

    def __init__(self, dsn: str, replica_set: str, agent: str) -> None:
        self._dsn, self._replica_set, self._agent = dsn, replica_set, agent
        self._open: Connection | None = None

    def close(self) -> None:
        if self._open is not None:
            self._open.terminate()

    async def load(self) -> Record:
        """The state; a fingerprint that a direct write has made untrue no longer counts."""
        async with self._connection() as connection:
            async with connection.transaction():
                await connection.execute(f"{await as_owner(connection)};{DDL}")
            found = await connection.fetchrow("select * from tops.start where replica_set = $1", self._replica_set)
            if await self._has_followed(connection):
                return Record(State.STARTED, described=_described(found), basis=found["basis"] if found else "")
            if found is None:
                return Record()
            record = Record(State(found["state"]), found["attempt"], found["basis"], _described(found), found["seeded"])
            if record.state is State.COMPARED and await guard_triggers.noted(connection, self._replica_set):
                return Record(seeded=record.seeded)
            return record

    async def policy_kind(self) -> str:
        """What kind of policy the replica followed last; empty if it has followed none."""
        async with self._connection() as connection:
            sql = "select policy from tops.start where replica_set = $1"
            return str(await connection.fetchval(sql, self._replica_set) or "")

    async def follow(self, kind: str) -> None:
        """From now on the replica follows this kind of policy."""
        async with self._connection() as connection:
            await connection.execute(
                "insert into tops.start (replica_set, state, policy) values ($1, 'started', $2) "
                "on conflict (replica_set) do update set policy = excluded.policy",
                self._replica_set,
                kind,
            )

    async def _has_followed(self, connection: asyncpg.Connection) -> bool:
        """Whether the database has applied something of the log, as one of an earlier version may have."""
        sql = "select exists (select from tops.position where replica_set = $1 and prefix > 0)"
        return bool(await connection.fetchval(sql, self._replica_set))

    async def existing(self, tables: Sequence[str]) -> list[str]:
        """Those of the SQL names that are tables here."""
        async with self._connection() as connection:
            sql = "select name from unnest($1::text[]) as name where to_regclass(name) is not null"
            return [row["name"] for row in await connection.fetch(sql, list(tables))]

    async def watch(self, tables: Sequence[str]) -> Record:
        """From now on direct writes are noted: what is read after this can be known to be still true. What was read
        before no longer counts, since notes about it are gone."""
        async with self._connection() as connection, connection.transaction():
            await guard_triggers.install(connection, self._replica_set, tables, Guard.NOTE, self._agent)
            seeded = await connection.fetchval(
                "update tops.start set state = 'new', attempt = '', basis = '', fingerprint = null, seeded = seeded "
                "and not exists (select from tops.direct_writes where replica_set = $1) where replica_set = $1 "
                "returning seeded",
                self._replica_set,
            )
            await guard_triggers.forget_noted(connection, self._replica_set)
        return Record(seeded=bool(seeded))

    async def is_untouched(self) -> bool:
        async with self._connection() as connection:
            return not await guard_triggers.noted(connection, self._replica_set)

    async def compared(self, described: Described, *, seeded: bool = False) -> Record:
        record = Record(State.COMPARED, secrets.token_hex(8), "", described, seeded)
        await self._store(record)
        return record

    async def agree(self, record: Record, basis: str, tables: Sequence[str]) -> Record:
        """Rejects direct writes and stores the basis; or, if one was noted since the fingerprint, starts anew.

        The triggers' locks wait for writers under way and keep new ones out until the end of the transaction."""
        async with self._connection() as connection, connection.transaction():
            if tables:
                await connection.execute(f"lock table {', '.join(tables)} in share row exclusive mode")
            if await guard_triggers.noted(connection, self._replica_set):
                return Record(seeded=record.seeded)
            await guard_triggers.install(connection, self._replica_set, tables, Guard.REJECT, self._agent)
            agreed = msgspec.structs.replace(record, state=State.AGREED, basis=basis)
            await self._store(agreed, connection)
        return agreed

    async def withdraw(self, record: Record, tables: Sequence[str]) -> Record:
        """Back to COMPARED under a new attempt; the fingerprint is still true."""
        async with self._connection() as connection, connection.transaction():
            await guard_triggers.install(connection, self._replica_set, tables, Guard.NOTE, self._agent)
            withdrawn = msgspec.structs.replace(record, state=State.COMPARED, attempt=secrets.token_hex(8), basis="")
            await self._store(withdrawn, connection)
        return withdrawn

    async def started(self, record: Record) -> Record:
        started = msgspec.structs.replace(record, state=State.STARTED)
        await self._store(started)
        return started

    async def _store(self, record: Record, connection: asyncpg.Connection | None = None) -> None:
        if connection is None:
            async with self._connection() as own:
                await self._store(record, own)
            return
        described = msgspec.msgpack.encode(record.described) if record.described is not None else None
        await connection.execute(
            "insert into tops.start values ($1, $2, $3, $4, $5, $6) on conflict (replica_set) do update set "
            "state = excluded.state, attempt = excluded.attempt, basis = excluded.basis, "
            "fingerprint = excluded.fingerprint, seeded = excluded.seeded",
            self._replica_set,
            record.state.value,
            record.attempt,
            record.basis,
            described,
            record.seeded,
        )

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[asyncpg.Connection]:
        """What fails is tried again by the caller, with the reason: a lock that was not had, a server that restarts."""
        try:
            if self._open is None or self._open.is_closed():
                self._open = await connect(self._dsn, "the database", "tops-start", _OPTIONS)
            yield self._open
        except asyncpg.LockNotAvailableError as error:
            raise NotReachable(f"a table is locked by a direct writer: {error}") from error
        except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError) as error:
            raise NotReachable(f"the database can't be reached: {error}") from error
        except asyncpg.PostgresError as error:
            raise ResourceError("the database", f"the start can't be recorded: {error}") from error


def _described(found: asyncpg.Record | None) -> Described | None:
    return _decoder.decode(found["fingerprint"]) if found is not None and found["fingerprint"] is not None else None
