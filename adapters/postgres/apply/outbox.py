"""Transactions that commit here first and are published afterwards: nothing is lost between the two.

Writers that come together share a database transaction, so that its cost is shared and grows with the load only.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from adapters.changes import Member, encode_member
from adapters.postgres.apply.book import Book
from adapters.postgres.apply.keys import why_known
from adapters.postgres.apply.progress import Job, outbox_text
from adapters.postgres.apply.session import Connection
from adapters.postgres.apply.statements import Statements
from adapters.postgres.apply.transactions import SlowPath, fast_texts, fast_votes, send_fast
from adapters.postgres.sql.literals import quote
from adapters.resource import MemberVote, too_large
from tops.model.errors import MemberRejected
from tops.model.sizes import LOCAL_TX_BYTES_MAX

_GROUP_MAX = 256
_NO_NUMBER = 0  # its place in the log is not known yet


class Record(NamedTuple):
    """A member, and how it is recorded for publication."""

    job: Job
    encoded: bytes


Waiting = tuple[Sequence[Member], asyncio.Future[list[MemberVote]]]


class Outbox:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._waiting: list[Waiting] = []
        self._writer: asyncio.Task[None] | None = None

    async def write(self, member: Member) -> MemberVote:
        (vote,) = await self.write_all([member])
        if vote.excluded is not None:
            raise MemberRejected(self._book.where, member.tx, vote.excluded.message, vote.excluded.sqlstate)
        return vote

    async def write_all(self, members: Sequence[Member]) -> list[MemberVote]:
        answer: asyncio.Future[list[MemberVote]] = asyncio.get_running_loop().create_future()
        self._waiting.append((members, answer))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_waiting())
        return await answer

    async def finish(self) -> None:
        if self._writer is not None:
            await asyncio.gather(self._writer, return_exceptions=True)

    async def mark_published(self, up_to: int) -> None:
        async def work(connection: Connection, statements: Statements) -> None:
            # Lost in a crash, an entry is published once more; its transaction id tells.
            await connection.execute(
                "begin; set local synchronous_commit = off;"
                f"delete from tops.outbox where replica_set = {quote(self._book.replica_set)} and id <= {up_to:d};"
                "commit"
            )

        await self._book.run(work, "marking entries as published")

    async def _write_waiting(self) -> None:
        while self._waiting:
            group = self._next_group()
            try:
                votes = iter(await self._write_group([member for members, _ in group for member in members]))
            except Exception as error:
                for _, answer in group:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for members, answer in group:
                told = list(islice(votes, len(members)))
                if not answer.done():
                    answer.set_result(told)

    def _next_group(self) -> list[Waiting]:
        """From the front of the queue, as many as may share a transaction; one call's members always do."""
        size = 0
        for place, (members, _) in enumerate(self._waiting):
            size += len(members)
            if size > _GROUP_MAX and place:
                group, self._waiting = self._waiting[:place], self._waiting[place:]
                return group
        group, self._waiting = self._waiting, []
        return group

    async def _write_group(self, members: Sequence[Member]) -> Sequence[MemberVote]:
        now_ms = time.time_ns() // 1_000_000
        records = [Record(Job(_NO_NUMBER, now_ms, member), encode_member(member)) for member in members]
        short = [record for record in records if len(record.encoded) <= LOCAL_TX_BYTES_MAX]

        async def work(connection: Connection, statements: Statements) -> Sequence[MemberVote]:
            votes = await self._fast(connection, statements, short)
            if votes is None:
                votes = await self._slow(connection, statements, short)
            return votes if len(short) == len(records) else await self._with_long(connection, records, iter(votes))

        if not members:
            return []
        return await self._book.run(work, f"writing transaction {members[0].tx} and {len(members) - 1} more")

    async def _fast(
        self, connection: Connection, statements: Statements, records: Sequence[Record]
    ) -> Sequence[MemberVote] | None:
        if not records:
            return []
        jobs = [record.job for record in records]
        texts = await fast_texts(statements, self._book.replica_set, jobs)
        if texts is None:
            return None
        outbox = await outbox_text(statements, self._book.replica_set, [record.encoded for record in records])
        sent = await send_fast(self._book.session, connection, statements, ["BEGIN", *texts, outbox, "COMMIT"])
        return fast_votes(jobs, sent[1]) if sent is not None else None

    async def _slow(
        self, connection: Connection, statements: Statements, records: Sequence[Record]
    ) -> Sequence[MemberVote]:
        while True:
            slow = SlowPath(self._book.session, connection, statements, self._book.replica_set)
            written = await slow.write_down([record.job for record in records])
            await connection.execute("BEGIN")
            votes = [await slow.run(member) for member in written]
            if not await slow.is_outdated():
                break
        accepted = [record.encoded for record, vote in zip(records, votes, strict=True) if vote.excluded is None]
        outbox = [await outbox_text(statements, self._book.replica_set, accepted)] if accepted else []
        await connection.execute(";".join([*outbox, "COMMIT"]))
        return votes

    async def _with_long(
        self, connection: Connection, records: Sequence[Record], votes: Iterator[MemberVote]
    ) -> Sequence[MemberVote]:
        """The votes, and those against members that are too long. One that repeats what is committed is a duplicate:
        what would be published now may be longer than it was then."""
        told = []
        for job, encoded in records:
            if len(encoded) <= LOCAL_TX_BYTES_MAX:
                told.append(next(votes))
                continue
            known = await why_known(connection, self._book.replica_set, job)
            told.append(MemberVote(job.member.tx, excluded=known or too_large(len(encoded))))
        return told
