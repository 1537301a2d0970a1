"""The sub-tx executor of a replica: whole epochs as one unit of work, and the log for everything it missed.

The replica's durable state is its database: a prefix of the log, plus at most one prepared epoch. A prepare is held
until everything before it is applied; while an epoch is prepared nothing else is applied, so that the database is
always such a prefix.

    IDLE -> RUNNING -> PREPARED -> FINISHING -> IDLE
    IDLE -> APPLYING -> IDLE                              entries that others have committed, from the log
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import Enum

from tops.core.participant.calls import Calls
from tops.core.participant.doubt import Doubt
from tops.model.ids import NodeId, TxId, hashed
from tops.model.log_points import Digests, LogPoint
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.effects import (
    Alarm,
    ApplyEntries,
    BatchPrepared,
    CancelTimer,
    Effect,
    FinishBatch,
    HistoryJudged,
    Memo,
    PrepareBatch,
    SendTo,
)
from tops.protocol.messages import (
    Address,
    EpochDecided,
    EpochFinished,
    EpochId,
    EpochMember,
    EpochVoted,
    Event,
    HistoryDiffers,
    HistoryRejected,
    LogDelivered,
    LogEntry,
    PrepareEpoch,
)

COLLECTED_MAX = 10_000
COMMITTED_KEPT = 64
ENTRIES_AT_ONCE = 256  # or as many as one delivery brings


class Work(Enum):
    IDLE = "idle"
    RUNNING = "running"  # an epoch is being prepared
    PREPARED = "prepared"  # prepared; only its decision, or a newer attempt, ends it
    FINISHING = "finishing"  # its decision is being carried out
    APPLYING = "applying"  # entries of the log are being applied


class EpochExecutor:
    """One replica of a replica set, at its own site."""

    def __init__(
        self,
        subscription: int,
        name: str,
        coordinator: NodeId,
        point: LogPoint,
        calls: Calls,
        brokers: Sequence[NodeId],
        doubt_s: float,
        progressed: Callable[[bool], list[Effect]],
    ) -> None:
        self.subscription, self.name, self.coordinator = subscription, name, coordinator
        self.point = point  # what the database holds
        self.rejected = False  # the database holds another history than the coordinator's log
        self.work = Work.IDLE
        self.memo: Memo | None = None  # of the epoch in RUNNING, PREPARED or FINISHING
        self.doubt: Doubt | None = None
        self.doubts: deque[Memo] = deque()  # prepared epochs found after a crash, resolved before anything else
        self.collected: OrderedDict[TxId, list[Event]] = OrderedDict()  # of interactive transactions, until they end
        self._calls, self._brokers, self._doubt_s = calls, brokers, doubt_s
        self._progressed = progressed  # called with whether the replica has just caught up
        self._held: PrepareEpoch | None = None
        self._decision: frozenset[str] | None = None
        self._log: dict[tuple[int, int], LogDelivered] = {}
        self._leaving = False
        self._accepted: tuple[TxId, ...] = ()  # of the prepared epoch: what this replica does not exclude
        self._prepared_digest = ""  # of the log with that epoch; empty if it was found after a crash
        self._decided_digest = ""  # of the log, as the decision names it
        self._committed: OrderedDict[int, tuple[TxId, ...]] = OrderedDict()  # the latest numbers

    @property
    def position(self) -> int:
        return self.point.index

    @property
    def decided(self) -> int:
        """The highest index that is certainly decided: an epoch is prepared only when its predecessor is decided."""
        prepared = [memo.epoch.number - 1 for memo in (self.memo, *self.doubts) if memo is not None]
        return max([self.position, *prepared])

    @property
    def received(self) -> int:
        """The last index that has arrived here, applied or not."""
        return max([self.position, *(delivered.upto for delivered in self._log.values())])

    # -------------------------------------------------------------------------------------------------- preparing

    def expect(self, tx: TxId) -> None:
        """An interactive transaction on the replica set was announced."""
        self.collected.setdefault(tx, [])
        if len(self.collected) > COLLECTED_MAX:
            self.collected.popitem(last=False)  # a prepare of it gets an INCOMPLETE rejection

    def collect(self, tx: TxId, sequence: int, event: Event) -> None:
        """An event of an interactive transaction that is expected; nothing is executed before prepare."""
        events = self.collected[tx]
        if sequence == len(events) + 1:
            events.append(event)

    def forget(self, tx: TxId) -> None:
        """The transaction ended without a commit here: drop its events."""
        self.collected.pop(tx, None)

    def on_prepare(self, prepare: PrepareEpoch) -> list[Effect]:
        """Hold the newest prepare until everything before its index is applied."""
        if prepare.epoch.number <= self.position or (self._held and not prepare.epoch.newer_than(self._held.epoch)):
            return []
        if self.memo is not None and not prepare.epoch.newer_than(self.memo.epoch):
            return []
        self._held = prepare
        return self._go_on()

    def _start(self, prepare: PrepareEpoch) -> list[Effect]:
        if prepare.before.digest != self.point.digest:
            return self._differs(prepare.epoch.event_type, prepare.before)
        self._held, self._decision, self.work = None, None, Work.RUNNING
        before = LogPoint(prepare.before.history, self.position, self.point.digest)
        self.memo = Memo(prepare.epoch, prepare.digest, prepare.voter, tuple([m.tx for m in prepare.members]))
        members, missing = self._with_events(prepare.members)
        memo = self.memo

        def prepared(result: BatchPrepared) -> list[Effect]:
            excluded = {**missing, **result.excluded}
            accepted = [tx for tx in memo.transactions if tx not in excluded] if excluded else memo.transactions
            self._accepted, self._prepared_digest = tuple(accepted), result.log_digest
            return self._prepared(memo, _aligned(result, memo, missing), excluded)

        call = self._calls.open(prepared)
        return [*self._agrees(), PrepareBatch(self.subscription, call, memo, members, before)]

    def _with_events(self, members: Sequence[EpochMember]) -> tuple[tuple[EpochMember, ...], dict[TxId, Rejection]]:
        """Members with their events; those whose events did not all arrive are excluded."""
        whole: list[EpochMember] = []
        missing: dict[TxId, Rejection] = {}
        for member in members:
            if member.events is not None:
                whole.append(member)
                continue
            events = self.collected.get(member.tx, [])
            if len(events) != member.last_sequence:
                text = f"{len(events)} of {member.last_sequence} events arrived"
                missing[member.tx] = Rejection(RejectionCode.INCOMPLETE, text)
            else:
                whole.append(EpochMember(member.tx, member.last_sequence, tuple(events)))
        return tuple(whole), missing

    def _prepared(self, memo: Memo, result: BatchPrepared, excluded: dict[TxId, Rejection]) -> list[Effect]:
        self.work = Work.PREPARED
        self.doubt = Doubt(memo, self._brokers, self._doubt_s)
        if self._decision is not None:
            return self._finish(self._decision)
        if self._held is not None and self._held.epoch.number == memo.epoch.number:
            return self._go_on()
        vote = EpochVoted(
            epoch=memo.epoch,
            digest=memo.digest,
            voter=memo.voter,
            excluded={tx: rejection.bounded() for tx, rejection in excluded.items()},
            rows=result.rows,
            results=result.results,
        )
        return [SendTo(Address(memo.epoch.coordinator), vote), self.doubt.wait]

    # --------------------------------------------------------------------------------------------------- the decision

    def on_decided(self, decided: EpochDecided) -> list[Effect]:
        return self.learn(decided.epoch, decided.digest, decided.committing, decided.log_digest)

    def is_at(self, epoch: EpochId) -> bool:
        """Whether this attempt is prepared here, being prepared, or held."""
        return any(known is not None and known.epoch == epoch for known in (self.memo, self._held))

    def learn(self, epoch: EpochId, digest: str, committing: frozenset[str], log_digest: str) -> list[Effect]:
        """The decision on an attempt, from the coordinator or relayed by a peer that received it."""
        if self._held is not None and self._held.epoch == epoch:
            self._held = None
        if self.memo is None or self.memo.epoch != epoch or self.memo.digest != digest:
            return []
        if self.memo.epoch == epoch:
            self._decided_digest = log_digest
        if self.work is Work.RUNNING:
            # The database is still preparing: the decision is carried out when the prepare has returned.
            self._decision = committing
            return []
        return self._finish(committing) if self.work is Work.PREPARED else []

    def _finish(self, committing: frozenset[str]) -> list[Effect]:
        memo = self.memo
        if memo is None:
            return []
        committed = hashed(memo.voter) in committing
        differs: list[Effect] = []
        decided, prepared = self._decided_digest, self._prepared_digest
        if committed and decided and prepared and decided != prepared:
            # The prepared members are not the decided ones. Whatever the cause, they must not become part of the log.
            committed = False
            text = (
                f"{memo.epoch}: digest {prepared[:8]} was prepared and {decided[:8]} decided: rolled back, to be "
                "applied from the log"
            )
            differs = [Alarm("other-history", text)]
        self.work = Work.FINISHING

        def finished(point: LogPoint | None) -> list[Effect]:
            return self._finished(memo, committed, point, decided)

        call = self._calls.open(finished)
        effects: list[Effect] = [CancelTimer(self.doubt.timer)] if self.doubt is not None else []
        return [*effects, *differs, FinishBatch(self.subscription, call, memo, committed)]

    def _finished(self, memo: Memo, committed: bool, point: LogPoint | None, decided: str) -> list[Effect]:
        self.work, self.memo, self.doubt = Work.IDLE, None, None
        self._prepared_digest = self._decided_digest = ""
        effects: list[Effect] = []
        if committed and point is not None:
            if point.index > self.position:
                self.point = point
            if decided and point.index == memo.epoch.number and point.digest != decided:
                # Prepared before a crash, with other members than what was decided.
                log = LogPoint(point.history, point.index, decided)
                effects += self._differs(memo.epoch.event_type, log)
            self._committed[memo.epoch.number] = self._accepted
            if len(self._committed) > COMMITTED_KEPT:
                self._committed.popitem(last=False)
            finished = EpochFinished(epoch=memo.epoch, voter=memo.voter, note=False)
            effects.append(SendTo(Address(memo.epoch.coordinator), finished))
            if self.collected:
                for tx in memo.transactions:
                    self.collected.pop(tx, None)
        return effects + self._go_on()

    def committed_after(self, number: int) -> tuple[TxId, ...]:
        """The transactions that this replica knows to have committed behind an index of the log."""
        return tuple(tx for n, transactions in self._committed.items() if n > number for tx in transactions)

    # ------------------------------------------------------------------------------------------------------- the log

    def on_log(self, delivered: LogDelivered) -> list[Effect]:
        """Entries of the log, in order; they are applied when no epoch is prepared."""
        if delivered.upto <= self.position:
            return []
        self._log[delivered.after, delivered.upto] = delivered
        return self._go_on()

    def _next_entries(self) -> list[Effect]:
        """Apply the entries that continue at the applied index without a gap; several deliveries are applied together.

        Deliveries before the applied index are dropped, those beyond a gap wait. If the digest of a delivery does not
        match the database, the delivery belongs to another history: nothing of it is applied."""
        entries: list[LogEntry] = []
        upto, digest, history = self.position, self.point.digest, ""
        packed = bytearray.fromhex(digest)
        for after, end in sorted(self._log):
            if after > upto or len(entries) >= ENTRIES_AT_ONCE:
                break
            delivered = self._log.pop((after, end))
            if end <= upto:
                continue
            digests = Digests(after, delivered.digests)
            found = digests.at(upto)
            if found != digest:
                log = LogPoint(delivered.history, upto, found or "")
                return self._differs(delivered.event_type, log)
            entries += [entry for entry in delivered.entries if entry.number > upto]
            packed += digests.behind(upto)
            upto, history = end, delivered.history
            digest = digests.at(end) or ""
        if upto == self.position:
            return []
        return self._agrees() + self._apply(tuple(entries), upto, history, Digests(self.position, bytes(packed)))

    def _apply(self, entries: tuple[LogEntry, ...], upto: int, history: str, digests: Digests) -> list[Effect]:
        self.work = Work.APPLYING

        def applied(point: LogPoint) -> list[Effect]:
            self.work = Work.IDLE
            if point.index > self.position:
                self.point = point
            for entry in entries:
                for logged in entry.transactions:
                    self.collected.pop(logged.tx, None)
            return ([] if self._leaving else self._progressed(not self._log)) + self._go_on()

        call = self._calls.open(applied)
        return [ApplyEntries(self.subscription, call, entries, upto, history, digests)]

    # ------------------------------------------------------------------------------------------------ other histories

    def on_rejected(self, rejected: HistoryRejected) -> list[Effect]:
        """The coordinator has compared this replica's point with its log, and they differ."""
        return self._differs(rejected.event_type, rejected.point)

    def _differs(self, event_type: str, log: LogPoint) -> list[Effect]:
        """Vote on nothing and apply nothing on top of another history; the next message is compared again."""
        self._held = None
        self._log.clear()
        if self.rejected:
            return []
        self.rejected = True
        problem = (
            f"the database holds {self.point} of {event_type}, and the log of coordinator {self.coordinator} has "
            f"{log}: nothing is applied; if this database is the wrong one, stop the replica, empty its database and "
            f"start it again, then it gets a copy of another one"
        )
        report = HistoryDiffers(name=self.name, event_type=event_type, point=self.point)
        return [
            Alarm("other-history", problem),
            HistoryJudged(self.subscription, problem),
            SendTo(Address(self.coordinator), report),
        ]

    def _agrees(self) -> list[Effect]:
        if not self.rejected:
            return []
        self.rejected = False
        return [HistoryJudged(self.subscription, "")]

    # -------------------------------------------------------------------------------------------------- what is next

    def _go_on(self) -> list[Effect]:
        """Start the next work, if none is in progress: resolve doubts, then apply the log, then prepare the next epoch.

        This order keeps the database a prefix of the log."""
        if self.work is Work.PREPARED and self._held is not None and self.memo is not None:
            if self._held.epoch.number == self.memo.epoch.number:
                # A newer attempt at the same number: preparing it undoes the old one.
                if self._held.before.digest != self.point.digest:
                    return self._differs(self._held.epoch.event_type, self._held.before)
                effects: list[Effect] = [CancelTimer(self.doubt.timer)] if self.doubt is not None else []
                return effects + self._start(self._held)
            return []
        if self.work is not Work.IDLE:
            return []
        if self.doubts:
            return self._resume_doubt()
        if self._leaving:
            return []
        if effects := self._next_entries():
            return effects
        if self._held is not None:
            if self._held.epoch.number <= self.position:
                self._held = None
            elif self._held.epoch.number == self.position + 1:
                return self._start(self._held)
        return []

    def leave(self) -> bool:
        """The subscription ended: begin nothing new. Returns whether a prepared epoch still waits for its decision."""
        self._leaving, self._held = True, None
        return self.memo is not None or bool(self.doubts)

    def prepared_as(self, voter: str) -> bool:
        """Whether an epoch is prepared, or held, under that name."""
        return any(p is not None and p.voter == voter for p in (self.memo, self._held, *self.doubts))

    def on_doubt(self) -> list[Effect]:
        return self.doubt.query() if self.doubt is not None and self.work is Work.PREPARED else []

    def recover(self, memos: Sequence[Memo]) -> list[Effect]:
        """Prepared epochs that the database still holds; each is resolved before anything else is done."""
        self.doubts = deque(memos)
        return self._go_on()

    def _resume_doubt(self) -> list[Effect]:
        self.memo = self.doubts.popleft()
        self._accepted, self._prepared_digest = self.memo.transactions, ""
        self.work = Work.PREPARED
        self.doubt = Doubt(self.memo, self._brokers, self._doubt_s)
        return self.doubt.query()


def _aligned(result: BatchPrepared, memo: Memo, missing: dict[TxId, Rejection]) -> BatchPrepared:
    """One element per member of the epoch, also for those that were not sent to the database."""
    if not missing:
        return result
    rows, results = iter(result.rows), iter(result.results)
    return BatchPrepared(
        result.excluded,
        tuple(() if tx in missing else next(rows) for tx in memo.transactions) if result.rows else (),
        tuple(b"" if tx in missing else next(results) for tx in memo.transactions) if result.results else (),
    )
