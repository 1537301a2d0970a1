"""When a replica that follows the log applies what has come: at once if somebody waits, else in few transactions.

A transaction costs a server and its agent much, a row in it little. So a replica that nobody waits for leaves time for
more to come, and takes nothing from those beside it that somebody does wait for.
"""

import asyncio
import time
from contextlib import suppress

GATHER_S = 0.05  # at most so long after one transaction the next one begins
ASKED_LATELY_S = 0.25  # who was asked will be asked again: its entries are not kept waiting for the question


class Pace:
    """One replica's; `gather_s` is 0 for one whose vote others wait for."""

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._asked_at = float("-inf")
        self._asked = asyncio.Event()

    def hurry(self) -> None:
        """Somebody waits for what was logged last."""
        self._asked_at = time.monotonic()
        self._asked.set()

    async def gathered(self, last: float) -> None:
        """Returns when it is time to apply, the last time having been `last`."""
        now = time.monotonic()
        left_s = last + self._gather_s - now
        if left_s <= 0 or now - self._asked_at < ASKED_LATELY_S:
            return
        self._asked.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._asked.wait()
