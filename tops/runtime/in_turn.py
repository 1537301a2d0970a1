"""Work that is done piece by piece, by one task that stays: a task for each piece would cost more than the piece."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("tops")


class InTurn:
    """Carries out coroutines one after the other, in the order in which they were put."""

    def __init__(self) -> None:
        self._waiting: deque[Coroutine[Any, Any, object]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[None] | None = None  # what the task waits for while there is nothing to do
        self._stopped = False

    def put(self, piece: Coroutine[Any, Any, object]) -> None:
        """Have it done when its turn comes; whoever wants to know its end sees to that inside it."""
        self._waiting.append(piece)
        if self._idle is not None:
            if not self._idle.done():
                self._idle.set_result(None)
        elif self._task is None:
            self._stopped = False
            self._task = asyncio.get_running_loop().create_task(self._work())

    def stop(self) -> None:
        """What is being done is cancelled, what waits is not begun."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
        self._task = self._idle = None
        for piece in self._waiting:
            piece.close()
        self._waiting.clear()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._waiting:
                await self._do(self._waiting.popleft())
                if self._waiting:
                    await asyncio.sleep(0)  # whoever waited for this one goes on before the next begins
            self._idle = loop.create_future()
            await self._idle
            self._idle = None

    async def _do(self, piece: Coroutine[Any, Any, object]) -> None:
        try:
            await piece
        except asyncio.CancelledError:
            if self._stopped:
                raise  # else it was the piece's own affair
        except Exception:
            log.exception("a piece of work ended with an error that nobody took")
