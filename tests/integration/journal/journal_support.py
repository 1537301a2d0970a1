"""What the journal's tests share: opening its files, and disks that stop or fail at a chosen step."""

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tops.journal import Disk, JournalOptions
from tops.journal.reader import read_records
from tops.journal.store import Store

SMALL = JournalOptions(segment_bytes=200, batch_bytes_max=100)
ROOMY = replace(SMALL, preallocate_bytes=64)


@contextmanager
def opened(directory: Path, options: JournalOptions = SMALL, disk: Disk | None = None) -> Iterator[Store]:
    store = Store(directory, options, lambda: 1000.0, disk or Disk())
    try:
        yield store
    finally:
        store.close()


def records_in(store: Store) -> list[tuple[int, bytes]]:
    return list(read_records(str(store.directory), lambda: store.segments, store.first_sequence))


def write_sample(
    directory: Path, commits: Sequence[Sequence[bytes]], options: JournalOptions = SMALL
) -> list[tuple[int, bytes]]:
    """A cleanly closed journal of these commits, and what must be read from it."""
    with opened(directory, options) as store:
        for records in commits:
            store.commit(records)
        store.seal()
        return records_in(store)


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


class UnsyncedDisk(Disk):
    """For tests of what is read from damaged files, which no crash of the machine follows: it waits for no disk."""

    def datasync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, directory: Path) -> None:
        pass


class GatedDisk(Disk):
    """Every sync of data waits until the test opens the gate, and is counted before it waits."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.syncs = threading.Semaphore(0)

    def datasync(self, descriptor: int) -> None:
        self.syncs.release()
        self.gate.wait(60)
        super().datasync(descriptor)

    def forget_syncs(self) -> None:
        while self.syncs.acquire(blocking=False):
            pass


class FailingDisk(Disk):
    """From the moment a test sets `error`, the named step raises it, once; later steps work again."""

    def __init__(self, step: str) -> None:
        self._step = step
        self.error: OSError | None = None
        self.failures = 0

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        self._fail_in("write")
        super().write(descriptor, data, offset)

    def datasync(self, descriptor: int) -> None:
        self._fail_in("datasync")
        super().datasync(descriptor)

    def _fail_in(self, step: str) -> None:
        if step == self._step and self.error is not None:
            error, self.error = self.error, None
            self.failures += 1
            raise error


class PowerCut(BaseException):
    """The machine stops here."""


class PowerCutDisk(Disk):
    """Stops before a chosen step, and knows what a power cut at that moment may leave.

    A directory entry counts as durable only after the directory's sync, a file's bytes only after the file's. What is
    there at the start counts as synced, but for the files of which `synced_bytes` says how much is.
    """

    def __init__(self, directory: Path, stop_at: int, synced_bytes: dict[str, int] | None = None) -> None:
        self._directory, self._stop_at = directory, stop_at
        self._steps = 0
        self._files: dict[Path, object] = {}
        self._descriptors: dict[int, object] = {}
        self._written: dict[object, bytes] = {}
        self._synced: dict[object, bytes] = {}
        self._durable_names: dict[Path, object] = {}
        for path in sorted(directory.iterdir()):
            if path.name != "lock":
                file = object()
                self._files[path] = self._durable_names[path] = file
                self._written[file] = path.read_bytes()
                self._synced[file] = self._written[file][: (synced_bytes or {}).get(path.name)]

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        file = self._files.setdefault(path, object())
        self._descriptors[descriptor] = file
        self._synced.setdefault(file, b"")
        self._written.setdefault(file, b"")
        return descriptor

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        try:
            self._step()
        except PowerCut:
            super().write(descriptor, data[: len(data) // 2], offset)
            self._note(descriptor)
            raise
        super().write(descriptor, data, offset)
        self._note(descriptor)

    def reserve(self, descriptor: int, offset: int, size: int) -> None:
        self._step()
        super().reserve(descriptor, offset, size)
        self._note(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        self._step()
        super().truncate(descriptor, size)
        self._note(descriptor)

    def datasync(self, descriptor: int) -> None:
        self._step()
        super().datasync(descriptor)
        self._synced[self._descriptors[descriptor]] = self._written[self._descriptors[descriptor]]

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)
        self._files[target] = self._files.pop(source)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)
        del self._files[path]

    def sync_directory(self, directory: Path) -> None:
        self._step()
        super().sync_directory(directory)
        if directory == self._directory:
            self._durable_names = dict(self._files)

    def left_behind(self, target: Path) -> Iterator[Path]:
        """A directory for each thing that the cut may leave: bytes and names, each as synced or as last written."""
        for names_label, names in (("synced", self._durable_names), ("written", self._files)):
            for bytes_label, contents in (("synced", self._synced), ("written", self._written)):
                image = target / f"names-{names_label}-bytes-{bytes_label}"
                shutil.rmtree(image, ignore_errors=True)
                image.mkdir(parents=True)
                for path, file in names.items():
                    (image / path.name).write_bytes(contents[file])
                yield image

    def _note(self, descriptor: int) -> None:
        self._written[self._descriptors[descriptor]] = os.pread(descriptor, 2**20, 0)

    def _step(self) -> None:
        if self._steps == self._stop_at:
            raise PowerCut
        self._steps += 1
