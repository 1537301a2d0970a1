"""The journal as the asyncio runtime uses it: an append does not wait, and one sync makes many of them durable.

The event loop's thread queues records and is notified when they are durable; one writer thread owns the files. Records
that are appended during a sync form the next batch, so batches grow with the load.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tops.journal.disk import Disk
from tops.journal.format import RECORD_BYTES_MAX
from tops.journal.reader import read_records
from tops.journal.store import JournalOptions, JournalStatistics, Store
from tops.journal.writer import Job, Writer
from tops.model.errors import JournalClosed, JournalFailed, NotInJournal, RecordTooLarge

UNHURRIED_S = 0.05


class Journal:
    """An append-only log of byte strings, numbered without gaps; what it has acknowledged survives a crash.

    Use it from one event loop. After a failed write or sync nothing more is acknowledged, every call raises
    JournalFailed, and the process must stop: only a new open can tell what is on disk.
    """

    def __init__(self, store: Store) -> None:
        """Use `Journal.open` to get one."""
        self._store = store
        self._writer = Writer(
            store,
            on_durable=lambda sequence: self._call_soon(self._durable, sequence),
            on_failure=lambda failure: self._call_soon(self._fail, failure),
        )
        self.recovery = store.recovery
        self._next_sequence = self._durable_sequence = store.next_sequence
        self._wake_is_scheduled = False
        self._wake_later: asyncio.TimerHandle | None = None
        self._waiting: list[tuple[int, int, Callable[[], object]]] = []  # a heap: sequence, order of arrival, callback
        self._arrivals = 0
        self._futures: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: JournalFailed | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: Path,
        options: JournalOptions | None = None,
        now: Callable[[], float] = time.time,
        disk: Disk | None = None,
    ) -> Self:
        """Opens or creates the journal and checks all of it; `recovery` has the result, `read` returns the records.

        Blocks while it reads. Raises JournalCorrupt or JournalLocked, and then has changed nothing.
        """
        return cls(Store(directory, options or JournalOptions(), now, disk or Disk()))

    @property
    def first_sequence(self) -> int:
        """The number of the oldest retained record; equal to `next_sequence` in an empty journal."""
        return self._store.first_sequence

    @property
    def next_sequence(self) -> int:
        """The number that the next appended record gets."""
        return self._next_sequence

    @property
    def durable_sequence(self) -> int:
        """Every record below this number is on disk."""
        return self._durable_sequence

    @property
    def size_bytes(self) -> int:
        """The size of the segments on disk."""
        return self._store.size_bytes

    @property
    def queued(self) -> int:
        """Number of records that wait for the writer; it grows when a caller is faster than its disk."""
        return len(self._writer)

    @property
    def statistics(self) -> JournalStatistics:
        return replace(self._store.statistics)

    def append(self, record: bytes, *, soon: bool = True) -> int:
        """Queues a record and returns its number; appends of one event-loop iteration share a group commit.

        A record that nothing waits for need not be written `soon`: it is written with the next urgent one, or after
        `UNHURRIED_S`.
        """
        self._check_usable()
        _check_size(record)
        sequence = self._next_sequence
        self._next_sequence += 1
        if soon:
            self._enqueue(record)
        else:
            self._writer.put(record)
            if self._wake_later is None:
                self._wake_later = self._running_loop().call_later(UNHURRIED_S, self._wake)
        return sequence

    def when_durable(self, sequence: int, callback: Callable[[], object]) -> None:
        """Calls back, in the loop, once that record is on disk: by number, then in the order of these calls.

        A journal that fails first never calls back; `failed` returns then.
        """
        self._check_usable()
        self._arrivals += 1
        heapq.heappush(self._waiting, (sequence, self._arrivals, callback))
        if sequence < self._durable_sequence:
            self._running_loop().call_soon(self._call_back)

    async def sync(self) -> None:
        """Returns once everything appended so far is on disk."""
        self._check_usable()
        if self._next_sequence == self._durable_sequence:
            return
        self._wake_soon()
        future = self._future()
        self.when_durable(self._next_sequence - 1, lambda: _resolve(future, None))
        await future

    async def failed(self) -> JournalFailed:
        """Waits for the journal to fail: a node stops when this returns. Raises JournalClosed when it is closed."""
        if self._failure is None:
            try:
                await self._future()
            except JournalFailed as failure:
                return failure
        assert self._failure is not None
        return self._failure

    def kept_from(self, sequence: int) -> int:
        """The first record that `drop_before` would leave."""
        return self._store.kept_from(sequence)

    def within(self, size_bytes: int) -> int:
        """The first record of the newest segments that take no more than this on disk."""
        return self._store.within(size_bytes)

    async def drop_before(self, sequence: int) -> int:
        """Deletes whole segments of records below `sequence`; returns the number of deleted segments."""
        self._check_usable()
        return int(await self._run(lambda: self._store.drop_before(sequence)))

    async def rewrite(self, records: Sequence[bytes]) -> int:
        """Replaces every record appended before this call by these, atomically; returns the first one's number.

        The caller passes its whole state as records; later appends follow them.
        """
        self._check_usable()
        for record in records:
            _check_size(record)
        first = self._next_sequence
        self._next_sequence += len(records)
        await self._run(lambda: self._store.rewrite(records))
        return first

    def read(self, from_sequence: int) -> Iterator[tuple[int, bytes]]:
        """The durable records from that number on, checked, a batch in memory at a time; ends at the last of them.

        Reads files as it is iterated, from any thread. Raises NotInJournal for a number that is truncated or not
        assigned yet, also when a deletion or a rewrite overtakes the reader, and JournalCorrupt for damage.
        """
        if not self.first_sequence <= from_sequence <= self._next_sequence:
            raise NotInJournal(str(self._store.directory), from_sequence, self.first_sequence, self._next_sequence)
        return read_records(str(self._store.directory), lambda: self._store.segments, from_sequence)

    async def close(self) -> None:
        """Writes and syncs what was appended, then releases files and lock; after a failure it only releases.

        Raises JournalFailed if the last records could not be made durable.
        """
        if self._closed:
            return
        had_failed, self._closed = self._failure is not None, True
        await asyncio.to_thread(self._writer.join)
        # Callbacks that the writer scheduled before it ended run before this continues: the result of to_thread was
        # scheduled later.
        self._store.close()
        self._end_waiting(JournalClosed(str(self._store.directory)))
        if self._failure is not None and not had_failed:
            raise self._failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise JournalFailed(self._failure.directory, self._failure.problem) from self._failure
        if self._closed:
            raise JournalClosed(str(self._store.directory))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _future(self) -> asyncio.Future[Any]:
        """A future that fails with the journal."""
        future = self._running_loop().create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    async def _run(self, work: Callable[[], object]) -> Any:
        future = self._future()
        self._enqueue(Job(work, lambda result: self._call_soon(_resolve, future, result)))
        return await future

    def _enqueue(self, item: bytes | Job) -> None:
        self._writer.put(item)
        self._wake_soon()

    def _wake_soon(self) -> None:
        if not self._wake_is_scheduled:
            # Woken at the end of the event-loop iteration, the writer finds all that it appended: one sync for all.
            self._wake_is_scheduled = True
            self._running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._wake_is_scheduled = False
        if self._wake_later is not None:
            self._wake_later.cancel()
            self._wake_later = None
        if self._closed or self._failure is not None:
            return
        if self._writer.commit_here():
            self._durable(self._store.next_sequence)
        else:
            self._writer.wake()

    def _call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Run a callback in the loop's thread, called from the writer's; a closed loop has no waiters any more."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _durable(self, sequence: int) -> None:
        self._durable_sequence = sequence
        self._call_back()

    def _call_back(self) -> None:
        while self._waiting and self._waiting[0][0] < self._durable_sequence:
            _, _, callback = heapq.heappop(self._waiting)
            try:
                callback()
            except Exception as error:
                # An error in one callback must not prevent the others.
                context = {"message": "a journal callback raised", "exception": error}
                self._running_loop().call_exception_handler(context)

    def give_up(self, problem: str) -> JournalFailed:
        """Fail the journal as if a write had failed, because the caller can't append a required record. Returns the
        failure."""
        if self._failure is None:
            self._fail(JournalFailed(str(self._store.directory), problem))
        assert self._failure is not None
        return self._failure

    def _fail(self, failure: JournalFailed) -> None:
        self._failure = failure
        self._end_waiting(failure)

    def _end_waiting(self, error: JournalFailed | JournalClosed) -> None:
        self._waiting.clear()
        for future in tuple(self._futures):
            if not future.done():
                future.set_exception(error)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _check_size(record: bytes) -> None:
    if len(record) > RECORD_BYTES_MAX:
        raise RecordTooLarge(len(record), RECORD_BYTES_MAX)
