"""The databases of simulated participants: their content survives a crash of their site.

Each operation is atomic, like a database transaction. The checkers read these, and not the state of the machines.
"""

import hashlib

import msgspec

from tops.model.ids import TxId
from tops.model.log_points import NO_DIGEST, Digests, LogPoint
from tops.model.log_points import chained as chained_digest
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.effects import BatchPrepared, Memo, PreparedWork
from tops.protocol.messages import EpochId, EpochMember, Event, LogEntry


class Broken(Exception):
    """A participant got a call that no correct machine makes."""


class WronglyApplied(Broken):
    """A replica was to apply something that does not continue its state."""


class Done(msgspec.Struct, frozen=True):
    """A transaction as it was applied."""

    tx: TxId
    events: tuple[str, ...]  # the events' marks, in the order of consumption


def marks(events: "tuple[Event, ...] | list[Event]") -> tuple[str, ...]:
    """The unique mark that every simulated event carries."""
    return tuple(e.body["mark"] for e in events)


def chained(digest: str, tx: TxId, applied: tuple[str, ...]) -> str:
    """The hash of everything up to and including this transaction."""
    return hashlib.sha256(f"{digest}{tx}{applied}".encode()).hexdigest()


class CallbackDatabase:
    """The database of a participant that works by callbacks; a compensatable one commits when it prepares."""

    def __init__(self, compensatable: bool) -> None:
        self.compensatable = compensatable
        self.running: dict[TxId, list[Event]] = {}  # lost in a crash
        self.prepared: dict[TxId, tuple[Memo, tuple[str, ...]]] = {}
        self.early: dict[TxId, tuple[Memo, tuple[str, ...]]] = {}
        self.committed: dict[TxId, Done] = {}
        self.local: dict[TxId, Done] = {}  # committed with local scope
        self.local_incarnation: dict[TxId, int] = {}
        self.incarnation = 0
        self.compensated: dict[TxId, tuple[str, ...]] = {}  # marks in the order in which they were undone
        self.finished: dict[EpochId, Memo] = {}  # committed, and not noted by the coordinator
        self.taken: list[int] = []  # log indexes of events that were processed one by one
        self.offered: set[tuple[int, TxId | None]] = set()  # what a reader has passed on since it began to read

    def notify(self, tx: TxId, event: Event) -> None:
        self.running.setdefault(tx, []).append(event)

    def prepare(self, tx: TxId, memo: Memo | None) -> None:
        work = marks(self.running.get(tx, []))
        if memo is None:
            self.running.setdefault(tx, [])
            return
        if tx in self.prepared or tx in self.early:  # a new attempt prepares it again
            work = (self.prepared.get(tx) or self.early[tx])[1]
        if self.compensatable:
            self.compensated.pop(tx, None)  # undone in a failed attempt, and done again in this one
            self.early[tx] = (memo, work)
            self.committed[tx] = Done(tx, work)
        else:
            self.prepared[tx] = (memo, work)

    def commit(self, tx: TxId, number: int | None) -> None:
        held = tx in self.running
        work = marks(self.running.pop(tx, []))
        if tx in self.early:
            memo, _ = self.early.pop(tx)
            self.finished[memo.epoch] = memo
        elif tx in self.prepared:
            if tx in self.committed:
                raise Broken(f"{tx} is committed twice")
            memo, prepared = self.prepared.pop(tx)
            self.committed[tx] = Done(tx, prepared)
            self.finished[memo.epoch] = memo
        elif tx not in self.committed:
            if not held:
                raise Broken(f"{tx} is to be committed and was never prepared")
            if self.local_incarnation.get(tx) == self.incarnation and number is None:
                raise Broken(f"{tx} is committed twice as a local transaction")
            self._offer(number, tx)
            # It stores ids and log indexes, so it recognises what a restarted site gets again.
            self.local.setdefault(tx, Done(tx, work))
            self.local_incarnation[tx] = self.incarnation

    def abort(self, tx: TxId) -> None:
        self.running.pop(tx, None)
        self.prepared.pop(tx, None)
        if tx in self.early:
            _, work = self.early.pop(tx)
            if tx in self.compensated:
                raise Broken(f"{tx} is compensated twice")
            self.compensated[tx] = tuple(reversed(work))
            later = [t for t in list(self.committed)[list(self.committed).index(tx) + 1 :] if t not in self.early]
            if later:
                raise Broken(f"{tx} is compensated under {later}, which were committed on top of it")
            del self.committed[tx]

    def _offer(self, number: int | None, tx: TxId | None) -> None:
        if number is not None:
            if (number, tx) in self.offered:
                raise Broken(f"{tx or 'the event'} at number {number} is read twice")
            self.offered.add((number, tx))

    def take(self, number: int) -> None:
        self._offer(number, None)
        if not self.taken or number > self.taken[-1]:  # it stores its position, so it recognises a repeated delivery
            self.taken.append(number)

    def crash(self) -> None:
        self.running.clear()
        self.incarnation += 1

    def memos(self) -> list[Memo]:
        """The memos of undecided prepared work, once each."""
        held = {**self.prepared, **self.early}
        found = {memo.epoch: memo for memo, _ in held.values()}
        return [
            msgspec.structs.replace(memo, transactions=tuple(t for t in memo.transactions if t in held))
            for memo in sorted(found.values(), key=repr)
        ]

    def prepared_work(self) -> list[PreparedWork]:
        held: dict[Memo, list[TxId]] = {}
        for tx, (memo, _) in [*self.prepared.items(), *self.early.items()]:
            held.setdefault(memo, []).append(tx)
        return [PreparedWork(memo, tuple(transactions)) for memo, transactions in held.items()]

    def kept(self) -> list[Memo]:
        """The memos of commits that are carried out and not dropped yet."""
        still_open = {memo.epoch for memo in self.memos()}
        return [memo for memo in self.finished.values() if memo.epoch not in still_open]


class PreparedEpoch(msgspec.Struct, frozen=True):
    """An epoch that waits for its decision, and the point of the database after its commit."""

    memo: Memo
    members: tuple[EpochMember, ...]
    point: LogPoint


class ReplicaDatabase:
    """The database of a replica: a row per key, the applied index, and at most one prepared epoch."""

    def __init__(self) -> None:
        self.position = 0
        self.history = ""
        self.digests: dict[int, str] = {0: NO_DIGEST}  # of the log, by position
        self.rows: dict[str, list[str]] = {}  # key -> marks that were appended to it
        self.hashes: dict[int, str] = {0: ""}  # position -> hash of everything applied up to there
        self.applied: dict[TxId, tuple[str, ...]] = {}
        self.prepared: PreparedEpoch | None = None
        self.failing_keys: set[str] = set()  # keys that only this replica rejects
        self.miscounted_keys: set[str] = set()  # keys for which only this replica counts more rows

    @property
    def point(self) -> LogPoint:
        return LogPoint(self.history, self.position, self.digests[self.position])

    def prepare(self, memo: Memo, members: tuple[EpochMember, ...], before: LogPoint) -> BatchPrepared:
        if memo.epoch.number != self.position + 1 or before.digest != self.point.digest:
            raise Broken(f"{memo.epoch} is prepared behind {before} at {self.point}")
        excluded = {m.tx: why for m in members if (why := self._rejection(m.events or ())) is not None}
        accepted = tuple(m for m in members if m.tx not in excluded)
        number = memo.epoch.number
        digest = chained_digest(before.history, before.digest, number, [m.tx for m in accepted])
        self.prepared = PreparedEpoch(memo, accepted, LogPoint(before.history, number, digest))
        rows = tuple(() if m.tx in excluded else tuple(map(self._rows, m.events or ())) for m in members)
        return BatchPrepared(excluded, rows, log_digest=digest)

    def _rows(self, event: Event) -> int:
        return 2 if event.body["key"] in self.miscounted_keys else 1

    def _rejection(self, events: tuple[Event, ...]) -> Rejection | None:
        for event in events:
            if event.body.get("bad"):
                return Rejection(RejectionCode.CONSTRAINT, "violates a constraint")
            if event.body["key"] in self.failing_keys:
                return Rejection(RejectionCode.ERROR, "this replica's disk fails")
        return None

    def finish(self, memo: Memo, committed: bool) -> LogPoint | None:
        mine = self.prepared is not None and self.prepared.memo.epoch == memo.epoch
        if not committed:
            if mine:
                self.prepared = None
            return None
        if not mine or self.prepared is None:
            raise Broken(f"{memo.epoch} is to be committed and is not prepared")
        prepared, self.prepared = self.prepared, None
        self._advance(prepared.point, [(m.tx, m.events or ()) for m in prepared.members])
        return self.point

    def apply(self, entries: tuple[LogEntry, ...], upto: int, history: str, digests: Digests) -> LogPoint:
        if self.prepared is not None:
            raise WronglyApplied(f"the log is applied while {self.prepared.memo.epoch} is prepared")
        if digests.at(self.position) != self.point.digest:
            raise WronglyApplied(f"what does not continue {self.point} is applied: {digests.at(self.position)}")
        known = {entry.number: entry for entry in entries}
        for number in range(self.position + 1, upto + 1):
            # Nothing to apply: a no-op entry, or an index that the replica committed itself.
            work = [(t.tx, t.events) for t in known[number].transactions] if number in known else []
            self._advance(LogPoint(history, number, digests.at(number) or ""), work)
        return self.point

    def _advance(self, point: LogPoint, work: "list[tuple[TxId, tuple[Event, ...]]]") -> None:
        number = point.index
        if number != self.position + 1:
            raise WronglyApplied(f"number {number} is applied at position {self.position}")
        digest = self.hashes[self.position]
        for tx, events in work:
            if tx in self.applied:
                raise WronglyApplied(f"{tx} is applied twice at a replica")
            self.applied[tx] = marks(events)
            for event in events:
                self.rows.setdefault(event.body["key"], []).append(event.body["mark"])
            digest = chained(digest, tx, self.applied[tx])
        self.position, self.history = number, point.history
        self.digests[number] = point.digest
        self.hashes[number] = digest

    def memos(self) -> list[Memo]:
        return [] if self.prepared is None else [self.prepared.memo]

    def prepared_work(self) -> list[PreparedWork]:
        return [PreparedWork(memo, memo.transactions) for memo in self.memos()]

    def kept(self) -> list[Memo]:
        return []  # the log has what a replica has finished
