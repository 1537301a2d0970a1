"""The writer thread: takes all queued records, makes them durable with one sync, and reports that.

Queueing, waking and `commit_here` are for the event loop's thread; everything else here runs in the writer's own.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from tops.journal.store import Store
from tops.model.errors import JournalFailed


@dataclass(frozen=True, slots=True)
class Job:
    """Work on the files that runs in order with the appended records."""

    run: Callable[[], object]
    on_done: Callable[[object], None]


class Writer:
    """Owns the store from its first wake to the end of `join`. Its callbacks run in the writer thread."""

    def __init__(
        self, store: Store, on_durable: Callable[[int], None], on_failure: Callable[[JournalFailed], None]
    ) -> None:
        self._store, self._on_durable, self._on_failure = store, on_durable, on_failure
        # One thread appends at the right, the other pops at the left: a deque needs no lock for that.
        self._queue: deque[bytes | Job] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._files = threading.Lock()  # held by the thread that uses the files
        self._stopping = self._ended = False
        self._watches = False  # the thread wakes by itself, to sync the watermark
        self._thread = threading.Thread(target=self._run, name="tops-journal", daemon=True)

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, item: bytes | Job) -> None:
        self._queue.append(item)

    def wake(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._wakes.put(None)

    def commit_here(self) -> bool:
        """Commits the queue in the caller's thread, if that is faster than passing it on: little is queued, the writer
        is idle, and the last sync was fast. Returns whether it did; then everything queued is durable."""
        options = self._store.options
        if len(self._queue) > options.here_records_max or self._store.statistics.last_fsync_s > options.here_sync_max_s:
            return False
        if not self._files.acquire(blocking=False):
            return False
        try:
            records = self._next_batch()
            if self._queue or not records:  # a job, or more than one batch
                self._queue.extendleft(reversed(records))
                return False
            self._store.commit(records)
        except Exception as error:
            self._fail(error)
            return False
        finally:
            self._files.release()
        if not self._watches:
            self.wake()
        return True

    def join(self) -> None:
        """Ends the thread once the queue is empty, and waits for its end."""
        self._stopping = True
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            # The order of the two tests matters: the last record is queued before the flag is set.
            while not self._ended and not (self._stopping and not self._queue):
                self._wait_for_work()
                with self._files:
                    while self._queue and not self._ended:
                        self._commit_or_run_job()
            if self._store.unsealed and not self._ended:
                self._store.seal()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        # No retry: after a failed sync the kernel may mark lost pages clean, and a second sync would succeed.
        self._ended = True
        failure = JournalFailed(str(self._store.directory), f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        self._on_failure(failure)

    def _wait_for_work(self) -> None:
        # Cleared before the store is read: either this thread sees a commit of the other one, or that one sees the
        # cleared flag and wakes this thread.
        self._watches = False
        self._watches = self._store.unsealed
        try:
            self._wakes.get(timeout=self._store.options.seal_after_s if self._watches else None)
        except queue.Empty:
            with self._files:
                if perf_counter() - self._store.committed_at >= self._store.options.seal_after_s and not self._ended:
                    # The queue has been empty for a while: a sync of the watermark delays nothing now.
                    self._store.seal()

    def _commit_or_run_job(self) -> None:
        if records := self._next_batch():
            self._store.commit(records)
            self._on_durable(self._store.next_sequence)
            return
        job = self._queue.popleft()
        assert isinstance(job, Job)
        result = job.run()
        self._on_durable(self._store.next_sequence)
        job.on_done(result)

    def _next_batch(self) -> list[bytes]:
        """The records in front of the queue, up to the next job or the size of a batch."""
        records: list[bytes] = []
        size = 0
        while self._queue and size < self._store.options.batch_bytes_max:
            record = self._queue[0]
            if isinstance(record, Job):
                break
            records.append(record)
            size += len(record)
            self._queue.popleft()
        return records
