"""A broker's records in its journal: appended, replayed at the start, and found by their index in a log.

`tops.server.retention` decides which of them are still needed.
"""

import asyncio
from array import array
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

import msgspec

from tops.journal import Journal, JournalOptions
from tops.model.errors import ConfigError, JournalClosed, JournalCorrupt, JournalFailed, NotInJournal
from tops.model.sizes import BUNDLE_BYTES
from tops.protocol.messages import PROTOCOL, LogEntry
from tops.protocol.records import AnyRecord, LogAppended, LogCut, LogDecided, Started, TypeDefined

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


class LogIndex:
    """The positions of one log's entries in the journal. Numbers may be filled out of order, and repeatedly."""

    def __init__(self) -> None:
        self.first = 0  # the lowest retained number
        self._sequences = array("Q")  # by number, from `first`; 0: none

    def put(self, number: int, sequence: int) -> None:
        if not self._sequences:
            self.first = number
        if number < self.first:
            missing = self.first - number
            self._sequences = array("Q", bytes(8 * missing)) + self._sequences
            self.first = number
        beyond = number - self.first - len(self._sequences) + 1
        if beyond > 0:
            self._sequences.frombytes(bytes(8 * beyond))
        self._sequences[number - self.first] = sequence

    def between(self, first: int, last: int) -> list[int]:
        """The journal's sequence numbers of these entries, in the order of the entries."""
        low = max(first - self.first, 0)
        found = self._sequences[low : max(last - self.first + 1, low)]
        return [sequence for sequence in found if sequence]

    def first_from(self, sequence: int, undecided: Container[int]) -> int:
        """The lowest number from which on all entries lie at or behind this sequence number of the journal."""
        for offset in range(len(self._sequences) - 1, -1, -1):
            if self._sequences[offset] < sequence and self.first + offset not in undecided:
                return self.first + offset + 1
        return self.first

    def sequence_of(self, number: int) -> int | None:
        """The sequence number in the journal of the first entry from `number` on, or None if there is none."""
        found = [s for s in self._sequences[max(number - self.first, 0) :] if s]
        return min(found, default=None)

    def truncate_before(self, number: int) -> None:
        dropped = min(max(number - self.first, 0), len(self._sequences))
        del self._sequences[:dropped]
        self.first += dropped

    def __len__(self) -> int:
        return len(self._sequences)


class RecordStore:
    """The journal of one broker, in terms of records."""

    def __init__(self, journal: Journal, directory: Path) -> None:
        self.journal, self.directory = journal, directory
        self.indexes: dict[str, LogIndex] = {}
        self.incarnation = 0  # the last one in the journal

    @classmethod
    def open(cls, directory: Path, options: JournalOptions | None = None) -> "RecordStore":
        """Open or create; raises JournalCorrupt or JournalLocked without changing anything."""
        return cls(Journal.open(directory, options), directory)

    def scan(self) -> list[TypeDefined | LogDecided | LogCut]:
        """The first pass: event types, how far logs are decided, the last incarnation, and the positions of entries.

        Every replay begins with the types (a parent before its children), how far logs are decided, and the digests
        where they are truncated: a checkpoint has these behind the records that need them."""
        types: dict[str, TypeDefined] = {}
        decided: dict[str, LogDecided] = {}
        cuts: dict[str, LogCut] = {}
        for sequence, record in self._records():
            if isinstance(record, TypeDefined):
                types[record.event_type.name] = record
            elif isinstance(record, LogDecided):
                decided[record.event_type] = record
            elif isinstance(record, LogCut):
                cuts[record.event_type] = record
            elif isinstance(record, Started):
                if record.protocol != PROTOCOL:
                    raise ConfigError(
                        f"{self.directory}: this journal was written by version {record.protocol} of the protocol, and "
                        f"this release reads version {PROTOCOL}: move the folder elsewhere and start with an empty one"
                    )
                self.incarnation = max(self.incarnation, record.incarnation)
            elif isinstance(record, LogAppended):
                self._index(record, sequence)
        parents_first = sorted(types.values(), key=lambda record: _generation(record, types))
        return [*parents_first, *decided.values(), *cuts.values()]

    def replay(self) -> Iterator[AnyRecord]:
        """Every record except those of the first pass, in order."""
        for _, record in self._records():
            if not isinstance(record, TypeDefined | LogDecided | LogCut):
                yield record

    def _records(self) -> Iterator[tuple[int, AnyRecord]]:
        for sequence, payload in self.journal.read(self.journal.first_sequence):
            yield sequence, self._decoded(payload, sequence)

    def _decoded(self, payload: bytes, sequence: int) -> AnyRecord:
        try:
            return _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise JournalCorrupt(
                str(self.directory), 0, f"record {sequence} is intact and no record of this version: {error}"
            ) from None

    def append(self, record: AnyRecord, *, soon: bool = True) -> int:
        """Queue a record; returns its number in the journal.

        The machine has already acted on the record. If it can't be encoded or queued, later records would follow a gap,
        so this ends the journal like a failed write, and with it the broker."""
        try:
            sequence = self.journal.append(_encoder.encode(record), soon=soon)
        except (JournalFailed, JournalClosed):
            raise
        except Exception as error:
            problem = f"a {type(record).__name__} can't be written: {type(error).__name__}: {str(error)[:200]}"
            raise self.journal.give_up(problem) from error
        if isinstance(record, LogAppended):
            self._index(record, sequence)
        return sequence

    def _index(self, record: LogAppended, sequence: int) -> None:
        index = self.indexes.get(record.event_type)
        if index is None:
            index = self.indexes[record.event_type] = LogIndex()
        index.put(record.entry.number, sequence)

    def is_durable(self, sequence: int) -> bool:
        return sequence < self.journal.durable_sequence

    def when_durable(self, sequence: int, callback: Callable[[], object]) -> None:
        self.journal.when_durable(sequence, callback)

    async def entries(self, event_type: str, first: int, last: int) -> tuple[LogEntry, ...]:
        """Entries of a log from the disk, by ascending number, without truncated ones, and without the last ones if all
        together would take much memory."""
        index = self.indexes.get(event_type)
        sequences = index.between(first, last) if index is not None else []
        if not sequences:
            return ()
        try:
            payloads = await asyncio.to_thread(self._payloads, sequences)
        except NotInJournal:  # truncated meanwhile
            return ()
        found: dict[int, LogEntry] = {}
        for sequence, payload in payloads:
            record = self._decoded(payload, sequence)
            if isinstance(record, LogAppended):
                found[record.entry.number] = record.entry
        return tuple(found[number] for number in sorted(found))

    def _payloads(self, sequences: list[int]) -> list[tuple[int, bytes]]:
        wanted, found, size = set(sequences), [], 0
        in_order = sequences == sorted(sequences)
        for sequence, payload in self.journal.read(min(sequences)):
            if sequence in wanted:
                found.append((sequence, payload))
                size += len(payload)
                if len(found) == len(wanted) or (in_order and size > BUNDLE_BYTES):
                    break
        return found

    async def close(self) -> None:
        await self.journal.close()


def _generation(record: TypeDefined, types: Mapping[str, TypeDefined]) -> int:
    parent = types.get(record.event_type.parent or "")
    return 0 if parent is None else _generation(parent, types) + 1
