"""Epochs: transactions that are ready together are prepared, decided and finished together.

One coordinator per event type, at its rendezvous. On a durable type an epoch takes a number of the log and only one is
in flight, so every replica's state is a prefix of the log; on other types a lone interactive transaction does not wait
for others.

    queue -> VOTING -> (a new attempt without the members that stood in the way) -> FINISHING -> gone

Voters ask for decisions that they miss; the coordinator never repeats one by itself.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

import msgspec

from tops.constraints import Predicate, unmet
from tops.core.ballot import ReadyTx, Verdict, count_votes, shortfall
from tops.core.census import Member
from tops.core.event_log import EventLog
from tops.core.outcomes import Outcomes
from tops.core.standing import StandingAnswers
from tops.effects import Alarm, CancelTimer, Effect, Persist, Post, ReadLog, SetTimer
from tops.ids import NodeId, TxId, hashed
from tops.messages import (
    Address,
    EpochDecided,
    EpochFinished,
    EpochId,
    EpochMember,
    EpochVoted,
    FinishNoted,
    LogEntry,
    LoggedTx,
    PrepareEpoch,
    TxOutcome,
    VotesMissing,
)
from tops.records import EpochCommitted, FinishesNoted, InSyncChanged, LogAppended
from tops.transactions import Outcome

QUESTION = "?"  # the feed name under which single entries are read to answer a question


class EpochOptions(msgspec.Struct, frozen=True):
    """`sync_window_s`: how long a vote on a durable type may take; `finish_window_s`: how long the client waits for
    the committing set to confirm; `join_gap`: how close to the end of the log a replica joins."""

    members_max: int = 64
    attempts_max: int = 3
    sync_window_s: float = 2.0
    finish_window_s: float = 2.0
    join_gap: int = 64
    note_after_s: float = 0.2


class Stage(Enum):
    VOTING = "voting"  # ends when everyone has voted, is gone, or the time is up
    FINISHING = "finishing"  # decided and durable; ends when the committing set has finished, or the time is up


class Epoch(msgspec.Struct):
    """One epoch, from its first prepare until nobody is waited for."""

    id: EpochId
    digest: str
    members: list[ReadyTx]
    voters: dict[str, Member]  # asked to prepare, joiners included
    counted: frozenset[str]  # those whose votes are waited for
    stage: Stage = Stage.VOTING
    votes: dict[str, EpochVoted] = {}
    gone: dict[str, str] = {}
    committing: frozenset[str] = frozenset()
    committed: tuple[TxId, ...] = ()
    decided: frozenset[str] = frozenset()  # the committing set as it was decided
    finished: set[str] = set()
    outcomes: list[tuple[TxOutcome, Address]] = []
    unchecked: bool = False  # the publisher was told that votes are missing


class Decided(msgspec.Struct, frozen=True):
    """The remembered commit of an epoch that keeps no log entry, until everyone has finished."""

    digest: str
    committing: frozenset[str]
    transactions: tuple[TxId, ...]


class EpochCoordinator:
    """Two-phase commit for the transactions of one event type."""

    def __init__(
        self,
        event_type: str,
        me: NodeId,
        incarnation: int,
        standing: StandingAnswers,
        log: EventLog | None,
        outcomes: Outcomes,
        predicates: Mapping[str, Predicate],
        options: EpochOptions,
        settled: Callable[[ReadyTx, bool], list[Effect]],
    ) -> None:
        self.event_type, self.me, self.incarnation = event_type, me, incarnation
        self.standing, self.log, self.outcomes = standing, log, outcomes
        self.predicates, self.options = predicates, options
        self.settled = settled  # what follows a decision for those who do not vote: local subscribers
        self.questions: dict[int, list[tuple[EpochId, str, str, Address]]] = {}  # waiting for the disk
        self.queue: deque[ReadyTx] = deque()
        self.held: set[TxId] = set()  # waiting here or in flight
        self.in_flight: dict[int, Epoch] = {}
        self.decided: dict[EpochId, Decided] = {}
        self.volatile_number = 0
        self.notes: dict[tuple[EpochId, str], Address] = {}  # finishes that are not on disk yet

    # ------------------------------------------------------------------------------------------------ forming an epoch

    def submit(self, ready: ReadyTx) -> list[Effect]:
        """A transaction is ready to be prepared; it starts at once if nothing is in its way."""
        self.queue.append(ready)
        self.held.add(ready.tx)
        return self.start()

    def withdraw(self, tx: TxId) -> bool:
        """Take back a transaction that has not been sent out to be prepared."""
        for ready in self.queue:
            if ready.tx == tx:
                self.queue.remove(ready)
                self.held.discard(tx)
                return True
        return False

    def voting(self, tx: TxId) -> Epoch | None:
        """The epoch in which this transaction is being voted on."""
        for epoch in self.in_flight.values():
            if epoch.stage is Stage.VOTING and any(m.tx == tx for m in epoch.members):
                return epoch
        return None

    def holds(self, tx: TxId) -> bool:
        """Whether the transaction waits here or is in flight."""
        return tx in self.held

    def start(self) -> list[Effect]:
        """Form epochs from the queue as long as one may be in flight."""
        effects: list[Effect] = []
        while self.queue and self._room():
            effects += self._form()
        return effects

    def _room(self) -> bool:
        return not self.in_flight or (self.log is None and self.queue[0].members is not None)

    def _form(self) -> list[Effect]:
        effects: list[Effect] = []
        group: list[ReadyTx] = []
        voters: dict[str, Member] = {}
        met: set[object] = set()  # constraints that hold with these voters; many members share theirs
        while self.queue and len(group) < self.options.members_max:
            ready = self.queue[0]
            own = self._voters_of(ready)
            if group and (own.keys() != voters.keys() or ready.alone or group[0].alone):
                break
            self.queue.popleft()
            lacking = self._lacking(ready, own, met)
            if lacking is not None:
                effects += self._settle_abort(ready, lacking)
                continue
            group.append(ready)
            voters = own
        return effects + (self._prepare_new(group, voters) if group else [])

    def _voters_of(self, ready: ReadyTx) -> dict[str, Member]:
        if ready.members is None:
            return self.standing.voters(ready.spec)
        return {
            key: m
            for key, m in ready.members.items()
            if not m.standing or ((s := self.standing.answers.get(key)) is not None and self.standing.counted(s))
        }

    def _lacking(self, ready: ReadyTx, voters: dict[str, Member], met: set[object]) -> str | None:
        """The test before prepare: why the transaction can't commit with these voters."""
        if ready.members is not None or not voters:
            return shortfall(ready, frozenset(ready.members or ()), voters, self.predicates)
        constraints = ready.spec.constraints
        if constraints in met:
            return None
        lacking = unmet(constraints, [m.identity for m in voters.values()], self.predicates)
        if lacking is None:
            met.add(constraints)
        return lacking

    def _prepare_new(self, group: list[ReadyTx], voters: dict[str, Member]) -> list[Effect]:
        if self.log is not None:
            number = self.log.reserve()
            joiners = self.standing.joiners(group[0].spec, number, self.options.join_gap)
        else:
            self.volatile_number += 1
            number, joiners = self.volatile_number, {}
        return self._prepare(number, 1, group, {**voters, **joiners}, frozenset(voters))

    def _prepare(
        self, number: int, attempt: int, group: list[ReadyTx], voters: dict[str, Member], counted: frozenset[str]
    ) -> list[Effect]:
        epoch_id = EpochId(self.event_type, number, attempt, self.me, self.incarnation)
        members = tuple(EpochMember(r.tx, r.last_sequence, r.events) for r in group)
        digest = member_digest(r.tx for r in group)
        epoch = Epoch(epoch_id, digest, group, voters, counted, votes={}, gone={}, finished=set(), outcomes=[])
        self.in_flight[number] = epoch
        window = self.options.sync_window_s if self.log is not None else group[0].spec.vote_timeout_s
        effects: list[Effect] = [
            Post(m.address, PrepareEpoch(epoch=epoch_id, digest=digest, voter=key, members=members))
            for key, m in sorted(voters.items())
        ]
        effects.append(SetTimer(("epoch", self.event_type, number), window))
        return effects

    # ----------------------------------------------------------------------------------------------------- the votes

    def on_voted(self, voted: EpochVoted, incarnation: int) -> list[Effect]:
        epoch = self.in_flight.get(voted.epoch.number)
        if epoch is None or epoch.id != voted.epoch or epoch.digest != voted.digest:
            return []  # another attempt's; its voter asks, or hears of a newer one
        member = epoch.voters.get(voted.voter)
        if member is None or member.incarnation != incarnation or epoch.stage is not Stage.VOTING:
            return []
        if voted.voter in epoch.votes or voted.voter in epoch.gone or not _fits(voted, epoch.members):
            return []
        epoch.votes[voted.voter] = voted
        return self._resolve(epoch) if self._complete(epoch) else []

    def _complete(self, epoch: Epoch) -> bool:
        return all(key in epoch.votes or key in epoch.gone for key in epoch.counted)

    def drop(self, keys: Iterable[str], reason: str) -> list[Effect]:
        """These voters are gone: a NO from whoever has not voted, and nobody to wait for afterwards."""
        effects: list[Effect] = []
        for key in keys:
            for epoch in list(self.in_flight.values()):
                if key not in epoch.voters:
                    continue
                if epoch.stage is Stage.VOTING and key not in epoch.votes and key not in epoch.gone:
                    epoch.gone[key] = reason
                    if self._complete(epoch):
                        effects += self._resolve(epoch)
                elif epoch.stage is Stage.FINISHING and key in epoch.committing - epoch.finished:
                    effects += self._give_up_on(epoch, frozenset([key]))
        return effects

    def abort(self, tx: TxId, reason: str) -> list[Effect]:
        """The publisher wants a transaction back while votes are missing: everyone counts as having excluded it."""
        epoch = self.voting(tx)
        if epoch is None:
            return []
        for key in epoch.counted - epoch.votes.keys():
            epoch.gone[key] = reason
        return self._apply(epoch, Verdict(frozenset(), {m.tx: reason for m in epoch.members}))

    def wait_again(self, tx: TxId) -> list[Effect]:
        """The publisher of an unchecked transaction chose to wait once more."""
        epoch = self.voting(tx)
        if epoch is None or not epoch.unchecked:
            return []
        epoch.unchecked = False
        return [SetTimer(("epoch", self.event_type, epoch.id.number), epoch.members[0].spec.vote_timeout_s)]

    def on_timer(self, number: int) -> list[Effect]:
        epoch = self.in_flight.get(number)
        if epoch is None:
            return []
        if epoch.stage is Stage.FINISHING:
            return self._give_up_on(epoch, epoch.committing - epoch.finished)
        missing = [key for key in epoch.counted if key not in epoch.votes and key not in epoch.gone]
        lone = epoch.members[0]
        if self.log is None and len(epoch.members) == 1 and lone.members is not None:
            # An interactive transaction's publisher decides whether to wait on.
            epoch.unchecked = True
            return [Post(lone.publisher, VotesMissing(tx=lone.tx, missing=len(missing)))]
        for key in missing:
            epoch.gone[key] = "did not vote in time"
        return self._resolve(epoch)

    def _resolve(self, epoch: Epoch) -> list[Effect]:
        verdict = count_votes(
            epoch.members,
            epoch.voters,
            {k: v for k, v in epoch.votes.items() if k in epoch.counted},
            {k: r for k, r in epoch.gone.items() if k in epoch.counted},
            epoch.counted,
            self.predicates,
            majority_first=self.log is not None,
        )
        alarms: list[Effect] = [Alarm("rows-differ", text) for text in verdict.divergent]
        if verdict.again:
            return alarms + self._try_again(epoch, verdict)
        if verdict.committing and len(verdict.excluded) < len(epoch.members):
            verdict.committing |= self._timely_joiners(epoch, verdict)
        return alarms + self._apply(epoch, verdict)

    def _timely_joiners(self, epoch: Epoch, verdict: Verdict) -> set[str]:
        """Replicas that are joining commit too if they prepared the very same members in time, and are welcome."""
        rows = self._first(epoch, verdict.committing).rows
        timely = {
            key
            for key, vote in epoch.votes.items()
            if key not in epoch.counted and vote.excluded.keys() == verdict.excluded.keys() and vote.rows == rows
        }
        if not timely:
            return timely
        everyone = {key: epoch.voters[key] for key in sorted(verdict.committing | timely)}
        welcome = all(
            shortfall(m, epoch.counted & verdict.committing, everyone, self.predicates) is None
            for m in epoch.members
            if m.tx not in verdict.excluded
        )
        return timely if welcome else set()

    def _first(self, epoch: Epoch, committing: frozenset[str]) -> EpochVoted:
        """The vote whose rows and results count: the first of those that tell any."""
        return epoch.votes[min(committing, key=lambda key: (not epoch.votes[key].rows, key))]

    def _try_again(self, epoch: Epoch, verdict: Verdict) -> list[Effect]:
        """A new attempt at the number without the members that stood in the way; its prepare undoes the old one."""
        effects: list[Effect] = []
        rest = []
        for ready in epoch.members:
            if ready.tx in verdict.excluded:
                effects += self._settle_abort(ready, verdict.excluded[ready.tx])
            else:
                rest.append(ready)
        gone = [key for key in epoch.voters if key not in verdict.committing]
        effects += [self._decided(epoch, key, frozenset()) for key in sorted(gone)]
        if epoch.id.attempt >= self.options.attempts_max:
            for ready in rest:
                ready.alone = True
            self.queue.extendleft(reversed(rest))
            return effects + self._undo(epoch) + self._end(epoch, void=True) + self.start()
        voters = {key: epoch.voters[key] for key in sorted(verdict.committing)}
        return effects + self._prepare(epoch.id.number, epoch.id.attempt + 1, rest, voters, frozenset(voters))

    # -------------------------------------------------------------------------------------------------- the decision

    def _apply(self, epoch: Epoch, verdict: Verdict) -> list[Effect]:
        committed = [m for m in epoch.members if m.tx not in verdict.excluded]
        aborts: list[Effect] = []
        for ready in epoch.members:
            if ready.tx in verdict.excluded:
                aborts += self._settle_abort(ready, verdict.excluded[ready.tx])
        if not committed:
            return self._undo(epoch) + aborts + self._end(epoch, void=True) + self.start()
        epoch.stage = Stage.FINISHING
        epoch.committing = epoch.decided = verdict.committing
        epoch.committed = tuple(m.tx for m in committed)
        self._prepare_outcomes(epoch, committed)
        number = epoch.id.number
        effects: list[Effect] = [Persist(self._record(epoch, committed))]
        committing = hashed_all(epoch.committing)
        effects += [self._decided(epoch, key, committing) for key in sorted(epoch.voters)]
        effects.append(SetTimer(("epoch", self.event_type, number), self.options.finish_window_s))
        if self.log is not None:
            effects += self.log.pump_all()
        for ready in committed:
            effects += self.settled(ready, True)
        return effects + aborts

    def _prepare_outcomes(self, epoch: Epoch, committed: list[ReadyTx]) -> None:
        index = {m.tx: i for i, m in enumerate(epoch.members)}
        first = self._first(epoch, epoch.committing)  # the others' rows are the same, their results may differ
        number = epoch.id.number if self.log is not None else None
        for ready in committed:
            i = index[ready.tx]
            outcome = TxOutcome(
                tx=ready.tx,
                outcome=Outcome.COMMITTED,
                log_number=number,
                rows=first.rows[i] if first.rows else (),
                result=first.results[i] if first.results else b"",
            )
            epoch.outcomes.append((outcome, ready.publisher))
            self.outcomes.remember(outcome)

    def _record(self, epoch: Epoch, committed: list[ReadyTx]) -> LogAppended | EpochCommitted:
        if self.log is None:
            self.decided[epoch.id] = Decided(epoch.digest, epoch.committing, epoch.committed)
            return EpochCommitted(
                epoch=epoch.id, digest=epoch.digest, transactions=epoch.committed, committing=epoch.committing
            )
        entry = LogEntry(
            number=epoch.id.number,
            transactions=tuple(
                LoggedTx(m.tx, m.spec.event_type, m.logged_events, m.spec.attributes, m.spec.limit, m.spec.tx_type)
                for m in committed
            ),
            epoch=epoch.id,
            committing=epoch.committing,
        )
        self.log.fill(entry)
        # Who was asked or is unreachable and does not commit is lagging from this number on; who joined is in sync.
        in_sync = self.standing.identities(epoch.committing)
        changed = in_sync != self.standing.in_sync
        self.standing.in_sync = in_sync
        return LogAppended(event_type=self.event_type, entry=entry, in_sync=in_sync if changed else None)

    def _decided(self, epoch: Epoch, key: str, committing: frozenset[str]) -> Effect:
        decided = EpochDecided(epoch=epoch.id, digest=epoch.digest, voter=key, committing=committing)
        return Post(epoch.voters[key].address, decided)

    def _undo(self, epoch: Epoch) -> list[Effect]:
        return [self._decided(epoch, key, frozenset()) for key in sorted(epoch.voters)]

    def _settle_abort(self, ready: ReadyTx, reason: str) -> list[Effect]:
        outcome = TxOutcome(tx=ready.tx, outcome=Outcome.ABORTED, reason=reason)
        self.held.discard(ready.tx)
        return self.outcomes.settle(outcome, ready.publisher) + self.settled(ready, False)

    # ----------------------------------------------------------------------------------------------------- finishing

    def on_finished(self, finished: EpochFinished, sender: Address) -> list[Effect]:
        effects: list[Effect] = []
        if finished.note:
            if not self.notes:
                effects.append(SetTimer(("notes", self.event_type), self.options.note_after_s))
            self.notes[finished.epoch, finished.voter] = sender
        epoch = self.in_flight.get(finished.epoch.number)
        if epoch is not None and epoch.id == finished.epoch:
            epoch.finished.add(finished.voter)
            if epoch.stage is Stage.FINISHING and epoch.committing <= epoch.finished:
                effects += self._end(epoch, void=False) + self.start()
        return effects

    def write_notes(self) -> list[Effect]:
        """Remember, many at a time, who has finished; only then may a voter forget its promise."""
        notes, self.notes = self.notes, {}
        for epoch, voter in notes:
            self._forget(epoch, voter)
        if not notes:
            return []
        told = [Post(to, FinishNoted(epoch=epoch, voter=voter)) for (epoch, voter), to in notes.items()]
        return [Persist(FinishesNoted(event_type=self.event_type, finished=tuple(notes))), *told]

    def _forget(self, epoch: EpochId, voter: str) -> None:
        """When the last one has finished nobody is going to ask any more."""
        decided = self.decided.get(epoch)
        if decided is None:
            return
        left = decided.committing - {voter}
        if left:
            self.decided[epoch] = Decided(decided.digest, left, decided.transactions)
        else:
            del self.decided[epoch]

    def _give_up_on(self, epoch: Epoch, late: frozenset[str]) -> list[Effect]:
        """These have promised and are silent. They finish when they are back; a replica lags until then."""
        effects: list[Effect] = []
        in_sync = self.standing.in_sync - self.standing.identities(late)
        if in_sync != self.standing.in_sync:
            self.standing.in_sync = in_sync
            effects.append(Persist(InSyncChanged(event_type=self.event_type, in_sync=in_sync)))
        if epoch.committing - epoch.finished == late:
            return effects + self._end(epoch, void=False) + self.start()
        epoch.committing -= late
        return effects

    def _end(self, epoch: Epoch, void: bool) -> list[Effect]:
        number = epoch.id.number
        del self.in_flight[number]
        self.held.difference_update(epoch.committed)
        effects: list[Effect] = [CancelTimer(("epoch", self.event_type, number))]
        pending = tuple(sorted(epoch.voters[k].identity or k for k in epoch.committing - epoch.finished))
        for outcome, publisher in epoch.outcomes:
            told = msgspec.structs.replace(outcome, pending=pending) if pending else outcome
            effects += self.outcomes.settle(told, publisher)
        if void and self.log is not None:
            entry = LogEntry(number=number)
            self.log.fill(entry)
            # Whoever hears that the number is void counts it as applied: it must not be given out again after a crash.
            effects.append(Persist(LogAppended(event_type=self.event_type, entry=entry)))
            effects += self.log.pump_all()
        return effects

    # -------------------------------------------------------------------------------------------- questions, recovery

    def on_asked(self, epoch: EpochId, digest: str, voter: str, asker: Address) -> list[Effect]:
        """A voter in doubt. No record means abort, unless we are still at it."""
        live = self.in_flight.get(epoch.number)
        if live is not None and live.id == epoch:
            if voter in live.voters:
                live.voters[voter].address = asker  # it may have moved to another broker
            if live.stage is Stage.VOTING:
                return []
            committing = live.decided
        elif self.log is None:
            known = self.decided.get(epoch)
            committing = known.committing if known is not None else frozenset()
        elif epoch.number > self.log.last_number or epoch.number in self.log.tail or epoch.number in self.log.undecided:
            committing = _committing(self.log.tail.get(epoch.number), epoch)
        else:
            # Too old for memory: the disk knows. If it no longer does, only an operator can tell.
            questions = self.questions.setdefault(epoch.number, [])
            if (epoch, digest, voter, asker) not in questions:
                questions.append((epoch, digest, voter, asker))
            return [ReadLog(self.event_type, QUESTION, epoch.number, epoch.number)]
        return [_told(epoch, digest, voter, committing, asker)]

    def on_read(self, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """What the disk knows about the numbers that were asked for."""
        effects: list[Effect] = []
        for entry in entries:
            for epoch, digest, voter, asker in self.questions.pop(entry.number, ()):
                effects.append(_told(epoch, digest, voter, _committing(entry, epoch), asker))
        return effects

    def recover(self, record: LogAppended | EpochCommitted | FinishesNoted | InSyncChanged) -> None:
        """Replay one record of the journal."""
        match record:
            case LogAppended(entry=entry, in_sync=in_sync):
                if self.log is not None:
                    self.log.fill(entry)
                if in_sync is not None:
                    self.standing.in_sync = in_sync
                for logged in entry.transactions:
                    self.outcomes.remember(TxOutcome(tx=logged.tx, outcome=Outcome.COMMITTED, log_number=entry.number))
            case InSyncChanged(in_sync=in_sync):
                self.standing.in_sync = in_sync
            case EpochCommitted(epoch=epoch, digest=digest, transactions=transactions, committing=committing):
                self.decided[epoch] = Decided(digest, committing, transactions)
                for tx in transactions:
                    self.outcomes.remember(TxOutcome(tx=tx, outcome=Outcome.COMMITTED))
            case FinishesNoted(finished=finished):
                for epoch, voter in finished:
                    self._forget(epoch, voter)


def _fits(voted: EpochVoted, members: list[ReadyTx]) -> bool:
    """Whether a vote speaks of these members; what else a confused voter says is no vote."""
    per_member = (0, len(members))
    known = voted.excluded.keys() <= {m.tx for m in members}
    return known and len(voted.rows) in per_member and len(voted.results) in per_member


def _committing(entry: LogEntry | None, epoch: EpochId) -> frozenset[str]:
    """Who commits this very attempt: nobody, if the number went to another one or stayed void."""
    return entry.committing if entry is not None and entry.epoch == epoch else frozenset()


def _told(epoch: EpochId, digest: str, voter: str, committing: frozenset[str], asker: Address) -> Effect:
    decided = EpochDecided(epoch=epoch, digest=digest, voter=voter, committing=hashed_all(committing))
    return Post(asker, decided)


def hashed_all(keys: frozenset[str]) -> frozenset[str]:
    """A committing set as it is shown to voters."""
    return frozenset(map(hashed, keys))


def member_digest(transactions: Iterable[TxId]) -> str:
    """What a vote is a vote on: these transactions in this order."""
    return hashlib.sha256("\n".join(transactions).encode()).hexdigest()[:16]
