"""Runs blocking work beside the event loop, and notices when a replica stops answering meanwhile."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from replication.tables.endpoints import Barrier

T = TypeVar("T")

PULSE_S = 2.0
MEMORY_EVERY_S = 0.25


async def in_thread(work: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, on a thread that does not keep the program alive: reading a stalled server never ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(action: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else action())

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            settle(lambda: done.set_exception(failure))
        else:
            settle(lambda: done.set_result(result))

    threading.Thread(target=run, daemon=True, name="tops-divergence").start()
    return await done


async def while_alive(barrier: Barrier, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of the work, or the barrier's failure as soon as one of its replicas is gone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_watch(barrier))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        await _end(watching)
        await _end(working)


async def _watch(barrier: Barrier) -> None:
    while True:
        await asyncio.sleep(PULSE_S)
        await barrier.alive()


async def _end(task: Awaitable[Any]) -> None:
    future = asyncio.ensure_future(task)
    if not future.done():
        future.cancel()
        with suppress(asyncio.CancelledError):
            await future


class MemoryWatch:
    """The largest memory of this program, its JVM and its Python workers together, sampled; databases do not count."""

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tops-memory")

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        own = psutil.Process()
        while True:
            total = own.memory_info().rss
            for child in own.children(recursive=True):
                with suppress(psutil.Error):
                    if child.name().startswith(("java", "python")):
                        total += child.memory_info().rss
            self.peak_mb = max(self.peak_mb, total / 2**20)
            if self._end.wait(MEMORY_EVERY_S):
                return
