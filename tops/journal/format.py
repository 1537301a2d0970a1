"""The bytes of a journal: segment headers, batches, records and watermarks; no files here.

Little endian throughout. A segment is a header and then batches; a batch is a header and then records:

    segment header   magic, version, flags, journal id, number, first sequence, created at, sealed bytes,
                     chain before, check
    batch header     magic, body bytes, records, chain before, first sequence, offset in the file, check
    record           length, check, payload

Every check is a CRC-32. A batch header's check is seeded with the journal's id and the segment's number, so that a
header is valid only at its own position in its own journal; a record's check continues the check before it, so that a
changed, removed, repeated or swapped record breaks the chain.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from zlib import crc32

RECORD_BYTES_MAX = 256 * 2**20
FIRST_SEQUENCE = 1

_VERSION = 1
_CHECK = struct.Struct("<I")
_SEGMENT = struct.Struct("<8sII16sQQdQI")
_SEGMENT_MAGIC = b"TOPSJRNL"
_BATCH = struct.Struct("<4sIIIQQ")
_RECORD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_WATERMARK = struct.Struct("<8sI16sQQQQ")
_WATERMARK_MAGIC = b"TOPSMARK"

SEGMENT_HEADER_BYTES = _SEGMENT.size + _CHECK.size
BATCH_HEADER_BYTES = _BATCH.size + _CHECK.size
RECORD_HEADER_BYTES = _RECORD.size
BATCH_MAGIC = b"TOPB"
# A watermark fills a sector of the largest usual size, so that a torn write of one never touches the other.
WATERMARK_BYTES = 4096


class Damaged(Exception):
    """These bytes are not what was written. The message names the problem, `at` the offset from their start."""

    def __init__(self, problem: str, at: int = 0) -> None:
        self.at = at
        super().__init__(problem)


class SegmentFlags(IntFlag):
    """Flags of a segment's header about the segments before it."""

    NONE = 0
    BASE = 1  # written by a rewrite: no segment before this one belongs to the journal any more


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The start of a segment file; it is on disk completely before the file gets its name."""

    journal_id: bytes
    number: int
    flags: SegmentFlags
    first_sequence: int
    created_at: float
    sealed_bytes: int  # how much of the file was synced before it got its name
    chain_before: int  # the check of the last record in the segment before

    @property
    def seed(self) -> int:
        """The seed that binds the checks of this segment's batches to this journal and this segment."""
        return crc32(self.number.to_bytes(8, "little"), crc32(self.journal_id))

    def sealed_at(self, size: int) -> "SegmentHeader":
        return replace(self, sealed_bytes=size)

    def encode(self) -> bytes:
        fields = _SEGMENT.pack(
            _SEGMENT_MAGIC,
            _VERSION,
            self.flags,
            self.journal_id,
            self.number,
            self.first_sequence,
            self.created_at,
            self.sealed_bytes,
            self.chain_before,
        )
        return fields + _CHECK.pack(crc32(fields))

    @classmethod
    def decode(cls, data: bytes) -> "SegmentHeader":
        fields = _checked_fields(data, SEGMENT_HEADER_BYTES, "the segment header")
        magic, version, flags, journal_id, number, first, created, sealed, chain = _SEGMENT.unpack(fields)
        _check_kind(magic, _SEGMENT_MAGIC, version, "a journal segment")
        return cls(journal_id, number, SegmentFlags(flags), first, created, sealed, chain)


@dataclass(frozen=True, slots=True)
class Watermark:
    """What is certainly on disk: the segments that belong to the journal, and the synced size of the last one."""

    journal_id: bytes
    generation: int
    first_segment: int
    last_segment: int  # 0 while no segment was ever finished
    durable_bytes: int  # of the last segment

    def encode(self) -> bytes:
        fields = _WATERMARK.pack(
            _WATERMARK_MAGIC,
            _VERSION,
            self.journal_id,
            self.generation,
            self.first_segment,
            self.last_segment,
            self.durable_bytes,
        ).ljust(WATERMARK_BYTES - _CHECK.size, b"\0")
        return fields + _CHECK.pack(crc32(fields))

    @classmethod
    def decode(cls, data: bytes) -> "Watermark":
        fields = _checked_fields(data, WATERMARK_BYTES, "the watermark")
        magic, version, *values = _WATERMARK.unpack_from(fields)
        _check_kind(magic, _WATERMARK_MAGIC, version, "a journal watermark")
        return cls(*values)


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """The header of one group commit. If a valid one follows damaged bytes, everything before it had been synced."""

    body_bytes: int
    records: int
    chain_before: int
    first_sequence: int
    check: int

    @classmethod
    def decode(cls, data: bytes, seed: int, offset: int) -> "BatchHeader":
        if len(data) < BATCH_HEADER_BYTES:
            raise Damaged(f"the file ends {len(data)} bytes into a batch header")
        fields = data[: _BATCH.size]
        (check,) = _CHECK.unpack_from(data, _BATCH.size)
        magic, body_bytes, records, chain_before, first_sequence, written_at = _BATCH.unpack(fields)
        if magic != BATCH_MAGIC or crc32(fields, seed) != check or written_at != offset:
            raise Damaged("there is no valid batch header here")
        return cls(body_bytes, records, chain_before, first_sequence, check)


def encode_batch(
    records: Sequence[bytes], *, seed: int, offset: int, chain: int, first_sequence: int
) -> tuple[bytes, int]:
    """One batch for that offset in a segment, and the check that the next batch continues."""
    body_bytes = sum(map(len, records)) + RECORD_HEADER_BYTES * len(records)
    fields = _BATCH.pack(BATCH_MAGIC, body_bytes, len(records), chain, first_sequence, offset)
    check = crc32(fields, seed)
    parts = [fields, _CHECK.pack(check)]
    for record in records:
        # The stored check must not run into the next one: a CRC over data and its own CRC is a constant.
        check = crc32(record, crc32(_LENGTH.pack(len(record)), check))
        parts.append(_RECORD.pack(len(record), check))
        parts.append(record)
    return b"".join(parts), check


def decode_records(header: BatchHeader, body: bytes) -> tuple[list[bytes], int]:
    """A batch's records, all checked, and the check that the next batch continues; offsets of damage count from the
    header."""
    if len(body) < header.body_bytes:
        missing = header.body_bytes - len(body)
        raise Damaged(f"the file ends {missing} bytes before the end of a batch", BATCH_HEADER_BYTES + len(body))
    records = []
    check, position = header.check, 0
    for number in range(header.records):
        start = position + RECORD_HEADER_BYTES
        if start > header.body_bytes:
            raise Damaged(
                f"record {header.first_sequence + number} lies outside its batch", BATCH_HEADER_BYTES + position
            )
        length, stored = _RECORD.unpack_from(body, position)
        record = body[start : start + length]
        check = crc32(record, crc32(_LENGTH.pack(length), check))
        if check != stored or len(record) != length:
            problem = f"record {header.first_sequence + number} does not match its checksum"
            raise Damaged(problem, BATCH_HEADER_BYTES + position)
        records.append(record)
        position = start + length
    if position != header.body_bytes:
        raise Damaged("a batch is longer than its records", BATCH_HEADER_BYTES + position)
    return records, check


def _checked_fields(data: bytes, size: int, what: str) -> bytes:
    if len(data) < size:
        raise Damaged(f"{what} is cut off after {len(data)} bytes")
    fields = data[: size - _CHECK.size]
    if _CHECK.unpack_from(data, len(fields))[0] != crc32(fields):
        raise Damaged(f"{what} does not match its checksum")
    return fields


def _check_kind(magic: bytes, expected: bytes, version: int, what: str) -> None:
    if magic != expected:
        raise Damaged(f"this is not {what}")
    if version != _VERSION:
        raise Damaged(f"this is {what} of version {version}, and this release reads version {_VERSION}")
