"""A subscription without a participant of its own: events wait until the application iterates over it."""

import asyncio
from collections import deque
from collections.abc import Awaitable

from tops.model.transactions import Scope
from tops.runtime.participants import Participant, Received


class Collector(Participant):
    """Keeps events for iteration. A durable event is acknowledged when the iteration requests the next one."""

    scope = Scope.NON_TRANSACTIONAL

    def __init__(self) -> None:
        super().__init__()
        self._events: deque[tuple[Received, asyncio.Future[None] | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None

    @property
    def backlog(self) -> int:
        return len(self._events)

    def on_notify(self, event: Received) -> Awaitable[None] | None:
        taken = None if event.number is None else asyncio.get_running_loop().create_future()
        self._events.append((event, taken))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return taken

    def __aiter__(self) -> "Collector":
        return self

    async def __anext__(self) -> Received:
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event, self._taken = self._events.popleft()
        return event
