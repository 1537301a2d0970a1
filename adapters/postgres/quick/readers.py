"""Which quick read goes to which session: identities share the connections that `Readers` shares among them.

Each identity has a queue and holds some sessions while it has reads. Reads that wait are sent in groups, evenly over
its sessions. Where other identities wait for a connection, a session goes to them after the group that it works at.
A read that runs for long gets its session alone: those behind it are sent again over another one.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import asyncpg

from adapters.postgres.apply.reading import Readers
from adapters.postgres.quick.session import QuickRead, QuickSession
from adapters.postgres.quick.statements import QuickStatement, QuickStatements
from tops.model.errors import TopsError

SESSIONS_MAX = 4  # of one identity, besides those that slow reads have alone
GROUP_MAX = 16  # reads that share a Sync
GROUPS_MAX = 2  # on the way on one session
LOOK_S = 0.025  # between two looks whether a read runs for long
SLOW_S = 0.05  # a read that runs for so long gets its session alone
SLOW_FOR_S = 5.0  # and so do those of its statement, for so long
IDLE_S = 1.0  # until a session that is not in use is made clean
# All reads of a group see one snapshot, as they would one by one in transactions of their own.
_SETTINGS = {"default_transaction_isolation": "repeatable read"}


class _Lane:
    """What one identity has."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.waiting: deque[QuickRead] = deque()
        self.sessions: list[QuickSession] = []
        self.acquiring = 0  # sessions that are being opened for it, or waited for


class QuickReads:
    """The quick reads of one database, beside the readers whose connections they count among."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._statements = QuickStatements()
        self._lanes: dict[str, _Lane] = {}
        self._held: dict[QuickSession, _Lane] = {}
        self._idle: list[QuickSession] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def describe(self, sql: str, who: str) -> QuickStatement | None:
        """The statement, to be used in reads; None if it is not quick. Raises TopsError when nobody can know now."""
        if (known := self._statements.get(sql)) is not None:
            return known
        try:
            async with self._readers.client_transaction(who) as connection:
                return await self._statements.describe(connection, sql)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            return None  # whoever runs it is told why

    def drop(self, statement: QuickStatement) -> None:
        self._statements.drop(statement)

    def submit(self, who: str, reads: Sequence[QuickRead]) -> None:
        """Each read's `done` is called later. Raises QueriesLeft."""
        self._readers.orphans.check(who)
        lane = self._lanes.get(who)
        if lane is None:
            lane = self._lanes[who] = _Lane(who)
        lane.waiting.extend(reads)
        self._schedule(lane)

    def close(self) -> None:
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
        for task in self._tasks:
            task.cancel()
        for session in [*self._held, *self._idle]:
            session.close()
        for lane in list(self._lanes.values()):
            _decline(lane)

    # ------------------------------------------------------------------------------------------------------ scheduling

    def _schedule(self, lane: _Lane) -> None:
        waiting = lane.waiting
        while waiting:
            session = self._next_session(lane)
            if session is None:
                return
            self._send(lane, session)
        if not lane.sessions and not lane.acquiring:
            self._lanes.pop(lane.who, None)

    def _next_session(self, lane: _Lane) -> QuickSession | None:
        """One without work, else another one if the identity may have more, else one with little."""
        best: QuickSession | None = None
        for session in lane.sessions:
            if not session.is_alone and session.groups < (best.groups if best is not None else GROUPS_MAX):
                best = session
        if best is not None and not best.groups:
            return best
        shared = lane.acquiring + sum(not session.is_alone for session in lane.sessions)
        if shared < SESSIONS_MAX and (another := self._acquire(lane)) is not None:
            return another
        if best is None or self._readers.turns.is_contended:
            return None
        return best

    def _send(self, lane: _Lane, session: QuickSession) -> None:
        waiting, now = lane.waiting, time.monotonic()
        count = min(GROUP_MAX, -(-len(waiting) // SESSIONS_MAX))
        reads: list[QuickRead] = []
        while waiting and len(reads) < count:
            if waiting[0].statement.slow_until > now:
                if not reads and not session.groups:
                    session.is_alone = True
                    reads.append(waiting.popleft())
                break
            reads.append(waiting.popleft())
        if reads:
            session.send(reads, lane.who)
            self._look_later(LOOK_S)
        else:
            session.is_alone = True  # what it works at comes to its end first, then the slow read has it

    def _acquire(self, lane: _Lane) -> QuickSession | None:
        """A session now if there is one; else it is opened, or waited for, unless one is already."""
        who = lane.who
        if self._readers.turns.try_take(who):
            if self._idle:
                index = next((i for i, session in enumerate(self._idle) if session.owner == who), -1)
                return self._hold(lane, self._idle.pop(index))
            self._spawn(lane, taken=True)
        elif not lane.sessions and not lane.acquiring:
            self._spawn(lane, taken=False)
        return None

    def _hold(self, lane: _Lane, session: QuickSession) -> QuickSession:
        lane.sessions.append(session)
        self._held[session] = lane
        return session

    def _spawn(self, lane: _Lane, *, taken: bool) -> None:
        lane.acquiring += 1
        task = asyncio.ensure_future(self._open(lane, taken=taken))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, lane: _Lane, *, taken: bool) -> None:
        turns, session = self._readers.turns, None
        try:
            if not taken:
                await turns.take(lane.who)
                taken = True
            session = self._idle.pop() if self._idle else await self._connected()
        except (TopsError, OSError):
            pass
        finally:
            lane.acquiring -= 1
            if session is None and taken:
                turns.give_back(lane.who)
        if session is not None:
            self._hold(lane, session)
            self._schedule(lane)
            self._release_unused(lane)
        elif not lane.sessions and not lane.acquiring:
            _decline(lane)
            self._lanes.pop(lane.who, None)

    async def _connected(self) -> QuickSession:
        return QuickSession(await self._readers.connect(_SETTINGS), self._answered, self._closed)

    def _answered(self, session: QuickSession, not_carried_out: Sequence[QuickRead]) -> None:
        lane = self._held.get(session)
        if lane is None:
            return  # it was made clean
        lane.waiting.extendleft(reversed(not_carried_out))
        if not session.groups and (self._readers.turns.is_contended or not lane.waiting):
            self._release(lane, session)
        if lane.waiting:
            self._schedule(lane)

    def _release_unused(self, lane: _Lane) -> None:
        for session in [session for session in lane.sessions if not session.groups]:
            self._release(lane, session)

    def _release(self, lane: _Lane, session: QuickSession) -> None:
        lane.sessions.remove(session)
        del self._held[session]
        session.idle_since = time.monotonic()
        self._idle.append(session)
        self._readers.turns.give_back(lane.who)
        if not lane.waiting and not lane.sessions and not lane.acquiring:
            self._lanes.pop(lane.who, None)

    def _closed(self, session: QuickSession) -> None:
        """Its backend may still run: the identity pays for it until it has ended."""
        lane = self._held.pop(session, None)
        if lane is None:
            if session in self._idle:
                self._idle.remove(session)
            return
        lane.sessions.remove(session)
        who, turns = lane.who, self._readers.turns
        if self._is_closed:
            return
        self._readers.orphans.watch(session.pid, who, lambda: turns.give_back(who))
        asyncio.get_running_loop().call_soon(self._schedule, lane)

    # --------------------------------------------------------------------------------------------------------- looking

    def _look_later(self, after_s: float) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        self._looking = None
        now = time.monotonic()
        for session, lane in list(self._held.items()):
            running = session.running()
            if session.running_s(now) > self._readers.options.command_timeout_s:
                session.close()
            elif running is not None and session.running_s(now) > SLOW_S:
                running.statement.slow_until = now + SLOW_FOR_S
                if not session.is_alone:
                    session.is_alone = True
                    lane.waiting.extendleft(reversed([read for read in session.take_back() if read is not running]))
                    self._schedule(lane)
        if self._held:
            self._look_later(LOOK_S)
        elif any(session.is_dirty for session in self._idle):
            for session in self._idle:
                if not session.groups and now - session.idle_since > IDLE_S:
                    session.clean()
            self._look_later(IDLE_S / 2)


def _decline(lane: _Lane) -> None:
    """The other road tells what is wrong, or finds another replica."""
    while lane.waiting:
        lane.waiting.popleft().end(None)
