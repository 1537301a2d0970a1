"""A SQLite file as a compensatable resource.

SQLite has no two-phase commit, so `prepare` commits at once, with the way back written down in the same transaction;
`commit` throws the way back away, `rollback` walks it, exactly once. In between the work is visible: that is what
compensatable means. Everything an agent must remember is in tables `tops_…` of the same file.
"""

import asyncio
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from adapters.changes import Member, Row, Value, encode_member, split_table_name
from adapters.resource import (
    KEPT_BEYOND_MS,
    Applied,
    Attempt,
    Entry,
    EntryFailed,
    Epoch,
    Exclusion,
    Health,
    InDoubt,
    MemberVote,
    OutboxEntry,
    Position,
    Prepared,
    ReadResult,
    Why,
    too_large,
)
from adapters.sqlite.guards import KNOW_TABLES, check_query, looks_only
from adapters.sqlite.reading import SqliteSnapshot, dicts, point_in, position_in
from adapters.sqlite.undo import UndoLog
from adapters.sqlite.work import Work, arguments_of, is_transient
from tops.model.errors import (
    AgentReplaced,
    CompensationRejected,
    ConfigError,
    InvariantBroken,
    MemberRejected,
    PreparedWorkLost,
    ResourceError,
    ResourceRejected,
    StaleAttempt,
)
from tops.model.ids import NodeId
from tops.model.log_points import NO_DIGEST, NO_DIGESTS, Digests, LogPoint, chained
from tops.model.sizes import LOCAL_TX_BYTES_MAX

T = TypeVar("T")
Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]

_SCHEMA = """
create table if not exists tops_agent (replica_set text primary key, token text not null);
create table if not exists tops_applied (
    replica_set text, number integer, history text not null, digest text not null, primary key (replica_set, number));
create table if not exists tops_position (
    replica_set text primary key, prefix integer not null, at_ms integer not null, history text not null,
    digest text not null);
create table if not exists tops_row_versions (
    table_name text, key text, version integer not null, primary key (table_name, key));
create table if not exists tops_idempotency_keys (
    replica_set text, key text, content text not null, tx text not null, number integer not null,
    expires_ms integer not null, primary key (replica_set, key));
create table if not exists tops_outbox (
    id integer primary key autoincrement, replica_set text not null, member blob not null);
create table if not exists tops_participation (
    replica_set text primary key, number integer not null, incarnation integer not null, attempt integer not null,
    coordinator text not null, note text not null, prepared_at real not null, local_writes integer not null,
    at_ms integer not null, history text not null, digest text not null);
create table if not exists tops_undo (
    id integer primary key autoincrement, replica_set text not null, number integer not null, sql text not null);
"""
_BUSY_TIMEOUT_S = 5.0
_USER_TRIGGERS = "select tbl_name from main.sqlite_master where type = 'trigger'"
_CASCADES = """
select m.name, f."table" from main.sqlite_master m join pragma_foreign_key_list(m.name) f
 where m.type = 'table' and not (f.on_update in ('NO ACTION', 'RESTRICT') and f.on_delete in ('NO ACTION', 'RESTRICT'))
"""


class SqliteAdapter:
    """One replica set in one SQLite file; `adapters.resource.Resource` says what each method promises."""

    compensatable = True
    has_own_schema = False

    def __init__(
        self,
        path: str | Path,
        *,
        cluster: str,
        replica_set: str,
        name: str = "",
        versioned: Sequence[str] = (),
    ) -> None:
        """`path` may be a file name or `sqlite:///…`; several sets in one file share nothing but the file."""
        self.path = Path(str(path).removeprefix("sqlite:///")) if str(path).startswith("sqlite:") else Path(path)
        self.cluster, self.replica_set = cluster, replica_set
        self.where = name or f"the SQLite database {self.path.name} of replica set {replica_set!r}"
        self._versioned = frozenset(versioned)
        self._token = secrets.token_hex(16)
        # One thread, so that calls are carried out in order and go on when their caller is cancelled.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tops-sqlite")
        self._open: sqlite3.Connection | None = None
        self._answers: dict[Attempt, Prepared] = {}

    async def start(self) -> None:
        await self._in_thread(self._start)

    async def close(self) -> None:
        if self._open is not None:
            await self._in_thread(self._open.close)
            self._open = None
        self._thread.shutdown()

    async def __aenter__(self) -> "SqliteAdapter":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def recover(self) -> list[InDoubt]:
        def work() -> list[InDoubt]:
            with self._transaction():
                found = self._participation()
            return [] if found is None else [InDoubt(found[0], max(0.0, time.time() - found[1]))]

        return await self._in_thread(work)

    async def prepare(self, epoch: Epoch) -> Prepared:
        return await self._in_thread(lambda: self._prepare(epoch))

    async def commit(self, attempt: Attempt) -> LogPoint:
        return await self._in_thread(lambda: self._commit(attempt))

    async def rollback(self, attempt: Attempt) -> None:
        await self._in_thread(lambda: self._take_back(attempt))

    async def apply(
        self, entries: Sequence[Entry], *, durable: bool = True, history: str = "", digests: Digests = NO_DIGESTS
    ) -> Applied:
        numbers = [entry.number for entry in entries]
        if sorted(set(numbers)) != numbers:
            raise InvariantBroken(f"entries of the log out of order: {numbers}")
        return await self._in_thread(lambda: self._apply(entries, durable, history, digests))

    async def applied(self) -> Position:
        def work() -> Position:
            with self._transaction():
                return position_in(self._connection, self.replica_set)

        return await self._in_thread(work)

    async def point(self) -> LogPoint:
        def work() -> LogPoint:
            with self._transaction():
                return point_in(self._connection, self.replica_set)

        return await self._in_thread(work)

    async def compact(self) -> None:
        def work() -> None:
            with self._transaction():
                point = point_in(self._connection, self.replica_set)
                self._connection.execute(
                    "update tops_position set prefix = ?, history = ?, digest = ? where replica_set = ?",
                    (point.index, point.history, point.digest, self.replica_set),
                )
                self._connection.execute(
                    "delete from tops_applied where replica_set = ? and number <= ?", (self.replica_set, point.index)
                )
                self._connection.execute(
                    "delete from tops_idempotency_keys where replica_set = ?1 and expires_ms <= "
                    "(select at_ms - ?2 from tops_position where replica_set = ?1)",
                    (self.replica_set, KEPT_BEYOND_MS),
                )

        await self._in_thread(work)

    async def write_local(self, member: Member) -> MemberVote:
        vote = await self._write_one(member)
        if vote.excluded is not None:
            raise MemberRejected(self.where, member.tx, vote.excluded.message, vote.excluded.sqlstate)
        return vote

    async def write_all_local(self, members: Sequence[Member]) -> list[MemberVote]:
        return [await self._write_one(member) for member in members]

    async def _write_one(self, member: Member) -> MemberVote:
        encoded = encode_member(member)
        is_long = len(encoded) > LOCAL_TX_BYTES_MAX

        def work() -> MemberVote:
            with self._transaction():
                if is_long:
                    self._connection.execute("savepoint before")
                vote = self._work.run(0, time.time_ns() // 1_000_000, member)
                if vote.excluded is None and is_long:
                    self._connection.execute("rollback to before")
                    return MemberVote(member.tx, excluded=too_large(len(encoded)))
                if vote.excluded is None:
                    self._connection.execute(
                        "insert into tops_outbox (replica_set, member) values (?, ?)",
                        (self.replica_set, encoded),
                    )
                    self._connection.execute(
                        "update tops_participation set local_writes = local_writes + 1 where replica_set = ?",
                        (self.replica_set,),
                    )
            return vote

        return await self._in_thread(work)

    async def unpublished(self, limit: int = 1_000, after: int = 0) -> list[OutboxEntry]:
        def work() -> list[OutboxEntry]:
            rows = self._connection.execute(
                "select id, member from tops_outbox where replica_set = ? and id > ? order by id limit ?",
                (self.replica_set, after, limit),
            )
            return [OutboxEntry(number, [member]) for number, member in rows]

        return await self._in_thread(work)

    async def count_unpublished(self, after: int = 0) -> int:
        def work() -> int:
            sql = "select count(*) from tops_outbox where replica_set = ? and id > ?"
            return int(self._connection.execute(sql, (self.replica_set, after)).fetchone()[0])

        return await self._in_thread(work)

    async def mark_published(self, up_to: int) -> None:
        def work() -> None:
            with self._transaction():
                self._connection.execute(
                    "delete from tops_outbox where replica_set = ? and id <= ?", (self.replica_set, up_to)
                )

        await self._in_thread(work)

    async def read(
        self, sql: str, args: Sequence[Value] = (), *, with_position: bool = False, who: str = ""
    ) -> ReadResult:
        check_query(sql)
        return await self._read(sql, args, with_position=with_position, authorizer=looks_only)

    async def read_own(self, sql: str, args: Sequence[Value] = ()) -> ReadResult:
        return await self._read(sql, args)

    async def _read(
        self, sql: str, args: Sequence[Value], *, with_position: bool = False, authorizer: Authorizer | None = None
    ) -> ReadResult:
        def work() -> ReadResult:
            with self._reader() as reader:
                reader.execute(KNOW_TABLES).fetchall()
                reader.set_authorizer(authorizer)
                try:
                    cursor = reader.execute(sql, arguments_of(args))
                except sqlite3.Error as error:
                    raise ResourceError(self.where, f"the query fails: {error}") from error
                rows = dicts(cursor)
                reader.set_authorizer(None)
                return ReadResult(rows, position_in(reader, self.replica_set) if with_position else None)

        return await asyncio.to_thread(work)

    async def version(self, table: str, key: Row) -> int:
        def work() -> int:
            self._work.refresh()
            return self._work.version(self._work.table(table), key)

        return await self._in_thread(work)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[SqliteSnapshot]:
        with TemporaryDirectory(prefix="tops-snapshot-") as folder, self._reader() as reader:
            yield SqliteSnapshot(reader, self.replica_set, Path(folder))

    async def run_own_script(self, script: str) -> None:
        """SQLite has no functions, and a set's tables can't be told from others here."""
        raise ConfigError(f"{self.where}: it is a SQLite file; this needs a PostgreSQL replica")

    async def apply_quarantined(self, member: Member, delete_sql: str) -> MemberVote:
        """Nothing is ever set aside here."""
        raise ConfigError(f"{self.where}: it is a SQLite file, which keeps nothing aside")

    async def health(self, head: int | None = None) -> Health:
        doubts, position = await self.recover(), await self.applied()
        waiting = await self.read_own(
            "select count(*) as n from tops_outbox where replica_set = $1", (self.replica_set,)
        )
        return Health(
            position=position,
            prepared=len(doubts),
            oldest_prepared_s=max((doubt.age_s for doubt in doubts), default=0.0),
            lag=None if head is None else max(0, head - position.prefix),
            unpublished=waiting.rows[0]["n"],
        )

    # -- in the writing thread

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._open is None:
            raise ResourceError(self.where, "not started: call start() first")
        return self._open

    async def _in_thread(self, work: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except sqlite3.Error as error:
            if is_transient(error):
                raise ResourceRejected(self.where, str(error)) from error
            raise ResourceError(self.where, str(error)) from error

    def _start(self) -> None:
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_S
            )
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            connection.execute("pragma foreign_keys = on")
            connection.execute("pragma recursive_triggers = on")
            connection.executescript(f"begin immediate; {_SCHEMA} commit")
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            raise ConfigError(f"{self.where}: {self.path} can't be used: {error}") from error
        self._open = connection
        self._undo = UndoLog(connection)
        self._work = Work(connection, self.replica_set, self._versioned)
        connection.execute("begin immediate")
        # From here on an earlier agent's transactions find another token than theirs, and end.
        connection.execute("insert or replace into tops_agent values (?, ?)", (self.replica_set, self._token))
        connection.execute("insert or ignore into tops_position values (?, 0, 0, '', ?)", (self.replica_set, NO_DIGEST))
        connection.execute("commit")

    @contextmanager
    def _transaction(self, *, foreign_keys: bool = True) -> Iterator[None]:
        connection = self._connection
        if not foreign_keys:
            connection.execute("pragma foreign_keys = off")
        try:
            connection.execute("begin immediate")
            owner = connection.execute(
                "select token from tops_agent where replica_set = ?", (self.replica_set,)
            ).fetchone()
            if owner is None or owner[0] != self._token:
                raise AgentReplaced(self.where, "another agent has taken over this replica; stop this one")
            self._work.refresh()
            yield
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise
        finally:
            connection.execute("pragma foreign_keys = on")

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        reader = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        try:
            reader.execute("begin")
            yield reader
        finally:
            reader.close()

    def _participation(self) -> tuple[Attempt, float] | None:
        row = self._connection.execute(
            "select number, incarnation, attempt, coordinator, note, prepared_at from tops_participation "
            "where replica_set = ?",
            (self.replica_set,),
        ).fetchone()
        return None if row is None else (Attempt(row[0], row[1], row[2], NodeId(row[3]), row[4]), row[5])

    def _later_commits(self, number: int) -> bool:
        """Whether anything was committed through us after the promise of that number."""
        position = position_in(self._connection, self.replica_set)
        (local_writes,) = self._connection.execute(
            "select local_writes from tops_participation where replica_set = ?", (self.replica_set,)
        ).fetchone()
        return position.prefix > number or any(later > number for later in position.above) or local_writes > 0

    def _prepare(self, epoch: Epoch) -> Prepared:
        asked = epoch.attempt
        answer = self._settle_earlier_attempts(epoch)
        if answer is not None:
            return answer
        self._undo.refresh()
        try:
            with self._transaction():
                tied = self._tables_with_triggers()
                self._work.reach = self._undo.captured
                self._undo.capture(self.replica_set, asked.number)
                votes = tuple(self._vote(epoch, member, tied) for member in epoch.members)
                self._undo.stop()
                history, digest = epoch.before.history, _digest(epoch, votes)
                self._connection.execute(
                    "insert into tops_participation values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (self.replica_set, *_fields(asked), time.time(), 0, epoch.at_ms, history, digest),
                )
        finally:
            self._work.reach = None
            self._undo.stop()
        self._answers = {asked: Prepared(attempt=asked, digest=epoch.digest, votes=votes, log_digest=digest)}
        return self._answers[asked]

    def _vote(self, epoch: Epoch, member: Member, tied: set[str]) -> MemberVote:
        """Triggers of the user's would run again on the way back, on top of what is taken back."""
        touched = {getattr(change, "table", None) for change in member.changes}
        if tied and (None in touched or any(split_table_name(str(table))[1] in tied for table in touched)):
            problem = f"tables with triggers can't be compensated: {', '.join(sorted(tied))}"
            return MemberVote(tx=member.tx, excluded=Exclusion(why=Why.INVALID, sqlstate="", message=problem))
        return self._work.run(epoch.attempt.number, epoch.at_ms, member)

    def _tables_with_triggers(self) -> set[str]:
        """Tables whose change can fire a trigger of the user's, be it through a reference that cascades."""
        tied = {row[0] for row in self._connection.execute(_USER_TRIGGERS)}
        cascades = self._connection.execute(_CASCADES).fetchall() if tied else []
        while more := {parent for child, parent in cascades if child in tied} - tied:
            tied |= more
        return tied

    def _settle_earlier_attempts(self, epoch: Epoch) -> Prepared | None:
        asked = epoch.attempt
        with self._transaction():
            if position_in(self._connection, self.replica_set).holds(asked.number):
                raise StaleAttempt(self.where, f"{asked}: the number is applied already")
            found = self._participation()
        if found is None:
            return None
        known = found[0]
        if known == asked:
            answer = self._answers.get(asked)
            if answer is None or answer.digest != epoch.digest:
                raise StaleAttempt(self.where, f"{asked} is prepared already; ask its coordinator to decide")
            return answer
        if known.number != asked.number:
            # A later epoch on top could not be taken back without this one.
            raise ResourceRejected(self.where, f"{asked} has to wait until {known} is decided")
        if known.coordinator == asked.coordinator and known > asked:
            raise StaleAttempt(self.where, f"{asked} comes too late: {known} is prepared")
        self._take_back(known)
        return None

    def _take_back(self, attempt: Attempt) -> None:
        with self._transaction(foreign_keys=False):
            self._compensate(attempt)

    def _compensate(self, attempt: Attempt) -> None:
        found = self._participation()
        if found is None or found[0] != attempt:
            return  # never promised, or taken back already
        if self._later_commits(attempt.number) or not self._undo.take_back(self.replica_set, attempt.number):
            raise CompensationRejected(
                self.where, f"{attempt} can't be taken back: something later is committed that builds on it"
            )
        self._connection.execute("delete from tops_participation where replica_set = ?", (self.replica_set,))

    def _commit(self, attempt: Attempt) -> LogPoint:
        with self._transaction():
            found = self._participation()
            if found is None or found[0] != attempt:
                if not position_in(self._connection, self.replica_set).holds(attempt.number):
                    raise PreparedWorkLost(self.where, f"{attempt} is to commit, but is neither prepared nor applied")
                return point_in(self._connection, self.replica_set)
            self._undo.forget(self.replica_set, attempt.number)
            self._connection.execute(
                "update tops_position set at_ms = max(at_ms, (select at_ms from tops_participation p "
                "where p.replica_set = tops_position.replica_set)) where replica_set = ?",
                (self.replica_set,),
            )
            self._connection.execute(
                "insert into tops_applied select replica_set, number, history, digest from tops_participation "
                "where replica_set = ?",
                (self.replica_set,),
            )
            self._connection.execute("delete from tops_participation where replica_set = ?", (self.replica_set,))
            return point_in(self._connection, self.replica_set)

    def _apply(self, entries: Sequence[Entry], durable: bool, history: str, digests: Digests) -> Applied:
        failed = None
        with self._transaction():
            found, known = self._participation(), position_in(self._connection, self.replica_set)
        entries = [entry for entry in entries if not known.holds(entry.number)]
        if found is not None and entries:
            if found[0].number not in [entry.number for entry in entries]:
                raise ResourceRejected(self.where, f"{found[0]} has to be decided before other entries are applied")
            # The log is the decision: the number comes from there, whatever we had promised under it.
            self._take_back(found[0])
        self._connection.execute(f"pragma synchronous = {'full' if durable else 'normal'}")
        try:
            with self._transaction():
                for entry in entries:
                    failed = self._apply_entry(entry, history, digests.at(entry.number) or NO_DIGEST)
                    if failed is not None:
                        break
                position = position_in(self._connection, self.replica_set)
        finally:
            self._connection.execute("pragma synchronous = full")
        return Applied(position=position.prefix, failed=failed)

    def _apply_entry(self, entry: Entry, history: str, digest: str) -> EntryFailed | None:
        self._connection.execute("savepoint tops_entry")
        for member in entry.members:
            vote = self._work.run(entry.number, entry.at_ms, member)
            # The log may hold a transaction twice (a client that repeated itself): the first one counts.
            if vote.excluded is not None and vote.excluded.why is not Why.DUPLICATE:
                self._connection.execute("rollback to tops_entry")
                self._connection.execute("release tops_entry")
                return EntryFailed(entry.number, vote.tx, vote.excluded)
        self._connection.execute(
            "insert into tops_applied values (?, ?, ?, ?)", (self.replica_set, entry.number, history, digest)
        )
        self._connection.execute(
            "update tops_position set at_ms = max(at_ms, ?) where replica_set = ?", (entry.at_ms, self.replica_set)
        )
        self._connection.execute("release tops_entry")
        return None


def _digest(epoch: Epoch, votes: Sequence[MemberVote]) -> str:
    """Of the log with all members of the epoch but the excluded ones."""
    ids = [vote.tx for vote in votes if vote.excluded is None]
    return chained(epoch.before.history, epoch.before.digest, epoch.attempt.number, ids)


def _fields(attempt: Attempt) -> tuple[int, int, int, str, str]:
    return attempt.number, attempt.incarnation, attempt.attempt, attempt.coordinator, attempt.note
