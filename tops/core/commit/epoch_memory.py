"""What a coordinator remembers of epochs that are decided, for as long as a voter may ask.

On a durable type the log itself is the memory. On other types a commit is remembered until everyone of its committing
set has told that it is carried out, and that has been noted on disk. No record means abort.

Voters learn that their finish is noted from the next prepare that they get: it names the number below which everything
is. Who gets none repeats its finish, and is answered.
"""

import msgspec

from tops.core.commit.decision_sender import DecisionSender
from tops.core.commit.epoch import hashed_all
from tops.core.log.event_log import EventLog
from tops.model.ids import TxId, voter_of
from tops.protocol.effects import Effect, Persist, ReadLog, SendTo, SetTimer
from tops.protocol.messages import Address, EpochId, FinishNoted, LogEntry
from tops.protocol.records import FinishesNoted

QUERY_FEED = "?"  # the feed name under which single entries are read to answer a question


class Decided(msgspec.Struct, frozen=True):
    """The remembered commit of an epoch that keeps no log entry, until everyone has finished."""

    digest: str
    committing: frozenset[str]
    transactions: tuple[TxId, ...]


class EpochMemory:
    """The decided epochs of one event type."""

    def __init__(
        self,
        event_type: str,
        incarnation: int,
        log: EventLog | None,
        note_after_s: float,
        decision_sender: DecisionSender,
    ) -> None:
        self.event_type, self.incarnation, self.log = event_type, incarnation, log
        self._decision_sender = decision_sender
        self._write_soon = SetTimer(("notes", event_type), note_after_s)
        self.decided: dict[EpochId, Decided] = {}
        self.notes: dict[tuple[EpochId, str], None] = {}  # finishes that are not on disk yet
        self._open: dict[int, None] = {}  # of this life, not aborted and not wholly noted; in their order
        self.queries: dict[int, list[tuple[EpochId, str, str, Address]]] = {}  # waiting for the disk

    def open(self, number: int) -> int:
        """A number is given out; returns the one below which every commit of this life is noted by all its voters."""
        self._open[number] = None
        return next(iter(self._open))

    def close(self, number: int) -> None:
        """The number came to nothing: there is no commit that anybody could ask for."""
        self._open.pop(number, None)

    def on_finished(self, epoch: EpochId, key: str, at: Address) -> list[Effect]:
        """A voter has carried out a commit: noted with the next ones, or told that it is noted already."""
        decided = self.decided.get(epoch)
        if decided is None or key not in decided.committing:
            return [SendTo(at, FinishNoted(epoch=epoch, voter=voter_of(key)))]
        first = not self.notes
        self.notes[epoch, key] = None
        return [self._write_soon] if first else []

    def write_notes(self) -> list[Effect]:
        """Remember, many at a time, who has finished; only then may a voter forget its promise."""
        notes, self.notes = self.notes, {}
        for epoch, voter in notes:
            self.drop_finished(epoch, voter)
        return [Persist(FinishesNoted(event_type=self.event_type, finished=tuple(notes)))] if notes else []

    def drop_finished(self, epoch: EpochId, voter: str) -> None:
        """When the last one has finished nobody is going to ask any more."""
        decided = self.decided.get(epoch)
        if decided is None:
            return
        left = decided.committing - {voter}
        if left:
            self.decided[epoch] = Decided(decided.digest, left, decided.transactions)
        else:
            del self.decided[epoch]
            if epoch.incarnation == self.incarnation:
                self.close(epoch.number)

    def respond(self, epoch: EpochId, digest: str, voter: str, requester: Address) -> list[Effect]:
        """A voter in doubt asks about an epoch that is not in flight."""
        if self.log is None:
            known = self.decided.get(epoch)
            committing = hashed_all(known.committing) if known is not None else frozenset()
        elif epoch.number in self.log.missing or (self.log.opening is not None and epoch.number > self.log.opening.end):
            return []  # a replica may have committed it: only who heard the decision can tell
        elif epoch.number > self.log.last_number or epoch.number in self.log.tail or epoch.number in self.log.undecided:
            committing = _committing(self.log.tail.get(epoch.number), epoch)
        else:
            # Too old for memory: the disk knows. If it no longer does, only an operator can tell.
            queries = self.queries.setdefault(epoch.number, [])
            if (epoch, digest, voter, requester) not in queries:
                queries.append((epoch, digest, voter, requester))
            return [ReadLog(self.event_type, QUERY_FEED, epoch.number, epoch.number)]
        return [self._decision_sender.in_response(epoch, digest, voter, committing, requester)]

    def on_read(self, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """What the disk knows about the numbers that were asked for."""
        effects: list[Effect] = []
        for entry in entries:
            for epoch, digest, voter, requester in self.queries.pop(entry.number, ()):
                committing = _committing(entry, epoch)
                effects.append(self._decision_sender.in_response(epoch, digest, voter, committing, requester))
        return effects


def _committing(entry: LogEntry | None, epoch: EpochId) -> frozenset[str]:
    """Who commits this very attempt: nobody, if the number went to another one or stayed void."""
    return entry.committing if entry is not None and entry.epoch == epoch else frozenset()
