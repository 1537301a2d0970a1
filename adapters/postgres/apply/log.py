"""Entries of the log, applied in order and exactly once: the position moves in the transaction of the data."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence, Set

from adapters.postgres.apply.book import Book
from adapters.postgres.apply.prepared_transactions import finish
from adapters.postgres.apply.progress import Job, Mark, Progress, number_text, prefix_text
from adapters.postgres.apply.session import Connection
from adapters.postgres.apply.statements import Statements
from adapters.postgres.apply.transactions import SlowPath, command_count, fast_texts, send_fast
from adapters.postgres.sql.literals import quote
from adapters.resource import KEPT_BEYOND_MS, Applied, Entry, EntryFailed, Why
from tops.model.errors import InvariantBroken
from tops.model.log_points import NO_DIGEST, Digests

_CHANGES_MAX = 2_000  # per database transaction, entries counted in
_CHUNKS_PER_TURN = 16

_COMPACT = """
with moved as (update tops.position set prefix = {prefix}, at_ms = greatest(at_ms, {at_ms}),
                      history = {history}, digest = {digest}
                where replica_set = {replica_set} and prefix = {stored} returning 1)
delete from tops.applied where replica_set = {replica_set} and number <= {prefix} and exists (select from moved)
"""
_FORGET = """
delete from {table} where ctid = any (array(
    select ctid from {table} where replica_set = $1 and expires_ms <= $2 limit {most}))
"""
_FORGOTTEN_MAX = 10_000  # at a time: others wait meanwhile


class Log:
    def __init__(self, book: Book) -> None:
        self._book = book

    async def apply(self, entries: Sequence[Entry], *, durable: bool, history: str, digests: Digests) -> Applied:
        numbers = [entry.number for entry in entries]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise InvariantBroken(f"entries of the log out of order: {numbers}")
        failed = None
        for chunks in _turns(entries):
            failed = await self._apply_some(chunks, durable, history, digests)
            if failed is not None:
                break
        return Applied(position=self._book.progress.prefix, failed=failed)

    async def _apply_some(
        self, chunks: Sequence[Sequence[Entry]], durable: bool, history: str, digests: Digests
    ) -> EntryFailed | None:
        async def work(connection: Connection, statements: Statements) -> EntryFailed | None:
            if self._book.prepared:
                await self._drop_promises(connection, {entry.number for chunk in chunks for entry in chunk})
            turn = _Turn(self._book, connection, statements, durable, history, digests)
            return await turn.run(chunks)

        return await self._book.run(work, f"applying numbers {chunks[0][0].number} to {chunks[-1][-1].number}")

    async def _drop_promises(self, connection: Connection, numbers: Set[int]) -> None:
        """The log is the decision: a number that it holds comes from there, whatever we had promised under it."""
        for attempt in sorted(self._book.prepared):
            if attempt.number in numbers:
                await finish(self._book, connection, "ROLLBACK", attempt)
                self._book.prepared.discard(attempt)

    async def progress(self) -> Progress:
        async def work(connection: Connection, _: Statements) -> Progress:
            await self._book.load(connection)
            return self._book.progress

        return await self._book.run(work, "asking for the position")

    async def compact(self) -> None:
        async def work(connection: Connection, _: Statements) -> None:
            progress = self._book.progress
            await connection.execute(
                "begin; set local synchronous_commit = off;"
                + _COMPACT.format(
                    prefix=progress.prefix,
                    stored=progress.stored,
                    at_ms=self._book.at_ms,
                    history=quote(progress.last.history),
                    digest=quote(progress.last.digest),
                    replica_set=quote(self._book.replica_set),
                )
                + "; commit"
            )
            progress.stored = progress.prefix

        self._book.compacted_ms = at_ms = self._book.at_ms
        await self._book.run(work, "compaction")
        for table in ("tops.idempotency_keys", "tops.known_ids"):
            while await self._forget(table, at_ms - KEPT_BEYOND_MS) == _FORGOTTEN_MAX:
                pass

    async def _forget(self, table: str, at_ms: int) -> int:
        async def work(connection: Connection, _: Statements) -> int:
            forget = _FORGET.format(table=table, most=_FORGOTTEN_MAX)
            return command_count(await connection.execute(forget, self._book.replica_set, at_ms))

        return await self._book.run(work, f"forgetting old rows of {table}")


class _Turn:
    """Some chunks, each one transaction; while the server works at one, the next is written down."""

    def __init__(
        self,
        book: Book,
        connection: Connection,
        statements: Statements,
        durable: bool,
        history: str,
        digests: Digests,
    ) -> None:
        self._book, self._connection, self._statements = book, connection, statements
        self._history, self._digests = history, digests
        self._begin = ["BEGIN"] if durable else ["BEGIN", "SET LOCAL synchronous_commit = off"]
        self._sent: list[Entry] = []  # what the message under way is about

    async def run(self, chunks: Sequence[Sequence[Entry]]) -> EntryFailed | None:
        try:
            for chunk in chunks:
                expected = self._book.progress.after(self._marks(self._sent))
                todo = _after(chunk, expected)
                message = await self._message(todo, expected) if todo else None
                failed = await self._landed()
                if failed is None and message is not None:
                    await self._send(message, todo)
                elif failed is None and todo:
                    failed = await self._slow(todo)
                if failed is not None:
                    return failed
            return await self._landed()
        finally:
            if self._statements.under_way is not None:
                await asyncio.wait([self._statements.under_way])
                self._statements.under_way = None

    async def _message(self, todo: list[Entry], expected: Progress) -> list[str] | None:
        jobs = [Job(entry.number, entry.at_ms, member) for entry in todo for member in entry.members]
        texts = await fast_texts(self._statements, self._book.replica_set, jobs)
        if texts is None:
            return None
        return [*self._begin, *texts, *await self._record(todo, expected), "COMMIT"]

    async def _send(self, message: list[str], todo: list[Entry]) -> None:
        sending = send_fast(self._book.session, self._connection, self._statements, message)
        self._statements.under_way = asyncio.ensure_future(sending)
        self._sent = todo
        await asyncio.sleep(0)  # it leaves before the next one is begun

    async def _landed(self) -> EntryFailed | None:
        """Wait for the message under way; if it went wrong, do its entries one by one."""
        sent, self._sent = self._sent, []
        if self._statements.under_way is None:
            return None
        try:
            answer = await self._statements.under_way
        finally:
            self._statements.under_way = None
        if answer is None:
            return await self._slow(sent)
        self._done(sent)
        return None

    async def _slow(self, todo: list[Entry]) -> EntryFailed | None:
        """One by one up to the first that fails; what came before it is committed."""
        while (outcome := await self._one_by_one(todo)) is None:
            pass  # a table has changed meanwhile
        done, failed = outcome
        records = await self._record(done, self._book.progress) if done else []
        await self._connection.execute(";".join([*records, "COMMIT"]))
        self._done(done)
        return failed

    async def _one_by_one(self, todo: list[Entry]) -> tuple[list[Entry], EntryFailed | None] | None:
        """The entries that are carried out in the open transaction, and the one that fails; None if it is rolled back
        and must be tried again."""
        connection = self._connection
        slow = SlowPath(self._book.session, connection, self._statements, self._book.replica_set)
        jobs = [[Job(entry.number, entry.at_ms, member) for member in entry.members] for entry in todo]
        written = [await slow.write_down(of_entry) for of_entry in jobs]
        await connection.execute(";".join(self._begin))
        failed: EntryFailed | None = None
        done: list[Entry] = []
        for entry, members in zip(todo, written, strict=True):
            await connection.execute("SAVEPOINT tops_entry")
            for member in members:
                vote = await slow.run(member)
                # The log may hold a transaction twice (a client that repeated itself): the first one counts.
                if vote.excluded is not None and vote.excluded.why is not Why.DUPLICATE:
                    failed = EntryFailed(entry.number, vote.tx, vote.excluded)
                    break
            if failed is not None:
                await connection.execute("ROLLBACK TO SAVEPOINT tops_entry")
                break
            await connection.execute("RELEASE SAVEPOINT tops_entry")
            done.append(entry)
        return None if await slow.is_outdated() else (done, failed)

    async def _record(self, entries: Sequence[Entry], progress: Progress) -> list[str]:
        """The statements that make the numbers known as applied: a longer prefix, and rows for what is beyond it."""
        marks = self._marks(entries)
        replica_set, later = self._book.replica_set, progress.after(marks)
        texts = []
        if later.prefix > progress.prefix:
            at_ms = max(entry.at_ms for entry in entries)
            texts.append(await prefix_text(self._statements, replica_set, progress.stored, later.last, at_ms))
        beyond = [mark for mark in marks if mark.number > later.prefix]
        if beyond:
            texts.append(await number_text(self._statements, replica_set, beyond))
        return texts

    def _marks(self, entries: Sequence[Entry]) -> list[Mark]:
        at = self._digests.at
        return [Mark(entry.number, self._history, at(entry.number) or NO_DIGEST) for entry in entries]

    def _done(self, entries: Sequence[Entry]) -> None:
        self._book.progress = self._book.progress.after(self._marks(entries))
        self._book.at_ms = max([self._book.at_ms, *(entry.at_ms for entry in entries)])


def _after(entries: Sequence[Entry], progress: Progress) -> list[Entry]:
    """What of the entries is not applied yet."""
    if entries[0].number > progress.prefix and not progress.above:
        return list(entries)
    return [entry for entry in entries if not progress.holds(entry.number)]


def _turns(entries: Sequence[Entry]) -> Iterator[list[Sequence[Entry]]]:
    """Chunks of one transaction each, in groups after which others get a chance to use the connection."""
    turn: list[Sequence[Entry]] = []
    start, size = 0, 0
    for place, entry in enumerate(entries, 1):
        members = entry.members
        size += 1 + (len(members[0].changes) if len(members) == 1 else sum([len(one.changes) for one in members]))
        if size >= _CHANGES_MAX or place == len(entries):
            turn.append(entries[start:place])
            start, size = place, 0
        if len(turn) == _CHUNKS_PER_TURN:
            yield turn
            turn = []
    if turn:
        yield turn
