"""The `durable` file: up to where the journal was certainly on disk.

Without it a flipped bit in the last batch could not be distinguished from a write that a crash interrupted. There are
two watermarks and the older one is overwritten, so that a torn write of one leaves the other intact.
"""

import os
from pathlib import Path

from tops.journal.disk import Disk
from tops.journal.format import WATERMARK_BYTES, Damaged, Watermark
from tops.journal.segments import UNFINISHED_SUFFIX
from tops.model.errors import JournalCorrupt

WATERMARK_NAME = "durable"


class WatermarkFile:
    """Keeps the newest watermark; use `load` or `create` to get one."""

    def __init__(self, disk: Disk, path: Path, descriptor: int, newest: Watermark, damaged: int) -> None:
        self._disk, self._path, self._descriptor = disk, path, descriptor
        self.newest = newest
        self.damaged = damaged  # how many of the two copies could not be read

    @classmethod
    def create(cls, disk: Disk, directory: Path, journal_id: bytes) -> None:
        """The first file of a new journal: from here on, a missing segment is noticed."""
        path = directory / WATERMARK_NAME
        unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        descriptor = disk.open(unfinished)
        try:
            for generation in (0, 1):
                watermark = Watermark(journal_id, generation, first_segment=1, last_segment=0, durable_bytes=0)
                disk.write(descriptor, watermark.encode(), generation * WATERMARK_BYTES)
            disk.datasync(descriptor)
        finally:
            os.close(descriptor)
        disk.rename(unfinished, path)
        disk.sync_directory(directory)

    @classmethod
    def load(cls, disk: Disk, directory: Path) -> "WatermarkFile":
        path = directory / WATERMARK_NAME
        descriptor = disk.open(path)
        try:
            watermarks, problems = [], []
            for slot in (0, 1):
                try:
                    watermark = Watermark.decode(os.pread(descriptor, WATERMARK_BYTES, slot * WATERMARK_BYTES))
                except Damaged as damage:
                    problems.append(str(damage))
                else:
                    watermarks.append(watermark)
            if not watermarks:
                raise JournalCorrupt(str(path), 0, f"both watermarks are unreadable ({problems[0]})")
        except BaseException:
            os.close(descriptor)
            raise
        newest = max(watermarks, key=lambda watermark: watermark.generation)
        return cls(disk, path, descriptor, newest, len(problems))

    def advance(self, first_segment: int, last_segment: int, durable_bytes: int) -> None:
        """Write the watermark without a sync: it survives this process, but not surely a power failure."""
        generation = self.newest.generation + 1
        newest = Watermark(self.newest.journal_id, generation, first_segment, last_segment, durable_bytes)
        self._disk.write(self._descriptor, newest.encode(), generation % 2 * WATERMARK_BYTES)
        self.newest = newest

    def sync(self) -> None:
        self._disk.datasync(self._descriptor)

    def settle(self, first_segment: int, last_segment: int, durable_bytes: int) -> None:
        """Write and sync both copies: files that only an older copy names may be deleted then."""
        for _ in (0, 1):
            self.advance(first_segment, last_segment, durable_bytes)
            self.sync()

    def close(self) -> None:
        os.close(self._descriptor)
