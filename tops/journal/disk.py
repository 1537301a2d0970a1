"""All file system operations of the journal, one method per step that a crash can separate from the next."""

import os
from pathlib import Path

# macOS has no fdatasync; fsync is the nearest.
_datasync = getattr(os, "fdatasync", os.fsync)


class Disk:
    """The real file system. Tests derive from it to fail or to stop at a chosen step."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        remaining = memoryview(data)
        while remaining:
            written = os.pwrite(descriptor, remaining, offset)
            remaining = remaining[written:]
            offset += written

    def reserve(self, descriptor: int, offset: int, size: int) -> None:
        """Extend the file by zeros. They are written and not only reserved, so that a sync of the data that replaces
        them need not write metadata."""
        self.write(descriptor, bytes(size), offset)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def datasync(self, descriptor: int) -> None:
        _datasync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def sync_directory(self, directory: Path) -> None:
        """Names that were created, renamed or removed are durable only after this."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
