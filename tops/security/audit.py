"""The audit log: denials and administrative acts, in a file that shows whether it was tampered with.

Each line is a JSON record that holds the hash of the line before it. Changing, removing or inserting a record breaks
the chain from there on. Somebody who can rewrite the whole file can make a new chain, or cut the end off: store the
head that `verify` returns elsewhere, and pass it to the next `verify`.

Administrative acts are on disk before the method returns. Denials are only written to the operating system, and only a
few per identity and minute: an identity that is rejected a million times must neither fill the disk nor delay others.
"""

import fcntl
import hashlib
import hmac
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tops.model.errors import AuditBroken, ConfigError
from tops.security.files import PRIVATE
from tops.security.limits import KeyedBuckets
from tops.security.redaction import redact

GENESIS = "0" * 64
TEXT_MAX = 500  # characters of a text that a peer may have influenced
DENIALS_PER_MINUTE = 30


class AuditKind(Enum):
    DENIED = "denied"
    ADMINISTERED = "administered"
    RECOVERED = "recovered"  # a torn last line was cut off after a crash


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line; `previous` is the hash of the line before it, byte for byte."""

    number: int
    at: float  # seconds since 1970
    kind: AuditKind
    who: str
    act: str
    detail: str
    left_out: int = 0  # denials over the limit since the last record
    previous: str


@dataclass(frozen=True, slots=True)
class Verified:
    records: int
    head: str  # hash of the last line; GENESIS when there is none
    torn_bytes: int  # an unfinished line at the end, which a crash leaves and the next opening removes


class AuditLog:
    """Appends to one file; one process at a time, since a chain has one end."""

    def __init__(self, path: Path, now: float, denials_per_minute: int = DENIALS_PER_MINUTE) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE)
        self._buckets = KeyedBuckets(denials_per_minute / 60, denials_per_minute, keys_max=1024)
        self._left_out, self._left_out_at = 0, now
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{path}: another process is writing this audit log; give each its own") from None
            found = verify(path)
            self._number, self._head = found.records, found.head
            if found.torn_bytes:
                os.ftruncate(self._file, os.fstat(self._file).st_size - found.torn_bytes)
                self._append(
                    now, AuditKind.RECOVERED, "", f"cut off {found.torn_bytes} bytes of an unfinished line", ""
                )
        except BaseException:
            os.close(self._file)
            raise

    def denied(self, now: float, *, who: str, act: str, detail: str = "") -> bool:
        """Record a rejection. Over the limit of its identity it is only counted, and the next record has the count.

        Returns whether it got a record of its own."""
        if not self._buckets.take(who, 1, now):
            self._left_out += 1
            self._left_out_at = now
            return False
        self._append(now, AuditKind.DENIED, who, act, detail)
        return True

    def administered(self, now: float, *, who: str, act: str, detail: str = "") -> None:
        """Record an administrative act, durable on return: call this before the act takes effect."""
        self._append(now, AuditKind.ADMINISTERED, who, act, detail)
        os.fsync(self._file)

    def _append(self, now: float, kind: AuditKind, who: str, act: str, detail: str) -> None:
        record = AuditRecord(
            number=self._number + 1,
            at=now,
            kind=kind,
            who=_short(who),
            act=_short(act),
            detail=_short(detail),
            left_out=self._left_out,
            previous=self._head,
        )
        line = msgspec.json.encode(record)
        # One write: a crash leaves a complete line or a torn last one, never a gap.
        written = os.write(self._file, line + b"\n")
        if written != len(line) + 1:
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise AuditBroken(f"{self.path}: no space for another record; free space on its disk")
        self._number, self._head, self._left_out = record.number, _hash(line), 0

    def close(self) -> None:
        """End the log; denials that were only counted get their record now."""
        try:
            if self._left_out:
                self._append(self._left_out_at, AuditKind.DENIED, "", "denials over the limit", "")
        finally:
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def verify(path: Path, expected_head: str | None = None) -> Verified:
    """Verify the chain; `AuditBroken` names the first line that does not fit.

    `expected_head`, noted earlier, must be the hash of one of the lines: it shows that the end was not cut off.
    """
    records, head, torn_bytes = 0, GENESIS, 0
    seen = expected_head is None or hmac.compare_digest(expected_head.encode(), GENESIS.encode())
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                torn_bytes = len(line)
                break
            records += 1
            head = _follow(path, line[:-1], records, head)
            seen = seen or (expected_head is not None and hmac.compare_digest(expected_head.encode(), head.encode()))
    if not seen:
        raise AuditBroken(f"{path}: no line has the noted hash {expected_head}: the end was cut off or rewritten")
    return Verified(records, head, torn_bytes)


def _follow(path: Path, line: bytes, number: int, head: str) -> str:
    try:
        record = msgspec.json.decode(line, type=AuditRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AuditBroken(f"{path}: line {number} is not an audit record: {error}") from None
    if record.number != number or not hmac.compare_digest(record.previous.encode(), head.encode()):
        raise AuditBroken(f"{path}: line {number} does not follow the one before it: a record was changed or removed")
    return _hash(line)


def _short(text: str) -> str:
    # Redacted before it is cut: half a secret is harder to recognise. JSON can't contain lone surrogates.
    return redact(text)[:TEXT_MAX].encode(errors="backslashreplace").decode()


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
