"""What a site without a database must not forget: the promises of its participants, with their events.

A promise is on disk before the vote leaves, and its end before the outcome is confirmed. The journal also carries the
site's incarnation, so that a site with a data directory never lives the same life twice, whatever its clock says.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tops.effects import Memo
from tops.errors import JournalCorrupt
from tops.ids import TxId
from tops.participants import Received
from tops.runtime.journal import Journal, JournalOptions

REWRITE_AFTER = 10_000  # ended promises


class Lived(msgspec.Struct, frozen=True, array_like=True, tag=True):
    incarnation: int


class Promised(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`early`: a compensatable participant has committed already."""

    participant: str
    tx: TxId
    memo: Memo
    events: tuple[Received, ...]
    early: bool


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    participant: str
    tx: TxId


class Compensated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A participant that commits early has done so, and the events from this place on are undone again."""

    participant: str
    tx: TxId
    left: int


AnySiteRecord = Lived | Promised | Ended | Compensated

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnySiteRecord] = msgspec.msgpack.Decoder(AnySiteRecord)


class SiteJournal:
    """The journal of one site."""

    def __init__(self, journal: Journal, directory: Path) -> None:
        self._journal, self._directory = journal, directory
        self.incarnation = 0
        self.promises: dict[tuple[str, TxId], Promised] = {}
        self.compensated: dict[tuple[str, TxId], int] = {}
        self._ended = 0
        for sequence, payload in journal.read(journal.first_sequence):
            self._replay(sequence, payload)

    @classmethod
    def open(cls, directory: Path) -> "SiteJournal":
        return cls(Journal.open(directory, JournalOptions(segment_bytes=2**20)), directory)

    def _replay(self, sequence: int, payload: bytes) -> None:
        try:
            record = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JournalCorrupt(str(self._directory), 0, f"record {sequence} is none of a site's: {error}") from None
        match record:
            case Lived(incarnation=incarnation):
                self.incarnation = max(self.incarnation, incarnation)
            case Promised(participant=participant, tx=tx):
                self.promises[participant, tx] = record
            case Ended(participant=participant, tx=tx):
                self.promises.pop((participant, tx), None)
                self.compensated.pop((participant, tx), None)
            case Compensated(participant=participant, tx=tx, left=left):
                self.compensated[participant, tx] = left

    async def live(self) -> int:
        """Begin a new life; its incarnation is on disk when this returns."""
        self.incarnation = max(self.incarnation + 1, new_incarnation())
        await self._write(Lived(self.incarnation))
        return self.incarnation

    async def promise(self, promised: Promised) -> None:
        self.promises[promised.participant, promised.tx] = promised
        await self._write(promised)

    async def compensate(self, participant: str, tx: TxId, left: int) -> None:
        self.compensated[participant, tx] = left
        await self._write(Compensated(participant, tx, left))

    async def end(self, participant: str, tx: TxId) -> None:
        if self.promises.pop((participant, tx), None) is None:
            return
        self.compensated.pop((participant, tx), None)
        await self._write(Ended(participant, tx))
        self._ended += 1
        if self._ended >= REWRITE_AFTER:
            self._ended = 0
            await self._journal.rewrite([_encoder.encode(record) for record in self._state()])

    def _state(self) -> Iterator[AnySiteRecord]:
        yield Lived(self.incarnation)
        yield from self.promises.values()
        for (participant, tx), left in self.compensated.items():
            yield Compensated(participant, tx, left)

    async def _write(self, record: AnySiteRecord) -> None:
        self._journal.append(_encoder.encode(record))
        await self._journal.sync()

    async def close(self) -> None:
        await self._journal.close()


def new_incarnation() -> int:
    """Microseconds since 1970: grows from life to life while the clock does, and fits into 53 bits until 2255."""
    return time.time_ns() // 1000
