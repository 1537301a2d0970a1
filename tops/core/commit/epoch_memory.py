"""The decided epochs of a coordinator, as long as a voter may request their outcomes.

On a durable type the log itself has the decisions. On other types a commit is kept until every voter of its committing
set has finished it, and a record of that is on disk. No record means abort (presumed abort).

A voter learns that its finish is noted from the next prepare that it gets: the prepare names the number below which all
finishes are noted. A voter that gets no prepare repeats its finish and gets a `FinishNoted`.
"""

import msgspec

from tops.core.commit.decision_sender import DecisionSender
from tops.core.commit.epoch import hashed_all
from tops.core.log.event_log import EventLog
from tops.model.ids import TxId, voter_of
from tops.protocol.effects import Effect, Persist, ReadLog, SendTo, SetTimer
from tops.protocol.messages import Address, EpochId, FinishNoted, LogEntry
from tops.protocol.records import FinishesNoted

QUERY_FEED = "?"  # the feed name under which single entries are read for the response to a request


class Decided(msgspec.Struct, frozen=True):
    """The commit of an epoch without a log entry, until every voter has finished it."""

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
        self._open: dict[int, None] = {}  # of this incarnation, not aborted and not completely noted; in their order
        self.queries: dict[int, list[tuple[EpochId, str, str, Address]]] = {}  # that wait for an entry from the disk

    def open(self, number: int) -> int:
        """A number is assigned; returns the one below which the finishes of all commits of this incarnation are
        noted."""
        self._open[number] = None
        return next(iter(self._open))

    def close(self, number: int) -> None:
        """Nothing was committed under this number: no voter can request its outcome."""
        self._open.pop(number, None)

    def on_finished(self, epoch: EpochId, key: str, at: Address) -> list[Effect]:
        """A voter has carried out a commit: note it together with the next ones, or confirm that it is noted."""
        decided = self.decided.get(epoch)
        if decided is None or key not in decided.committing:
            return [SendTo(at, FinishNoted(epoch=epoch, voter=voter_of(key)))]
        first = not self.notes
        self.notes[epoch, key] = None
        return [self._write_soon] if first else []

    def write_notes(self) -> list[Effect]:
        """Record, many at a time, which voters have finished. A voter may drop its memo only after that: if the record
        were lost, the coordinator would wait for a finish that is never repeated."""
        notes, self.notes = self.notes, {}
        for epoch, voter in notes:
            self.drop_finished(epoch, voter)
        return [Persist(FinishesNoted(event_type=self.event_type, finished=tuple(notes)))] if notes else []

    def drop_finished(self, epoch: EpochId, voter: str) -> None:
        """When the last voter has finished, no voter requests the outcome any more."""
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
        """The response to a voter in doubt about an epoch that is not in flight."""
        if self.log is None:
            known = self.decided.get(epoch)
            committing = hashed_all(known.committing) if known is not None else frozenset()
        elif epoch.number in self.log.missing or (self.log.opening is not None and epoch.number > self.log.opening.end):
            return []  # a replica may have committed it: only a node that received the decision can resolve the doubt
        elif epoch.number > self.log.last_number or epoch.number in self.log.tail or epoch.number in self.log.undecided:
            committing = _committing(self.log.tail.get(epoch.number), epoch)
        else:
            # Too old for memory: read the entry from disk. If it is truncated, only an operator can resolve the doubt.
            queries = self.queries.setdefault(epoch.number, [])
            if (epoch, digest, voter, requester) not in queries:
                queries.append((epoch, digest, voter, requester))
            return [ReadLog(self.event_type, QUERY_FEED, epoch.number, epoch.number)]
        return [self._decision_sender.in_response(epoch, digest, voter, committing, requester)]

    def on_read(self, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """The entries of the requested numbers, from the disk."""
        effects: list[Effect] = []
        for entry in entries:
            for epoch, digest, voter, requester in self.queries.pop(entry.number, ()):
                committing = _committing(entry, epoch)
                effects.append(self._decision_sender.in_response(epoch, digest, voter, committing, requester))
        return effects


def _committing(entry: LogEntry | None, epoch: EpochId) -> frozenset[str]:
    """The voters that commit exactly this attempt: none if the number went to another attempt or to a no-op entry."""
    return entry.committing if entry is not None and entry.epoch == epoch else frozenset()
