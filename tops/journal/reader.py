"""Reads durable records from any sequence number on, a batch at a time, every one checked again."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator

from tops.journal.format import Damaged, SegmentFlags
from tops.journal.segments import BatchReader, Segment
from tops.model.errors import JournalCorrupt, NotInJournal

CurrentSegments = Callable[[], tuple[Segment, ...]]


def read_records(directory: str, current_segments: CurrentSegments, from_sequence: int) -> Iterator[tuple[int, bytes]]:
    """Ends at the last durable record; may run in another thread than the one that commits.

    Raises NotInJournal, also at the first record, when the next record was truncated or rewritten meanwhile.
    """
    sequence = from_sequence
    segment = _segment_of(current_segments(), sequence, directory)
    while True:
        # Checked before reading: a segment that has a successor by now no longer grows.
        segments = current_segments()
        for number, record in _segment_records(directory, current_segments, segment, sequence):
            yield number, record
            sequence = number + 1
        if segments[-1] is not segment:
            segment = _successor(segments, segment, sequence, directory)
        elif current_segments()[-1] is segment:
            return


def _segment_records(
    directory: str, current_segments: CurrentSegments, segment: Segment, sequence: int
) -> Iterator[tuple[int, bytes]]:
    try:
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        segments = current_segments()
        if segment in segments:
            raise JournalCorrupt(str(segment.path), 0, "the segment is missing") from error
        raise _truncated(segments, sequence, directory) from error
    try:
        reader = BatchReader(descriptor, segment.header.seed, segment.start_for(sequence))
        # `end` is read again whenever it is reached: the writer may move it during the read.
        while reader.offset < (end := segment.end):
            for batch in reader.batches(end):
                for number, record in enumerate(batch.records, batch.header.first_sequence):
                    if number >= sequence:
                        yield number, record
    except Damaged as damage:
        raise JournalCorrupt(str(segment.path), reader.offset + damage.at, str(damage)) from damage
    finally:
        os.close(descriptor)


def _segment_of(segments: tuple[Segment, ...], sequence: int, directory: str) -> Segment:
    position = bisect_right(segments, sequence, key=lambda segment: segment.header.first_sequence)
    if position == 0:
        raise _truncated(segments, sequence, directory)
    return segments[position - 1]


def _successor(segments: tuple[Segment, ...], segment: Segment, sequence: int, directory: str) -> Segment:
    following = next((each for each in segments if each.header.number == segment.header.number + 1), None)
    # The first segment of a rewrite contains the state that results from the records before it: it is no continuation.
    if following is None or SegmentFlags.BASE in following.header.flags:
        raise _truncated(segments, sequence, directory)
    return following


def _truncated(segments: tuple[Segment, ...], sequence: int, directory: str) -> NotInJournal:
    return NotInJournal(directory, sequence, segments[0].header.first_sequence, segments[-1].next_sequence)
