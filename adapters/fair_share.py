"""Slots that several identities share: none of them takes so many that the others get none."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairShare:
    """`count` slots of which one identity holds at most `share`. Where several identities share them, the last quarter
    is for those that hold none, so that two greedy ones leave some. Identities that wait are served in turn, each of
    them in the order of its requests."""

    def __init__(self, count: int, share: int) -> None:
        self._free, self._share = count, share
        self._for_newcomers = count // 4 if share < count else 0
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the identity whose turn is next comes first

    @asynccontextmanager
    async def slot(self, who: str) -> AsyncIterator[None]:
        await self.take(who)
        try:
            yield
        finally:
            self.give_back(who)

    @property
    def is_contended(self) -> bool:
        """Whether requests wait for a slot."""
        return bool(self._waiting)

    def try_take(self, who: str) -> bool:
        """As `take`, if that need not wait; else nothing happens."""
        if who in self._waiting or not self._may_have(who):
            return False
        self._grant(who)
        return True

    async def take(self, who: str) -> None:
        """For a holder that does not end with a block; `give_back` ends it."""
        if self.try_take(who):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # it was granted in the same event-loop iteration
                self.give_back(who)
            raise

    def fail_waiting(self, who: str, error: Exception) -> None:
        """End the waiting of an identity's requests with an error."""
        for turn in self._waiting.pop(who, ()):
            if not turn.done():
                turn.set_exception(error)

    def _may_have(self, who: str) -> bool:
        held = self._held[who]
        return self._free > (self._for_newcomers if held else 0) and held < self._share

    def _grant(self, who: str) -> None:
        self._free -= 1
        self._held[who] += 1

    def give_back(self, who: str) -> None:
        self._free += 1
        self._held[who] -= 1
        if not self._held[who]:
            del self._held[who]
        for waiting in list(self._waiting):
            if not self._free:
                break
            if self._may_have(waiting):
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
