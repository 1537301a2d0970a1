"""One segment file: its name, its checked batches, and where to start reading for a sequence number."""

import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tops.journal.format import (
    BATCH_HEADER_BYTES,
    BATCH_MAGIC,
    SEGMENT_HEADER_BYTES,
    BatchHeader,
    Damaged,
    SegmentHeader,
    decode_records,
)

UNFINISHED_SUFFIX = ".new"
_INDEX_STEP_BYTES = 64 * 2**10
_READ_BYTES = 256 * 2**10
_NAME = re.compile(r"(\d{16})\.segment")


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:016d}.segment"


def segment_number(name: str) -> int | None:
    """The number in a segment file's name, or None for any other file."""
    matched = _NAME.fullmatch(name)
    return int(matched[1]) if matched else None


@dataclass(slots=True, eq=False)
class Segment:
    """A segment as known in memory: where its durable part ends, and a sparse index into it.

    The thread that commits changes it; other threads may read it at any time, since `end` moves only after the bytes
    below it are durable and the index grows at its end.
    """

    header: SegmentHeader
    path: Path
    end: int
    next_sequence: int
    chain: int
    _offsets: list[int] = field(default_factory=list)
    _sequences: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, header: SegmentHeader, path: Path) -> "Segment":
        return cls(header, path, SEGMENT_HEADER_BYTES, header.first_sequence, header.chain_before)

    def extend(self, end: int, records: int, chain: int) -> None:
        """The batch that starts where the segment ended is durable."""
        if not self._offsets or self.end - self._offsets[-1] >= _INDEX_STEP_BYTES:
            self._offsets.append(self.end)
            self._sequences.append(self.next_sequence)
        self.chain = chain
        self.next_sequence += records
        self.end = end

    def start_for(self, sequence: int) -> int:
        """The offset of a batch that starts at or before that record."""
        position = bisect_right(self._sequences, sequence)
        return self._offsets[position - 1] if position else SEGMENT_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked batch."""

    header: BatchHeader
    records: list[bytes]
    chain: int
    end: int


class BatchReader:
    """Reads checked batches one after the other, never a byte at or beyond the given end."""

    def __init__(self, descriptor: int, seed: int, offset: int) -> None:
        self._descriptor, self._seed = descriptor, seed
        self.offset = offset
        self._buffer, self._buffer_start = b"", offset

    def batches(self, end: int) -> Iterator[Batch]:
        """Every batch from here to `end`; raises Damaged, with `offset` at the damaged batch."""
        while self.offset < end:
            header = BatchHeader.decode(self._bytes(self.offset, BATCH_HEADER_BYTES, end), self._seed, self.offset)
            body_start = self.offset + BATCH_HEADER_BYTES
            records, chain = decode_records(header, self._bytes(body_start, header.body_bytes, end))
            self.offset = body_start + header.body_bytes
            yield Batch(header, records, chain, self.offset)

    def only_zeros_follow(self, end: int) -> bool:
        """Whether nothing was written behind the offset where reading stopped."""
        return not os.pread(self._descriptor, end - self.offset, self.offset).strip(b"\0")

    def later_batch_header(self, end: int) -> int | None:
        """The offset of a valid batch header after the offset where reading stopped, if there is one."""
        data = os.pread(self._descriptor, end - self.offset, self.offset)
        position = data.find(BATCH_MAGIC, 1)
        while position != -1:
            try:
                BatchHeader.decode(data[position : position + BATCH_HEADER_BYTES], self._seed, self.offset + position)
            except Damaged:
                position = data.find(BATCH_MAGIC, position + 1)
            else:
                return self.offset + position
        return None

    def _bytes(self, offset: int, length: int, end: int) -> bytes:
        length = min(length, end - offset)
        start = offset - self._buffer_start
        if start + length > len(self._buffer):
            self._buffer = os.pread(self._descriptor, min(max(length, _READ_BYTES), end - offset), offset)
            self._buffer_start, start = offset, 0
        return self._buffer[start : start + length]
