"""Runs pieces of work one after the other in one task: a task for each piece would cost more than the piece."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("tops")


class InTurn:
    """Runs coroutines one after the other, in the order in which they were put."""

    def __init__(self) -> None:
        self._waiting: deque[Coroutine[Any, Any, object]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[None] | None = None  # awaited by the task while the queue is empty
        self._stopped = False

    def put(self, piece: Coroutine[Any, Any, object]) -> None:
        """Queue a coroutine; a caller that needs its result passes it on inside the coroutine."""
        self._waiting.append(piece)
        if self._idle is not None:
            if not self._idle.done():
                self._idle.set_result(None)
        elif self._task is None:
            self._stopped = False
            self._task = asyncio.get_running_loop().create_task(self._work())

    def stop(self) -> None:
        """Cancel the running coroutine, and drop the queued ones."""
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
                    await asyncio.sleep(0)  # tasks that waited for this piece continue before the next one begins
            self._idle = loop.create_future()
            await self._idle
            self._idle = None

    async def _do(self, piece: Coroutine[Any, Any, object]) -> None:
        try:
            await piece
        except asyncio.CancelledError:
            if self._stopped:
                raise  # otherwise only the piece was cancelled
        except Exception:
            log.exception("a piece of work ended with an unhandled error")
