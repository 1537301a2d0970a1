"""The files of one open journal: commit of batches, new segments, truncation and rewrite; blocking, one thread at a
time.

A crash may come between any two steps below; each order is chosen so that the next open finds either the journal as
it was before the operation or as it is after it.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tops.journal.disk import Disk
from tops.journal.format import (
    FIRST_SEQUENCE,
    SegmentFlags,
    SegmentHeader,
    encode_batch,
)
from tops.journal.recovery import recover, segment_numbers
from tops.journal.segments import UNFINISHED_SUFFIX, Segment, segment_path
from tops.journal.watermark import WATERMARK_NAME, WatermarkFile
from tops.model.errors import JournalCorrupt, JournalLocked

LOCK_NAME = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOptions:
    """How a journal uses its disk."""

    segment_bytes: int = 64 * 2**20  # a segment that has reached this size is followed by a new one
    batch_bytes_max: int = 4 * 2**20  # more than this is written by more than one sync
    # Bytes by which a segment is extended at a time: a sync that need not record a new length is cheaper.
    preallocate_bytes: int = 0
    # How long after the last commit the watermark is synced; 0: before each acknowledgement, with a second sync.
    seal_after_s: float = 0.02
    # Up to so many records are synced in the loop's thread, while syncs take no longer than that: to pass them to the
    # writer's thread would cost more.
    here_records_max: int = 16
    here_sync_max_s: float = 0.002


@dataclass(slots=True)
class JournalStatistics:
    """What was done since the journal was opened."""

    records: int = 0
    bytes: int = 0
    batches: int = 0
    fsyncs: int = 0
    last_fsync_s: float = 0.0


class Store:
    """An open, locked journal directory. After an OSError it must not be used again, only closed."""

    def __init__(self, directory: Path, options: JournalOptions, now: Callable[[], float], disk: Disk) -> None:
        """Opens the journal in `directory`, or creates it."""
        self.directory, self.options, self._now, self._disk = directory, options, now, disk
        self.statistics = JournalStatistics()
        self.segments: tuple[Segment, ...] = ()
        self.committed_at = 0.0  # by the performance counter
        self.unsealed = False  # the newest watermark is written but not synced
        self._segment_descriptor: int | None = None
        self._allocated_end = 0  # of the last segment's file
        self._watermarks: WatermarkFile | None = None
        if not directory.is_dir():
            directory.mkdir(parents=True, mode=0o700)
            disk.sync_directory(directory.parent)
        self._lock = _locked(directory)
        try:
            self._watermarks = _loaded_watermarks(disk, directory)
            segments, self.recovery = recover(disk, directory, self._watermarks)
            self.segments = tuple(segments)
            if segments:
                self._segment_descriptor = disk.open(segments[-1].path)
                self._allocated_end = os.fstat(self._segment_descriptor).st_size
            else:
                self._begin_segment(SegmentFlags.NONE, ())
        except BaseException:
            self.close()
            raise

    @property
    def first_sequence(self) -> int:
        return self.segments[0].header.first_sequence

    @property
    def next_sequence(self) -> int:
        """The number of the next record to be committed; all below it are durable."""
        return self.segments[-1].next_sequence

    @property
    def size_bytes(self) -> int:
        return sum(segment.end for segment in self.segments)

    def commit(self, records: Sequence[bytes]) -> None:
        """Appends the records as one batch; they are durable when this returns."""
        if self.segments[-1].end >= self.options.segment_bytes:
            self._begin_segment(SegmentFlags.NONE, ())
        assert self._segment_descriptor is not None
        segment = self.segments[-1]
        batch, chain = encode_batch(
            records,
            seed=segment.header.seed,
            offset=segment.end,
            chain=segment.chain,
            first_sequence=segment.next_sequence,
        )
        if segment.end + len(batch) > self._allocated_end and self.options.preallocate_bytes:
            self._allocated_end = segment.end + len(batch) + self.options.preallocate_bytes
            self._disk.reserve(self._segment_descriptor, segment.end, self._allocated_end - segment.end)
        self._disk.write(self._segment_descriptor, batch, segment.end)
        self._datasync(self._segment_descriptor)
        self._mark(self.segments[0], segment, segment.end + len(batch))
        segment.extend(segment.end + len(batch), len(records), chain)
        self._count(records, len(batch))

    def seal(self) -> None:
        """Syncs the watermark: from here on it is certain even after a power failure what was durable."""
        assert self._watermarks is not None
        self._watermarks.sync()
        self.statistics.fsyncs += 1
        self.unsealed = False

    def kept_from(self, sequence: int) -> int:
        """The first record that remains after a truncation before `sequence`. From any thread."""
        segments = self.segments
        kept = next((segment for segment in segments if segment.next_sequence > sequence), segments[-1])
        return kept.header.first_sequence

    def within(self, size_bytes: int) -> int:
        """The first record of the newest segments that take no more than this. From any thread."""
        segments = self.segments
        first = segments[-1]
        for segment in reversed(segments):
            size_bytes -= segment.end
            if size_bytes < 0:
                break
            first = segment
        return first.header.first_sequence

    def drop_before(self, sequence: int) -> int:
        """Deletes the segments that hold only records below `sequence`, except the last one. Returns their number."""
        kept = tuple(segment for segment in self.segments if segment.next_sequence > sequence) or self.segments[-1:]
        dropped = self.segments[: len(self.segments) - len(kept)]
        if dropped:
            self.segments = kept
            self._remove(dropped)
        return len(dropped)

    def rewrite(self, records: Sequence[bytes]) -> None:
        """Replaces everything by these records, atomically; they get the next sequence numbers."""
        replaced = self.segments
        self._begin_segment(SegmentFlags.BASE, records)
        self.segments = self.segments[-1:]
        self._remove(replaced)

    def close(self) -> None:
        """Releases the files and the lock; writes nothing."""
        if self._segment_descriptor is not None:
            os.close(self._segment_descriptor)
        if self._watermarks is not None:
            self._watermarks.close()
        os.close(self._lock)

    def _begin_segment(self, flags: SegmentFlags, records: Sequence[bytes]) -> None:
        """Writes a complete new segment beside the others; it counts from the moment of its rename."""
        previous = self.segments[-1] if self.segments else None
        number = previous.header.number + 1 if previous else 1
        path = segment_path(self.directory, number)
        unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        descriptor = self._disk.open(unfinished)
        try:
            segment = self._write_segment(descriptor, path, number, flags, records, previous)
            self._datasync(descriptor)
            self._disk.rename(unfinished, path)
            self._disk.sync_directory(self.directory)
        except BaseException:
            os.close(descriptor)
            raise
        if self._segment_descriptor is not None:
            if previous is not None and self._allocated_end > previous.end:
                self._disk.truncate(self._segment_descriptor, previous.end)
            os.close(self._segment_descriptor)
        self._segment_descriptor, self._allocated_end = descriptor, segment.end
        self.segments = (*self.segments, segment)
        first = segment if SegmentFlags.BASE in flags else self.segments[0]
        self._mark(first, segment, segment.end)
        self.seal()

    def _write_segment(
        self,
        descriptor: int,
        path: Path,
        number: int,
        flags: SegmentFlags,
        records: Sequence[bytes],
        previous: Segment | None,
    ) -> Segment:
        assert self._watermarks is not None
        header = SegmentHeader(
            journal_id=self._watermarks.newest.journal_id,
            number=number,
            flags=flags,
            first_sequence=previous.next_sequence if previous else FIRST_SEQUENCE,
            created_at=self._now(),
            sealed_bytes=0,
            chain_before=previous.chain if previous else 0,
        )
        segment = Segment.empty(header, path)
        for batch_records in _in_batches(records, self.options.batch_bytes_max):
            batch, chain = encode_batch(
                batch_records,
                seed=header.seed,
                offset=segment.end,
                chain=segment.chain,
                first_sequence=segment.next_sequence,
            )
            self._disk.write(descriptor, batch, segment.end)
            segment.extend(segment.end + len(batch), len(batch_records), chain)
            self._count(batch_records, len(batch))
        segment.header = header.sealed_at(segment.end)
        self._disk.write(descriptor, segment.header.encode(), 0)
        return segment

    def _remove(self, segments: Sequence[Segment]) -> None:
        """Records durably, in both watermarks, that these no longer belong to the journal, and only then deletes them.
        In the other order a crash in between would leave a watermark that names missing segments."""
        assert self._watermarks is not None
        last = self.segments[-1]
        self._watermarks.settle(self.segments[0].header.number, last.header.number, last.end)
        self.unsealed = False
        for segment in segments:
            self._disk.unlink(segment.path)
        self._disk.sync_directory(self.directory)

    def _mark(self, first: Segment, last: Segment, durable_bytes: int) -> None:
        assert self._watermarks is not None
        self._watermarks.advance(first.header.number, last.header.number, durable_bytes)
        self.unsealed = True
        if self.options.seal_after_s == 0:
            self.seal()

    def _datasync(self, descriptor: int) -> None:
        started = perf_counter()
        self._disk.datasync(descriptor)
        self.committed_at = perf_counter()
        self.statistics.last_fsync_s = self.committed_at - started
        self.statistics.fsyncs += 1

    def _count(self, records: Sequence[bytes], size: int) -> None:
        self.statistics.records += len(records)
        self.statistics.bytes += size
        self.statistics.batches += 1


def _in_batches(records: Sequence[bytes], bytes_max: int) -> list[Sequence[bytes]]:
    batches: list[Sequence[bytes]] = []
    start = size = 0
    for position, record in enumerate(records):
        size += len(record)
        if size >= bytes_max:
            batches.append(records[start : position + 1])
            start, size = position + 1, 0
    if start < len(records):
        batches.append(records[start:])
    return batches


def _locked(directory: Path) -> int:
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise JournalLocked(str(directory), holder) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _loaded_watermarks(disk: Disk, directory: Path) -> WatermarkFile:
    path = directory / WATERMARK_NAME
    if not path.exists():
        if segment_numbers(directory):
            raise JournalCorrupt(str(path), 0, "the watermark is missing, and there are segments")
        WatermarkFile.create(disk, directory, os.urandom(16))
    return WatermarkFile.load(disk, directory)
