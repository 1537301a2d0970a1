"""A point in a history of a log: (history, index, digest), comparable across restores and restarts.

A log has a random history id. The digest at an index is a hash over everything committed up to it: each entry's digest
covers the history id, the digest before it, its index and the ids of what was committed under it. An entry that changes
nothing leaves the digest as it is. Two nodes with the same digest at an index hold the same prefix of the same log; a
log that was restored from a backup and continued differently has other digests from the first different entry on.
"""

import hashlib
from collections.abc import Iterable

import msgspec

DIGEST_BYTES = 16
NO_DIGEST = "0" * (2 * DIGEST_BYTES)  # before the first entry

_encoder = msgspec.msgpack.Encoder()


class LogPoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An index of a log, and the digest of everything up to it."""

    history: str
    index: int
    digest: str

    def __str__(self) -> str:
        return f"index {self.index} of history {self.history[:8] or '-'} (digest {self.digest[:8]})"


BEGINNING = LogPoint("", 0, NO_DIGEST)


class Digests(msgspec.Struct, frozen=True, gc=False):
    """The digests at `after` and at every index behind it, packed."""

    after: int
    packed: bytes

    def at(self, index: int) -> str | None:
        place = (index - self.after) * DIGEST_BYTES
        found = self.packed[place : place + DIGEST_BYTES] if place >= 0 else b""
        return found.hex() if len(found) == DIGEST_BYTES else None

    def behind(self, index: int) -> bytes:
        """The digests of the indexes after `index`."""
        return self.packed[(index - self.after + 1) * DIGEST_BYTES :]


NO_DIGESTS = Digests(0, b"")


def chained(history: str, before: str, index: int, ids: Iterable[str]) -> str:
    """The digest at `index`, behind the digest before it; no ids: a no-op entry, which leaves the digest as it is."""
    committed = tuple(ids)
    if not committed:
        return before
    content = _encoder.encode((history, before, index, committed))
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
