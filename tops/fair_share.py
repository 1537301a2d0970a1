"""Slots that several identities share: none of them takes so many that the others get none."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairShare:
    """`count` slots of which one identity holds at most `share`. Identities that wait are served in turn, each of them
    in the order of its requests."""

    def __init__(self, count: int, share: int) -> None:
        self._free, self._share = count, share
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the identity whose turn is next comes first

    @asynccontextmanager
    async def slot(self, who: str) -> AsyncIterator[None]:
        await self._take(who)
        try:
            yield
        finally:
            self._give_back(who)

    async def _take(self, who: str) -> None:
        if self._free > 0 and self._held[who] < self._share and who not in self._waiting:
            self._grant(who)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was granted in the same event-loop iteration
                self._give_back(who)
            raise

    def _grant(self, who: str) -> None:
        self._free -= 1
        self._held[who] += 1

    def _give_back(self, who: str) -> None:
        self._free += 1
        self._held[who] -= 1
        if not self._held[who]:
            del self._held[who]
        for waiting in list(self._waiting):
            if not self._free:
                break
            if self._held[waiting] < self._share:
                self._serve(waiting)

    def _serve(self, who: str) -> None:
        """The first request of the identity that still waits; the identity goes to the end of the line."""
        turns = self._waiting.pop(who)
        while turns:
            turn = turns.popleft()
            if not turn.done():  # done: its caller was cancelled
                self._grant(who)
                turn.set_result(None)
                break
        if turns:
            self._waiting[who] = turns
