"""A PostgreSQL database as a resource: the parts of this package behind the one port."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress

from adapters.changes import Member, Row, Value, unpack_members
from adapters.postgres.apply.book import Book
from adapters.postgres.apply.log import Log
from adapters.postgres.apply.outbox import Outbox
from adapters.postgres.apply.prepared_transactions import PreparedTransactions
from adapters.postgres.apply.quarantined import apply_quarantined
from adapters.postgres.apply.reading import PostgresSnapshot, Readers, snapshot
from adapters.postgres.apply.session import Connection, Options, Session
from adapters.postgres.apply.statements import Statements
from adapters.postgres.copy.scripts import run_own_script
from adapters.postgres.proof import MakeProver, Prover
from adapters.postgres.quick import QuickReads
from adapters.postgres.sql.catalog import find_table
from adapters.postgres.sql.fingerprint import Fingerprint, fingerprint
from adapters.postgres.sql.logins import Logins
from adapters.postgres.sql.row_sql import version_sql
from adapters.resource import (
    Applied,
    Attempt,
    Entry,
    Epoch,
    Health,
    InDoubt,
    MemberVote,
    OutboxEntry,
    Position,
    Prepared,
    ReadResult,
)
from tops.model.errors import TopsError
from tops.model.log_points import NO_DIGESTS, Digests, LogPoint

_COMPACT_EVERY = 1_000
_FORGET_EVERY_MS = 600_000


class PostgresAdapter:
    """One replica set in one PostgreSQL database; `adapters.resource.Resource` says what each method promises."""

    compensatable = False
    has_own_schema = True

    def __init__(
        self,
        logins: Logins,
        *,
        cluster: str,
        replica_set: str,
        name: str = "",
        versioned: Sequence[str] = (),
        own_statements: Iterable[str] = (),
        lock_timeout_s: float = 5.0,
        statement_timeout_s: float = 30.0,
        connect_timeout_s: float = 10.0,
        read_connections: int = 8,
        read_timeout_s: float = 30.0,
        prover: MakeProver = Prover,
    ) -> None:
        """`name` is what errors call this database; `versioned` tables keep the number that last changed each row.
        `own_statements` are the agent's, not a client's: they run with its rights and may change schema `tops`.

        A lock or a statement that takes longer than its time-out makes the whole epoch or batch refused. `prover` makes
        what decides whether a change is proved deterministic. A client has at most `read_connections`, and all clients
        together have twice as many; a query of theirs takes at most `read_timeout_s`.
        """
        where = name or f"the PostgreSQL database of replica set {replica_set!r}"
        options = Options(
            lock_timeout_s=lock_timeout_s,
            statement_timeout_s=statement_timeout_s,
            connect_timeout_s=connect_timeout_s,
        )
        self._session = Session(
            logins, where, cluster, replica_set, options, frozenset(versioned), frozenset(own_statements), prover
        )
        self._book = Book(self._session, cluster, replica_set)
        self._prepared_transactions, self._log, self._outbox = (
            PreparedTransactions(self._book),
            Log(self._book),
            Outbox(self._book),
        )
        self._own_readers = Readers(logins.agent, logins.agent, where, options, read_connections)
        client_options = Options(
            lock_timeout_s=lock_timeout_s, statement_timeout_s=read_timeout_s, connect_timeout_s=connect_timeout_s
        )
        self._client_readers = Readers(
            logins.read, logins.agent, where, client_options, 2 * read_connections, read_connections
        )
        self.quick = QuickReads(self._client_readers)
        self.cluster, self.replica_set = cluster, replica_set
        self._logins = logins

    @property
    def book(self) -> Book:
        """For the other parts of this package."""
        return self._book

    async def start(self) -> None:
        await self._session.take_over()
        await self.recover()

    async def close(self) -> None:
        await self._outbox.finish()
        await self._session.close()
        self._own_readers.close()
        self.quick.close()
        self._client_readers.close()

    async def __aenter__(self) -> "PostgresAdapter":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def recover(self) -> list[InDoubt]:
        return await self._prepared_transactions.recover()

    async def prepare(self, epoch: Epoch) -> Prepared:
        return await self._prepared_transactions.prepare(epoch)

    async def commit(self, attempt: Attempt) -> LogPoint:
        point = await self._prepared_transactions.commit(attempt)
        if self._book.progress.prefix - self._book.progress.stored >= _COMPACT_EVERY:
            await self.compact()
        return point

    async def rollback(self, attempt: Attempt) -> None:
        await self._prepared_transactions.rollback(attempt)

    async def apply(
        self, entries: Sequence[Entry], *, durable: bool = True, history: str = "", digests: Digests = NO_DIGESTS
    ) -> Applied:
        applied = await self._log.apply(entries, durable=durable, history=history, digests=digests)
        if self._book.at_ms - self._book.compacted_ms >= _FORGET_EVERY_MS:
            with suppress(TopsError):  # what was applied is applied; the next time comes
                await self.compact()
        return applied

    async def applied(self) -> Position:
        return (await self._log.progress()).position

    async def point(self) -> LogPoint:
        return (await self._log.progress()).point

    async def compact(self) -> None:
        await self._log.compact()

    async def write_local(self, member: Member) -> MemberVote:
        return await self._outbox.write(member)

    async def write_all_local(self, members: Sequence[Member]) -> list[MemberVote]:
        return await self._outbox.write_all(members)

    async def unpublished(self, limit: int = 1_000, after: int = 0) -> list[OutboxEntry]:
        found = await self.read_own(
            "select id, members from tops.outbox where replica_set = $1 and id > $3 order by id limit $2",
            (self.replica_set, limit, after),
        )
        return [OutboxEntry(row["id"], unpack_members(row["members"])) for row in found.rows]

    async def count_unpublished(self, after: int = 0) -> int:
        sql = "select coalesce(sum(size), 0)::bigint as n from tops.outbox where replica_set = $1 and id > $2"
        return int((await self.read_own(sql, (self.replica_set, after))).rows[0]["n"])

    async def mark_published(self, up_to: int) -> None:
        await self._outbox.mark_published(up_to)

    async def read(
        self, sql: str, args: Sequence[Value] = (), *, with_position: bool = False, who: str = ""
    ) -> ReadResult:
        return await self._client_readers.read(self.replica_set, sql, args, with_position=with_position, who=who)

    async def read_own(self, sql: str, args: Sequence[Value] = ()) -> ReadResult:
        return await self._own_readers.read_own(sql, args)

    async def version(self, table: str, key: Row) -> int:
        async with self._own_readers.connection() as connection:
            found = await find_table(connection, table)
            found.check_key(key)
            sql, args = version_sql(found, key)
            return int(await connection.fetchval(sql, *args) or 0)

    async def fingerprint(self) -> Fingerprint:
        """What must be equal on all replicas for proved statements to have equal results."""
        async with self._own_readers.connection() as connection:
            return await fingerprint(connection)

    def snapshot(self, *, dedicated: bool = False) -> AbstractAsyncContextManager[PostgresSnapshot]:
        """One state of the database; `aside`: it may be held for long, so it has a connection of its own."""
        return snapshot(self._own_readers, self.replica_set, dedicated=dedicated)

    async def run_own_script(self, script: str) -> None:
        """Make tables and functions in schema `tops`, for the agents of all sets in this database."""
        await run_own_script(self._logins.agent, script)

    async def apply_quarantined(self, member: Member, delete_sql: str) -> MemberVote:
        """Carry out a member outside of the log, and forget it in the same transaction."""
        return await apply_quarantined(self._book, member, delete_sql)

    async def health(self, head: int | None = None) -> Health:
        async def work(connection: Connection, _: Statements) -> Health:
            doubts = await self._book.load(connection)
            position = self._book.progress.position
            return Health(
                position=position,
                prepared=len(doubts),
                oldest_prepared_s=max((doubt.age_s for doubt in doubts), default=0.0),
                lag=None if head is None else max(0, head - position.prefix),
                unpublished=await connection.fetchval(
                    "select coalesce(sum(size), 0) from tops.outbox where replica_set = $1", self.replica_set
                ),
            )

        return await self._book.run(work, "looking after its health")
