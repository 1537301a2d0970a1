"""Takes quick reads of clients to the database, with the rights, quotas and positions of any other read.

What needs more than a statement on a session (a position to wait for, a materialized view, a large result) is handed
back to the client, which asks again as for any other request."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Protocol

import asyncpg

from adapters.postgres.apply.reading import read_error
from adapters.postgres.quick import QuickRead, QuickReads, QuickStatement
from replication.rpc import calls
from replication.rpc.calls import Denied, Failed
from replication.rpc.conversation import UNDER_WAY_MAX
from replication.rpc.direct import CHOSEN, SETTLED, QuickRequest
from replication.rpc.rights import RequestGuard
from tops.model.errors import LimitExceeded, PermissionDenied, TopsError
from tops.protocol.messages import Sender

_READ = calls.Read(sql="", args=b"")  # what the rights are asked for
# Codes of a statement that was analysed for other tables than there are now.
_CHANGED = ("0A", "26", "42")


class Position(Protocol):
    """Where the replica is."""

    reached: int
    prepared: set[int]


class Views(Protocol):
    """The materialized views, which each replica shows as they are there."""

    @property
    def is_due(self) -> bool: ...

    def are_read_by(self, sql: str) -> bool | None: ...

    async def look(self) -> None: ...


class Client(Protocol):
    """Whose reads they are, and where the results go."""

    sender: Sender

    def rows(self, read: int, rows: bytes) -> None: ...

    def failed(self, read: int, error: Failed | Denied) -> None: ...

    def again(self, read: int) -> None: ...

    def not_quick(self, statement: int) -> None: ...

    def dropped(self, statement: int) -> None: ...


class _Read(QuickRead):
    __slots__ = ("client", "desk", "number", "own_statement")

    def __init__(
        self,
        desk: "QuickDesk",
        client: Client,
        number: int,
        own_statement: int,
        statement: QuickStatement,
        parameters: bytes,
    ) -> None:
        super().__init__(statement, parameters)
        self.desk, self.client, self.number, self.own_statement = desk, client, number, own_statement

    def done(self, result: bytes | asyncpg.PostgresError | None) -> None:
        self.desk.done(self, result)


class QuickDesk:
    """The quick reads of one replica."""

    def __init__(
        self,
        where: str,
        quick: QuickReads,
        guard: RequestGuard,
        position: Position,
        ready: Callable[[calls.Read], Awaitable[None]],
        check_current: Callable[[], None],
        views: Views,
    ) -> None:
        """`ready` returns when the read can be done here; `check_current` raises while nothing can."""
        self._where, self._quick, self._guard, self._position = where, quick, guard, position
        self._ready, self._check_current, self._views = ready, check_current, views
        self._under_way: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, client: Client, reads: list[QuickRequest], statements: dict[int, QuickStatement]) -> None:
        """Each read gets one response."""
        sender = client.sender
        who = sender.accountable
        try:
            self._guard.check(sender, _READ)
            self._check_current()
            self._count(sender, len(reads))
        except PermissionDenied as denied:
            _reject(client, reads, Denied.because(denied))
            return
        except TopsError as error:
            _reject(client, reads, Failed.because(error))
            return
        if self._views.is_due:
            self._spawn(self._look_at_views())
        at = self._position
        reached, settled = at.reached, not at.prepared
        now: list[QuickRead] = []
        for number, own_statement, parameters, at_least, wait_s, flags in reads:
            statement = statements.get(own_statement)
            if statement is None or statement.is_dropped:
                client.dropped(own_statement)
                self._again(client, who, number)
                continue
            reads_view = False if flags & CHOSEN else self._views.are_read_by(statement.sql)
            if statement.is_large or reads_view:
                client.not_quick(own_statement)
            if statement.is_large or reads_view or reads_view is None:
                self._again(client, who, number)
                continue
            read = _Read(self, client, number, own_statement, statement, parameters)
            if at_least <= reached and (settled or not flags & SETTLED):
                now.append(read)
            else:
                self._spawn(self._wait(read, at_least, wait_s, is_settled=bool(flags & SETTLED)))
        if now:
            self._submit(who, now)

    async def _look_at_views(self) -> None:
        with suppress(TopsError):
            await self._views.look()

    def _count(self, sender: Sender, count: int) -> None:
        who = sender.accountable
        if self._under_way[who] + count > UNDER_WAY_MAX:
            error = LimitExceeded(
                f"{who} has {self._under_way[who]} reads under way at {self._where}, and the quota is {UNDER_WAY_MAX}: "
                "wait for responses first"
            )
            self._guard.note_over_quota(sender, _READ, error)
            raise error
        self._under_way[who] += count

    def _submit(self, who: str, reads: list[QuickRead]) -> None:
        try:
            self._quick.submit(who, reads)
        except TopsError as error:
            for read in reads:
                assert isinstance(read, _Read)
                self._uncount(who)
                read.client.failed(read.number, Failed.because(error))

    async def _wait(self, read: _Read, at_least: int, wait_s: float, *, is_settled: bool) -> None:
        """For the position, as any other read."""
        who = read.client.sender.accountable
        try:
            if not 0 <= wait_s < math.inf:
                self._again(read.client, who, read.number)
                return
            await self._ready(calls.Read(sql="", args=b"", at_least=at_least, wait_s=wait_s, settled=is_settled))
        except TopsError as error:
            self._uncount(who)
            read.client.failed(read.number, Failed.because(error))
        except BaseException:
            self._again(read.client, who, read.number)
            raise
        else:
            self._submit(who, [read])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def done(self, read: _Read, result: bytes | asyncpg.PostgresError | None) -> None:
        """A read has ended in the database."""
        client, who = read.client, read.client.sender.accountable
        if type(result) is bytes:
            self._uncount(who)
            client.rows(read.number, result)
            return
        if isinstance(result, asyncpg.PostgresError) and not (result.sqlstate or "").startswith(_CHANGED):
            self._uncount(who)
            client.failed(read.number, Failed.because(read_error(self._where, result)))
            return
        if result is not None:
            self._quick.drop(read.statement)
            client.dropped(read.own_statement)
        elif read.statement.is_large:
            client.not_quick(read.own_statement)
        self._again(client, who, read.number)

    def _again(self, client: Client, who: str, number: int) -> None:
        self._uncount(who)
        client.again(number)

    def _uncount(self, who: str) -> None:
        self._under_way[who] -= 1
        if not self._under_way[who]:
            del self._under_way[who]

    async def describe(self, sender: Sender, sql: str) -> QuickStatement | None:
        """None if the statement is not quick, or if the sender may not read: then its read says so."""
        try:
            self._guard.check(sender, _READ)
            self._check_current()
            return await self._quick.describe(sql, sender.accountable)
        except TopsError:
            return None

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


def _reject(client: Client, reads: Iterable[QuickRequest], error: Failed | Denied) -> None:
    for read in reads:
        client.failed(read[0], error)
