"""The journal of a site without a database: the prepared work of its participants, with the events.

Prepared work is on disk before the vote is sent, and its end before the outcome is confirmed. The journal also has the
site's incarnation, so that a site with a data directory never uses an incarnation twice, whatever its clock shows.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tops.journal import Journal, JournalOptions
from tops.model.errors import JournalCorrupt
from tops.model.ids import TxId
from tops.protocol.effects import Memo, PreparedWork
from tops.runtime.participants import Received
from tops.security import check_private_folder

REWRITE_AFTER = 10_000  # pieces of prepared work that have ended


class IncarnationStarted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    incarnation: int


class WorkPrepared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`early`: a compensatable participant has committed already."""

    participant: str
    tx: TxId
    memo: Memo
    events: tuple[Received, ...]
    early: bool


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outcome is carried out. A committed memo is kept until the coordinator has noted the commit."""

    participant: str
    tx: TxId
    committed: bool


class MemoDropped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The coordinator has noted the commits of this memo."""

    participant: str
    memo: Memo


class Compensated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A participant has committed early, and the events from index `left` on are compensated."""

    participant: str
    tx: TxId
    left: int


AnySiteRecord = IncarnationStarted | WorkPrepared | Ended | MemoDropped | Compensated

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnySiteRecord] = msgspec.msgpack.Decoder(AnySiteRecord)


class SiteJournal:
    """The journal of one site."""

    def __init__(self, journal: Journal, directory: Path) -> None:
        self._journal, self._directory = journal, directory
        self.incarnation = 0
        self.prepared: dict[tuple[str, TxId], WorkPrepared] = {}
        self.kept: dict[tuple[str, TxId], WorkPrepared] = {}
        self.compensated: dict[tuple[str, TxId], int] = {}
        self._ended = 0
        for sequence, payload in journal.read(journal.first_sequence):
            self._replay(sequence, payload)

    @classmethod
    def open(cls, directory: Path) -> "SiteJournal":
        check_private_folder(directory)
        return cls(Journal.open(directory, JournalOptions(segment_bytes=2**20)), directory)

    def _replay(self, sequence: int, payload: bytes) -> None:
        try:
            record = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JournalCorrupt(
                str(self._directory), 0, f"record {sequence} is no record of a site: {error}"
            ) from None
        match record:
            case IncarnationStarted(incarnation=incarnation):
                self.incarnation = max(self.incarnation, incarnation)
            case WorkPrepared(participant=participant, tx=tx):
                self.prepared[participant, tx] = record
            case Ended(participant=participant, tx=tx, committed=committed):
                self._take_end(participant, tx, committed)
            case MemoDropped(participant=participant, memo=memo):
                self._take_dropped(participant, memo)
            case Compensated(participant=participant, tx=tx, left=left):
                self.compensated[participant, tx] = left

    async def begin_incarnation(self) -> int:
        """Begin a new incarnation, which is on disk when this returns."""
        self.incarnation = max(self.incarnation + 1, new_incarnation())
        await self._write(IncarnationStarted(self.incarnation))
        return self.incarnation

    async def prepare(self, work: WorkPrepared) -> None:
        self.prepared[work.participant, work.tx] = work
        await self._write(work)

    async def compensate(self, participant: str, tx: TxId, left: int) -> None:
        self.compensated[participant, tx] = left
        await self._write(Compensated(participant, tx, left))

    async def end(self, participant: str, tx: TxId, committed: bool) -> None:
        if not self._take_end(participant, tx, committed):
            return
        await self._write(Ended(participant, tx, committed))
        self._ended += 1
        if self._ended >= REWRITE_AFTER:
            self._ended = 0
            await self._journal.rewrite([_encoder.encode(record) for record in self._state()])

    def forget(self, participant: str, memo: Memo) -> None:
        """Delete a memo. Nothing waits for the disk: to lose this costs one more request to the coordinator."""
        self._take_dropped(participant, memo)
        self._journal.append(_encoder.encode(MemoDropped(participant, memo)))

    def _take_end(self, participant: str, tx: TxId, committed: bool) -> bool:
        work = self.prepared.pop((participant, tx), None)
        self.compensated.pop((participant, tx), None)
        if work is None:
            return False
        if committed:
            self.kept[participant, tx] = msgspec.structs.replace(work, events=())
        return True

    def _take_dropped(self, participant: str, memo: Memo) -> None:
        for tx in memo.transactions:
            self.kept.pop((participant, tx), None)

    def open_prepared_work(self, participant: str) -> list[PreparedWork]:
        """Prepared work whose outcome is not known here yet."""
        found: dict[Memo, list[TxId]] = {}
        for (key, tx), work in self.prepared.items():
            if key == participant:
                found.setdefault(work.memo, []).append(tx)
        return [PreparedWork(memo, tuple(transactions)) for memo, transactions in found.items()]

    def committed_memos(self, participant: str) -> list[Memo]:
        """Memos of commits that are carried out and that the coordinator may not have noted yet."""
        still_open = [prepare.memo for prepare in self.open_prepared_work(participant)]
        kept = {p.memo: None for (key, _), p in self.kept.items() if key == participant}
        return [memo for memo in kept if memo not in still_open]

    def _state(self) -> Iterator[AnySiteRecord]:
        yield IncarnationStarted(self.incarnation)
        yield from self.prepared.values()
        for work in self.kept.values():
            yield work
            yield Ended(work.participant, work.tx, True)
        for (participant, tx), left in self.compensated.items():
            yield Compensated(participant, tx, left)

    async def _write(self, record: AnySiteRecord) -> None:
        self._journal.append(_encoder.encode(record))
        await self._journal.sync()

    async def close(self) -> None:
        await self._journal.close()


INCARNATIONS_PER_S = 1_000_000


def new_incarnation() -> int:
    """Microseconds since 1970: it grows with each start as long as the clock does, and fits into 53 bits until 2255."""
    return time.time_ns() // 1000
