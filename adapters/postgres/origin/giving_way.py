"""Apply wins: an execution that the replica's own apply waits for is cancelled, and so is one that takes too long.

Row locks of an origin's transaction last as long as its statements run. A vote or an entry of the log that waits for
one of them holds up the whole set, so it is looked for while statements run, by the agent's second session. The
server's own bound is for one statement; a transaction can have many.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import asyncpg

LOOK_S = 0.25  # between two looks; shorter executions are never asked about
_IS_WAITED_FOR = """
select count(*) > 0 from pg_stat_activity
 where usename = session_user and application_name like 'tops-agent %' and datname = current_database()
   and wait_event_type = 'Lock' and $1 = any(pg_blocking_pids(pid))
"""


class Yielded:
    """Whether the execution was cancelled for apply, and not for taking too long; until when it may take."""

    def __init__(self) -> None:
        self.happened = False
        self.deadline = math.inf
        self.cancelled_late = False  # the cancellation may reach a statement that came after the late one

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline


@asynccontextmanager
async def giving_way(agent: asyncpg.Connection, pid: int) -> AsyncIterator[Yielded]:
    """While the block runs, cancel what the backend `pid` does if apply waits for it or its deadline is over."""
    yielded = Yielded()

    ended = asyncio.Event()

    async def watch() -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), LOOK_S)
                return
            if yielded.is_late:
                yielded.cancelled_late = True
                await agent.execute("select pg_cancel_backend($1)", pid)
            elif await agent.fetchval(_IS_WAITED_FOR, pid):
                yielded.happened = True  # before its statement fails
                await agent.execute("select pg_cancel_backend($1)", pid)

    watching = asyncio.ensure_future(watch())
    try:
        yield yielded
    finally:
        ended.set()
        await watching  # never half-way: the session is used for other things next
