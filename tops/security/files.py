"""Key material on disk: files that are complete or absent, and private ones that only their owner can read."""

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tops.model.errors import ConfigError

PRIVATE = 0o600
PUBLIC = 0o644


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """Write `content` to `path`. A crash leaves the old file or the new one, never a secret that others can read."""
    # mkstemp creates the file with mode 0600, before a byte of a key is in it.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def create_whole(path: Path, content: bytes, mode: int) -> None:
    """Write `content` to `path` unless the file exists; of several processes at once, one succeeds."""
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    if path.exists():
        return
    write_whole(temporary, content, mode)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.unlink(temporary)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A new name is durable only once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_public(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; create it with `tops keys`, or correct the path") from None


def check_private_folder(folder: Path) -> None:
    """Raise ConfigError for a folder of data that other users can read; a missing one is no error."""
    _check_mode(folder, 0o077, "lets other users in")


def check_not_writable(folder: Path) -> None:
    """Raise ConfigError for a folder of keys whose files other users could replace."""
    _check_mode(folder, 0o022, "lets other users replace its files")


def _check_mode(folder: Path, forbidden: int, why: str) -> None:
    if folder.is_dir() and (mode := stat.S_IMODE(folder.stat().st_mode)) & forbidden:
        raise ConfigError(f"{folder}: mode {mode:04o} {why}: run chmod 700 {folder}")


def read_private(path: Path) -> bytes:
    """Read a private key; ConfigError if other users could have read it."""
    content = read_public(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path}: mode {mode:04o} lets other users read this private key; run chmod 600 on it")
    return content


@contextlib.contextmanager
def as_private_file(content: bytes, folder: Path) -> Iterator[str]:
    """A path with `content` for a library that reads only files; it is removed completely on leaving.

    In memory where the system has such files, else beside the original in `folder`, readable by its owner only.
    """
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        with os.fdopen(os.memfd_create("private", os.MFD_CLOEXEC), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".private.") as temporary:
            temporary.write(content)
            temporary.flush()
            yield temporary.name


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path` as a lock between processes; waits until it is free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
