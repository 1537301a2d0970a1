"""Reads a journal's directory after a stop of any kind: verifies that it is intact, or names where it is not.

Everything is checked before anything is changed, so that a damaged journal stays as it was found. The difficult case is
the end of the last segment: a write that a crash interrupted is cut off and reported; damage to acknowledged records is
an error. Three facts distinguish them, each of which proves that the records were acknowledged:

- the damage lies below the watermark, or below what was synced before the segment got its name;
- a valid batch header lies behind it: a batch is written only when the one before it is durable;
- it is not in the last segment: a segment is begun only when the one before it is durable.

Zeros up to the end of a file are allocated and unused space; the watermark and the header of the next segment show that
no batch was overwritten with zeros.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from tops.journal.disk import Disk
from tops.journal.format import SEGMENT_HEADER_BYTES, Damaged, SegmentFlags, SegmentHeader, Watermark
from tops.journal.segments import UNFINISHED_SUFFIX, BatchReader, Segment, segment_number, segment_path
from tops.journal.watermark import WATERMARK_NAME, WatermarkFile
from tops.model.errors import JournalCorrupt


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of opening a journal, and what was cut off."""

    records: int = 0
    bytes: int = 0
    segments: int = 0
    torn_bytes: int = 0  # of a write that a crash interrupted; never acknowledged
    torn_file: str = ""
    torn_offset: int = 0
    damaged_watermarks: int = 0  # 1: one of the two copies was unreadable and has been renewed
    removed_files: tuple[str, ...] = ()  # left over by an interrupted deletion, rewrite or new segment


def recover(disk: Disk, directory: Path, watermarks: WatermarkFile) -> tuple[list[Segment], Recovery]:
    """The journal's segments, checked from the first record to the last, with the torn tail cut off."""
    watermark = watermarks.newest
    headers = _live_headers(directory, watermark)
    segments, torn_bytes = _verified(directory, headers, watermark)
    left_over = _left_over(directory, headers[0].number if headers else watermark.first_segment)

    if segments:
        _make_durable(disk, segments, watermarks, torn_bytes, bool(left_over))
    for path in left_over:
        disk.unlink(path)
    if left_over:
        disk.sync_directory(directory)
    return segments, Recovery(
        records=segments[-1].next_sequence - segments[0].header.first_sequence if segments else 0,
        bytes=sum(segment.end for segment in segments),
        segments=len(segments),
        torn_bytes=torn_bytes,
        torn_file=str(segments[-1].path) if torn_bytes else "",
        torn_offset=segments[-1].end if torn_bytes else 0,
        damaged_watermarks=watermarks.damaged,
        removed_files=tuple(path.name for path in left_over),
    )


def segment_numbers(directory: Path) -> set[int]:
    return {number for name in os.listdir(directory) if (number := segment_number(name)) is not None}


def _live_headers(directory: Path, watermark: Watermark) -> list[SegmentHeader]:
    """The headers of all segments that belong to the journal. The search begins with the newest and ends at a
    rewrite."""
    present = segment_numbers(directory)
    newest = max([watermark.last_segment, *present])
    headers: list[SegmentHeader] = []
    for number in range(newest, watermark.first_segment - 1, -1):
        path = segment_path(directory, number)
        if number not in present:
            raise JournalCorrupt(str(path), 0, "the segment is missing")
        header = _read_header(path)
        if (header.journal_id, header.number) != (watermark.journal_id, number):
            raise JournalCorrupt(str(path), 0, "the segment has another number, or belongs to another journal")
        headers.append(header)
        if SegmentFlags.BASE in header.flags:
            break
    return headers[::-1]


def _read_header(path: Path) -> SegmentHeader:
    with open(path, "rb") as file:
        try:
            return SegmentHeader.decode(file.read(SEGMENT_HEADER_BYTES))
        except Damaged as damage:
            raise JournalCorrupt(str(path), 0, str(damage)) from damage


def _verified(directory: Path, headers: list[SegmentHeader], watermark: Watermark) -> tuple[list[Segment], int]:
    segments: list[Segment] = []
    torn_bytes = 0
    for header in headers:
        path = segment_path(directory, header.number)
        if segments and (header.first_sequence, header.chain_before) != (
            segments[-1].next_sequence,
            segments[-1].chain,
        ):
            raise JournalCorrupt(str(segments[-1].path), segments[-1].end, f"records are missing before {path.name}")
        marked = watermark.durable_bytes if header.number == watermark.last_segment else 0
        segment, torn_bytes = _verify(header, path, max(header.sealed_bytes, marked), header is headers[-1])
        segments.append(segment)
    return segments, torn_bytes


def _verify(header: SegmentHeader, path: Path, durable_bytes: int, may_be_torn: bool) -> tuple[Segment, int]:
    """One segment, checked batch by batch, and the number of bytes at its end that a crash left torn."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size < durable_bytes:
            raise JournalCorrupt(str(path), size, f"the file was durable up to byte {durable_bytes} and is now shorter")
        segment = Segment.empty(header, path)
        reader = BatchReader(descriptor, header.seed, segment.end)
        try:
            for batch in reader.batches(size):
                if (batch.header.chain_before, batch.header.first_sequence) != (segment.chain, segment.next_sequence):
                    raise JournalCorrupt(str(path), segment.end, "a batch does not follow the one before it")
                segment.extend(batch.end, len(batch.records), batch.chain)
        except Damaged as damage:
            offset, problem = segment.end + damage.at, str(damage)
            if segment.end >= durable_bytes and reader.only_zeros_follow(size):
                return segment, 0
            if not may_be_torn:
                raise JournalCorrupt(str(path), offset, f"{problem}, and a later segment exists") from damage
            if segment.end < durable_bytes:
                raise JournalCorrupt(str(path), offset, f"{problem}, in what was durable") from damage
            if (following := reader.later_batch_header(size)) is not None:
                raise JournalCorrupt(
                    str(path), offset, f"{problem}, and a valid batch follows at {following}"
                ) from damage
        return segment, size - segment.end
    finally:
        os.close(descriptor)


def _left_over(directory: Path, first_segment: int) -> list[Path]:
    """Files that an interrupted deletion, rewrite or creation left: replaced segments, and unfinished files."""
    dropped = sorted(number for number in segment_numbers(directory) if number < first_segment)
    unfinished = [
        directory / name
        for name in sorted(os.listdir(directory))
        if name.endswith(UNFINISHED_SUFFIX)
        and (name.startswith(WATERMARK_NAME) or segment_number(name.removesuffix(UNFINISHED_SUFFIX)) is not None)
    ]
    return [segment_path(directory, number) for number in dropped] + unfinished


def _make_durable(
    disk: Disk, segments: list[Segment], watermarks: WatermarkFile, torn_bytes: int, files_go: bool
) -> None:
    """Make sure that everything to be served is on disk, and record that in the watermark."""
    last, watermark = segments[-1], watermarks.newest
    marked = watermark.durable_bytes if watermark.last_segment == last.header.number else SEGMENT_HEADER_BYTES
    if torn_bytes or marked < last.end:
        descriptor = disk.open(last.path)
        try:
            if torn_bytes:
                disk.truncate(descriptor, last.end)
            # After a failed sync the page cache can hold pages that are marked clean but never reached the disk: write
            # them again, so that the next sync includes them.
            disk.write(descriptor, os.pread(descriptor, last.end - marked, marked), marked)
            disk.datasync(descriptor)
        finally:
            os.close(descriptor)
    elif not files_go and not watermarks.damaged:
        return
    watermarks.settle(segments[0].header.number, last.header.number, last.end)
