"""Epochs as prepared transactions: promise, keep, drop, find again after a crash."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import asyncpg

from adapters.postgres.apply.book import Book
from adapters.postgres.apply.global_ids import global_id
from adapters.postgres.apply.progress import Job, Mark, Progress, number_text
from adapters.postgres.apply.session import Connection
from adapters.postgres.apply.statements import Statements
from adapters.postgres.apply.transactions import SlowPath, Written, fast_texts, fast_votes, send_fast
from adapters.postgres.sql.sqlstates import (
    BUSY_ID,
    NOT_PREPARABLE,
    UNKNOWN_ID,
    exclusion,
    is_connection_loss,
    is_transient,
    sqlstate,
)
from adapters.resource import Attempt, Epoch, InDoubt, MemberVote, Prepared
from tops.model.errors import PermissionDenied, PreparedWorkLost, ResourceRejected, StaleAttempt
from tops.model.log_points import LogPoint, chained

_TRIES = 50
_PAUSE_S = 0.1


class _Outdated(Exception):
    """A table has changed between the proof of a change and its execution; the transaction is rolled back."""


class PreparedTransactions:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._answers: dict[Attempt, Prepared] = {}  # given in this life, for when the question comes again
        self._times: dict[Attempt, int] = {}
        self._marks: dict[Attempt, Mark] = {}  # what is recorded with the promise

    async def recover(self) -> list[InDoubt]:
        async def work(connection: Connection, _: Statements) -> list[InDoubt]:
            return await self._book.load(connection)

        return await self._book.run(work, "recovery")

    async def prepare(self, epoch: Epoch) -> Prepared:
        async def work(connection: Connection, statements: Statements) -> Prepared:
            answer = await self._settle_earlier_attempts(connection, epoch)
            if answer is not None:
                return answer
            self._check_history(epoch)
            mark = _mark(epoch, ())
            votes = await self._fast(connection, statements, epoch, mark)
            if votes is None:
                votes = await self._slow(connection, statements, epoch)
                mark = _mark(epoch, votes)
            self._book.prepared.add(epoch.attempt)
            self._marks[epoch.attempt] = mark
            answer = Prepared(attempt=epoch.attempt, digest=epoch.digest, votes=votes, log_digest=mark.digest)
            self._answers[epoch.attempt], self._times[epoch.attempt] = answer, epoch.at_ms
            return answer

        return await self._book.run(work, f"preparing {epoch.attempt}")

    async def commit(self, attempt: Attempt) -> LogPoint:
        async def work(connection: Connection, statements: Statements) -> LogPoint:
            found, mark = await finish(self._book, connection, "COMMIT", attempt), self._marks.get(attempt)
            if found and mark is not None:
                self._book.progress.add([mark])
            else:
                # Promised before a crash, or perhaps it is committed and the answer was lost: the database knows.
                self._book.progress = await Progress.load(connection, self._book.replica_set)
                if not self._book.progress.holds(attempt.number):
                    raise PreparedWorkLost(
                        self._book.where, f"{attempt} is to commit, but is neither prepared nor applied"
                    )
            self._book.at_ms = max(self._book.at_ms, self._times.pop(attempt, 0))
            self._forget(attempt)
            return self._book.progress.point

        return await self._book.run(work, f"committing {attempt}")

    async def rollback(self, attempt: Attempt) -> None:
        async def work(connection: Connection, _: Statements) -> None:
            await finish(self._book, connection, "ROLLBACK", attempt)
            self._forget(attempt)

        await self._book.run(work, f"rolling back {attempt}")

    def _forget(self, attempt: Attempt) -> None:
        self._book.prepared.discard(attempt)
        self._answers.pop(attempt, None)
        self._times.pop(attempt, None)
        self._marks.pop(attempt, None)

    async def _settle_earlier_attempts(self, connection: Connection, epoch: Epoch) -> Prepared | None:
        """Other tries at the number end; the same one is answered again, never done again."""
        asked = epoch.attempt
        if self._book.progress.holds(asked.number):
            raise StaleAttempt(self._book.where, f"{asked}: the number is applied already")
        for known in sorted(self._book.prepared):
            if known.number != asked.number:
                continue
            if known == asked:
                answer = self._answers.get(asked)
                if answer is None or answer.digest != epoch.digest:
                    raise StaleAttempt(self._book.where, f"{asked} is prepared already; ask its coordinator to decide")
                return answer
            if known.coordinator == asked.coordinator and known > asked:
                raise StaleAttempt(self._book.where, f"{asked} comes too late: {known} is prepared")
            await finish(self._book, connection, "ROLLBACK", known)
            self._forget(known)
        return None

    def _check_history(self, epoch: Epoch) -> None:
        """Nothing is prepared on top of another state than the coordinator believes in: a database can be exchanged
        under a running agent."""
        point, before = self._book.progress.point, epoch.before
        if before.index and (point.index, point.digest) != (before.index, before.digest):
            raise ResourceRejected(self._book.where, f"{epoch.attempt} follows {before}, and the database has {point}")

    async def _fast(
        self, connection: Connection, statements: Statements, epoch: Epoch, mark: Mark
    ) -> tuple[MemberVote, ...] | None:
        """All members in one message; None if they have to be looked at one by one."""
        number, replica_set = epoch.attempt.number, self._book.replica_set
        jobs = [Job(number, epoch.at_ms, member) for member in epoch.members]
        texts = await fast_texts(statements, replica_set, jobs)
        if texts is None:
            return None
        message = ["BEGIN", await number_text(statements, replica_set, [mark]), *texts]
        message.append(self._prepare_text(epoch.attempt))
        sent = await send_fast(self._book.session, connection, statements, message)
        if sent is None:
            return None
        tag, told = sent
        self._check_tag(tag, epoch.attempt)
        return fast_votes(jobs, told)

    async def _slow(self, connection: Connection, statements: Statements, epoch: Epoch) -> tuple[MemberVote, ...]:
        """Every member under a savepoint; those that the database rejects are named, the others stay."""
        for _ in range(_TRIES):
            with suppress(_Outdated):
                return await self._one_by_one(connection, statements, epoch)
        raise ResourceRejected(self._book.where, f"{epoch.attempt}: definitions of its tables change again and again")

    async def _one_by_one(self, connection: Connection, statements: Statements, epoch: Epoch) -> tuple[MemberVote, ...]:
        jobs = [Job(epoch.attempt.number, epoch.at_ms, member) for member in epoch.members]
        slow = SlowPath(self._book.session, connection, statements, self._book.replica_set)
        written = await slow.write_down(jobs)

        async def prepared(members: list[Written | MemberVote]) -> tuple[MemberVote, ...] | asyncpg.PostgresError:
            await connection.execute("BEGIN")
            votes = tuple([await slow.run(member) for member in members])
            if await slow.is_outdated():
                raise _Outdated
            # Behind the members: which of them are excluded is part of what is recorded.
            await connection.execute(await number_text(statements, self._book.replica_set, [_mark(epoch, votes)]))
            try:
                self._check_tag(await connection.execute(self._prepare_text(epoch.attempt)), epoch.attempt)
            except asyncpg.PostgresError as error:
                if sqlstate(error) != NOT_PREPARABLE:
                    raise
                return error
            return votes

        votes = await prepared(written)
        while isinstance(votes, asyncpg.PostgresError):
            # Something that can't be prepared (a NOTIFY, a temporary table) shows only at the end of all: search for
            # the first member with which it does.
            works, fails = 0, len(written)
            while fails - works > 1:
                middle = (works + fails) // 2
                if isinstance(await prepared(written[:middle]), asyncpg.PostgresError):
                    fails = middle
                else:
                    works = middle
                    await finish(self._book, connection, "ROLLBACK", epoch.attempt)
            written[fails - 1] = MemberVote(tx=jobs[fails - 1].member.tx, excluded=exclusion(votes))
            votes = await prepared(written)
        return votes

    def _prepare_text(self, attempt: Attempt) -> str:
        return f"PREPARE TRANSACTION '{_gid(self._book, attempt)}'"

    def _check_tag(self, tag: str, attempt: Attempt) -> None:
        # In a failed transaction the server answers ROLLBACK, without an error: a promise of nothing.
        if tag != "PREPARE TRANSACTION":
            raise ResourceRejected(self._book.where, f"{attempt}: the server answered {tag} to PREPARE TRANSACTION")


def _mark(epoch: Epoch, votes: Sequence[MemberVote]) -> Mark:
    """What is recorded with an epoch: the log with all its members but the excluded ones."""
    excluded = {vote.tx for vote in votes if vote.excluded is not None} if votes else ()
    number, before = epoch.attempt.number, epoch.before
    ids = [member.tx for member in epoch.members if member.tx not in excluded]
    return Mark(number, before.history, chained(before.history, before.digest, number, ids))


def _gid(book: Book, attempt: Attempt) -> str:
    return global_id(book.cluster, book.replica_set, attempt)


async def finish(book: Book, connection: Connection, verb: str, attempt: Attempt) -> bool:
    """Carry out a decision; False if no such transaction is prepared. Never gives up half-way by itself."""
    order = f"{verb} PREPARED '{_gid(book, attempt)}'"
    for _ in range(_TRIES):
        try:
            await connection.execute(order)
        except asyncpg.PostgresError as error:
            if sqlstate(error) == UNKNOWN_ID:
                return False
            if is_connection_loss(error):
                raise
            if sqlstate(error) == BUSY_ID or is_transient(error):
                # Another session is at it, or our wait was cancelled and it may be done: ask again.
                await asyncio.sleep(_PAUSE_S)
                continue
            raise PermissionDenied(
                f"{book.where}: {attempt} can only be finished in the database and by the role that "
                f"prepared it, or by a superuser ({error})"
            ) from error
        return True
    raise ResourceRejected(book.where, f"{attempt}: {verb} PREPARED is refused again and again; still prepared")
