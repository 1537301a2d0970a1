"""The digests of one log, of every retained index: the coordinator compares replicas with them.

They are computed, never journaled: entries can be filled out of order (an event is logged while an epoch before it is
undecided), so an entry's digest is not always known when its record is written. They follow from the records, from the
history id and from the digest at the cut, which the checkpoint keeps.
"""

from tops.model.log_points import DIGEST_BYTES, NO_DIGEST, LogPoint, chained
from tops.protocol.messages import LogEntry
from tops.protocol.records import Publisher


class LogChain:
    """Digests from `base` on; `base` is the last truncated index, or 0."""

    def __init__(self, history: str) -> None:
        self.history, self.base = history, 0
        self._index, self._digest = 0, NO_DIGEST  # of the end; the digest is also the last one of `_packed`
        self._packed = bytearray.fromhex(NO_DIGEST)
        self._waiting: dict[int, tuple[str, ...]] = {}  # filled entries with an undecided one before them

    @property
    def end(self) -> LogPoint:
        """The last index whose digest is known: everything up to it is filled."""
        return LogPoint(self.history, self._index, self._digest)

    def fill(self, entry: LogEntry, publisher: Publisher | None) -> None:
        """An index is decided; a repeated one changes nothing."""
        if entry.number == self._index + 1:  # the common case, on the path of every event of a durable type
            self._append(_ids(entry, publisher))
            while self._waiting and (ids := self._waiting.pop(self._index + 1, None)) is not None:
                self._append(ids)
        elif entry.number > self._index:
            self._waiting[entry.number] = _ids(entry, publisher)

    def _append(self, ids: tuple[str, ...]) -> None:
        self._index += 1
        self._digest = chained(self.history, self._digest, self._index, ids)
        self._packed += bytes.fromhex(self._digest)

    def at(self, index: int) -> str | None:
        """The digest at an index; None if the index is truncated or not decided yet."""
        place = (index - self.base) * DIGEST_BYTES
        return self._packed[place : place + DIGEST_BYTES].hex() or None if place >= 0 else None

    def between(self, after: int, upto: int) -> bytes:
        """Packed, from `after` to `upto`, both included."""
        return bytes(self._packed[(after - self.base) * DIGEST_BYTES : (upto - self.base + 1) * DIGEST_BYTES])

    def cut(self, index: int) -> None:
        """Truncate everything before `index`; the digest at `index` stays."""
        if index > self.base:
            del self._packed[: (index - self.base) * DIGEST_BYTES]
            self.base = index

    def begin(self, point: LogPoint) -> None:
        """Continue the log behind a point from a checkpoint, or from the replicas behind which a new history begins."""
        self.history, self.base = point.history, point.index
        self._index, self._digest = point.index, point.digest
        self._packed = bytearray.fromhex(point.digest)
        self._waiting = {index: ids for index, ids in self._waiting.items() if index > point.index}


def _ids(entry: LogEntry, publisher: Publisher | None) -> tuple[str, ...]:
    """The ids of what an entry commits, in order."""
    if publisher is not None:
        return (f"{publisher.node}#{publisher.incarnation}#{publisher.number}",)
    return tuple([logged.tx for logged in entry.transactions])
