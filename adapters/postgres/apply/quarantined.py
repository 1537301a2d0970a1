"""A transaction that was set aside, tried once more outside the log: here alone, and once."""

import time

from adapters.changes import Member
from adapters.postgres.apply.book import Book
from adapters.postgres.apply.progress import Job
from adapters.postgres.apply.session import Connection
from adapters.postgres.apply.statements import Statements
from adapters.postgres.apply.transactions import SlowPath
from adapters.resource import MemberVote, Why


async def apply_quarantined(book: Book, member: Member, delete_sql: str) -> MemberVote:
    """Carry out the member and, in the same transaction, the statement that forgets it (with the id as `$1`)."""

    async def work(connection: Connection, statements: Statements) -> MemberVote:
        slow = SlowPath(book.session, connection, statements, book.replica_set)
        (written,) = await slow.write_down([Job(0, time.time_ns() // 1_000_000, member)])
        await connection.execute("BEGIN")
        vote = await slow.run(written)
        if vote.excluded is not None and vote.excluded.why is not Why.DUPLICATE:
            await connection.execute("ROLLBACK")
            return vote
        await connection.execute(delete_sql, member.tx)
        await connection.execute("COMMIT")
        return MemberVote(tx=member.tx, rows=vote.rows)

    return await book.run(work, f"retrying transaction {member.tx}")
