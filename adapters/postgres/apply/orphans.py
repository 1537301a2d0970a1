"""Backends that go on after their connection was given up.

Some functions of PostgreSQL do not look whether they were cancelled (`strpos`, `LIKE` and `translate` on long texts,
distances of geometric types): neither a time-out nor pg_terminate_backend ends them. Such a backend is still paid for
by the client whose query it runs, until it is gone.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import asyncpg

from adapters.postgres.apply.session import Options, connect
from tops.model.errors import Retry, TopsError

ORPHANS_MAX = 4  # of one identity; with so many its requests are rejected
_GRACE_S = 1.0  # a backend that was cancelled usually ends in milliseconds
_LOOK_S = 0.02  # until the first look; each further one takes twice as long, up to _LOOK_MAX_S
_LOOK_MAX_S = 1.0
_STILL_THERE = "select pid from pg_stat_activity where pid = any($1::int[])"


class QueriesLeft(TopsError):
    """An identity's earlier queries still run in the database, although they were cancelled: it gets no further one."""

    code = "queries-left"
    retry = Retry.SAFE

    def __init__(self, where: str, who: str, count: int) -> None:
        self.where, self.who, self.count = where, who, count
        super().__init__(
            f"{where}: {count} earlier queries of {who or 'this client'} were cancelled and do not end, which is the "
            "limit: wait until they end, and avoid functions that work on very long values"
        )


@dataclass(slots=True)
class _Orphan:
    who: str
    since: float
    gone: Callable[[], None]


class Orphans:
    """Watches backends through the agent's login until they end."""

    def __init__(self, agent_dsn: str, where: str, options: Options) -> None:
        self._dsn, self._where, self._options = agent_dsn, where, options
        self._left: dict[int, _Orphan] = {}  # by process id
        self._watching: asyncio.Task[None] | None = None
        self.on_limit: Callable[[str, QueriesLeft], None] = lambda who, error: None

    def watch(self, pid: int, who: str, gone: Callable[[], None] = lambda: None) -> None:
        """The connection to `pid` was closed; `gone` is called when its backend has ended."""
        if pid in self._left:  # the server has used the number again, so the former one has ended
            self._left.pop(pid).gone()
        self._left[pid] = _Orphan(who, time.monotonic(), gone)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())

    def check(self, who: str) -> None:
        """Raises QueriesLeft if the identity has too many backends that do not end."""
        if self._left and (error := self._problem(who)) is not None:
            raise error

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def _problem(self, who: str) -> QueriesLeft | None:
        late = time.monotonic() - _GRACE_S
        count = sum(orphan.who == who and orphan.since < late for orphan in self._left.values())
        return QueriesLeft(self._where, who, count) if who and count >= ORPHANS_MAX else None

    async def _watch(self) -> None:
        pause_s = _LOOK_S
        while self._left:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MAX_S)
            try:
                await self._look()
            except (TopsError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                continue  # nobody can use the database either; it is asked again
            for who in {orphan.who for orphan in self._left.values()}:
                if (error := self._problem(who)) is not None:
                    self.on_limit(who, error)

    async def _look(self) -> None:
        asked = list(self._left.items())
        connection = await connect(self._dsn, self._where, "tops-orphans", self._options)
        try:
            there = {row["pid"] for row in await connection.fetch(_STILL_THERE, [pid for pid, _ in asked])}
        finally:
            connection.terminate()
        for pid, orphan in asked:
            if pid not in there and self._left.get(pid) is orphan:
                del self._left[pid]
                orphan.gone()
