"""Entries of the log, applied in order and exactly once: the position moves in the transaction of the data."""

import itertools
from collections.abc import Iterator, Sequence

from adapters.postgres.book import Book
from adapters.postgres.literals import quote
from adapters.postgres.progress import number_text, prefix_text
from adapters.postgres.session import Connection
from adapters.postgres.statements import Statements
from adapters.postgres.transactions import Job, SlowPath, fast_texts, send_fast
from tops.errors import InvariantBroken
from tops.ports import Applied, Entry, EntryFailed, Position, Why

_CHANGES_MAX = 2_000  # per database transaction

_COMPACT = """
with moved as (update tops.position set prefix = {prefix} where replica_set = {replica_set} and prefix = {stored}
               returning 1),
     forgotten as (delete from tops.idempotency_keys k using tops.position p where k.replica_set = {replica_set}
               and p.replica_set = k.replica_set and k.expires_ms <= p.at_ms)
delete from tops.applied where replica_set = {replica_set} and number <= {prefix} and exists (select from moved)
"""


class Log:
    def __init__(self, book: Book) -> None:
        self._book = book

    async def apply(self, entries: Sequence[Entry], *, durable: bool) -> Applied:
        numbers = [entry.number for entry in entries]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise InvariantBroken(f"entries of the log out of order: {numbers}")
        result = Applied(position=self._book.progress.prefix)
        for chunk in _chunks(entries):
            result = await self._apply_chunk(chunk, durable=durable)
            if result.failed is not None:
                break
        return result

    async def position(self) -> Position:
        async def work(connection: Connection, _: Statements) -> Position:
            await self._book.load(connection)
            return self._book.progress.position

        return await self._book.run(work, "asking for the position")

    async def compact(self) -> None:
        async def work(connection: Connection, _: Statements) -> None:
            progress = self._book.progress
            await connection.execute(
                "begin; set local synchronous_commit = off;"
                + _COMPACT.format(
                    prefix=progress.prefix, stored=progress.stored, replica_set=quote(self._book.replica_set)
                )
                + "; commit"
            )
            progress.stored = progress.prefix

        await self._book.run(work, "compaction")

    async def _apply_chunk(self, entries: Sequence[Entry], *, durable: bool) -> Applied:
        first, last = entries[0].number, entries[-1].number

        async def work(connection: Connection, statements: Statements) -> Applied:
            todo = [entry for entry in entries if not self._book.progress.holds(entry.number)]
            begin = ["BEGIN"] if durable else ["BEGIN", "SET LOCAL synchronous_commit = off"]
            failed = None
            if todo and not await self._fast(connection, statements, todo, begin):
                failed = await self._slow(connection, statements, todo, begin)
            return Applied(position=self._book.progress.prefix, failed=failed)

        return await self._book.run(work, f"applying numbers {first} to {last}")

    async def _fast(self, connection: Connection, statements: Statements, todo: list[Entry], begin: list[str]) -> bool:
        jobs = [Job(entry.number, entry.at_ms, member) for entry in todo for member in entry.members]

        async def compose() -> list[str]:
            texts = await fast_texts(statements, self._book.replica_set, jobs)
            return [*begin, *texts, *await self._record(statements, todo), "COMMIT"]

        if await send_fast(self._book.session, connection, statements, compose) is None:
            return False
        self._done(todo)
        return True

    async def _slow(
        self, connection: Connection, statements: Statements, todo: list[Entry], begin: list[str]
    ) -> EntryFailed | None:
        """One by one up to the first that fails; what came before it is committed."""
        slow = SlowPath(self._book.session, connection, statements, self._book.replica_set)
        jobs = [[Job(entry.number, entry.at_ms, member) for member in entry.members] for entry in todo]
        written = [await slow.write_down(of_entry) for of_entry in jobs]
        await connection.execute(";".join(begin))
        failed, done = None, []
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
        records = await self._record(statements, done) if done else []
        await connection.execute(";".join([*records, "COMMIT"]))
        self._done(done)
        return failed

    async def _record(self, statements: Statements, entries: Sequence[Entry]) -> list[str]:
        """The statements that make the numbers known as applied: a longer prefix, and rows for what is beyond it."""
        numbers = [entry.number for entry in entries]
        progress, replica_set = self._book.progress, self._book.replica_set
        later = progress.after(numbers)
        texts = []
        if later.prefix > progress.prefix:
            at_ms = max(entry.at_ms for entry in entries)
            texts.append(await prefix_text(statements, replica_set, progress.stored, later.prefix, at_ms))
        beyond = [number for number in numbers if number > later.prefix]
        if beyond:
            texts.append(await number_text(statements, replica_set, beyond))
        return texts

    def _done(self, entries: Sequence[Entry]) -> None:
        progress = self._book.progress
        before = progress.prefix
        progress.add([entry.number for entry in entries])
        if progress.prefix > before:
            progress.stored = progress.prefix


def _chunks(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    start, size = 0, 0
    for place, entry in enumerate(entries):
        size += 1 + sum(len(member.changes) for member in entry.members)
        if size >= _CHANGES_MAX:
            yield entries[start : place + 1]
            start, size = place + 1, 0
    if start < len(entries):
        yield entries[start:]
