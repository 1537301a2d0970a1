"""Epochs: transactions that are ready together are prepared, decided and finished together.

One coordinator per event type, at its rendezvous. On a durable type an epoch takes an index of the log and only one is
in flight, so every replica's state is a prefix of the log; on other types an interactive transaction does not wait for
other transactions.

    queue -> VOTING -> (a new attempt without the excluded members) -> FINISHING -> removed

A voter requests a decision that it has not received; the coordinator never repeats one by itself.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from tops.core.commit.ballot import ReadyTx, Verdict, count_votes, suffice
from tops.core.commit.census import Member
from tops.core.commit.decision_sender import DecisionSender, Sign
from tops.core.commit.epoch import Epoch, EpochOptions, Stage, fits, hashed_all, is_enough, member_digest, outcomes_of
from tops.core.commit.epoch_memory import QUERY_FEED, Decided, EpochMemory
from tops.core.commit.epoch_queue import EpochQueue
from tops.core.commit.held_transactions import HeldTransactions
from tops.core.commit.late_voters import LateVoters
from tops.core.commit.outcomes import Outcomes
from tops.core.commit.standing_registrations import StandingRegistrations
from tops.core.log.event_log import EventLog
from tops.model.constraints import Predicate, needs_identity
from tops.model.ids import NodeId, TxId, hashed_voter, voter_key, voter_of
from tops.model.log_points import BEGINNING
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Outcome
from tops.protocol.effects import Alarm, CancelTimer, Effect, Note, Persist, Reject, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    EpochFinished,
    EpochId,
    EpochMember,
    EpochVoted,
    LogEntry,
    LoggedTx,
    PrepareEpoch,
    Sender,
    StaleJournal,
    TxOutcome,
    VotesMissing,
)
from tops.protocol.records import EpochCommitted, FinishesNoted, InSyncChanged, LogAppended

VOTING, FINISHING = Stage  # read with every message

__all__ = ["QUERY_FEED", "Epoch", "EpochCoordinator", "EpochOptions", "Stage", "member_digest"]


class EpochCoordinator:
    """Two-phase commit for the transactions of one event type."""

    def __init__(
        self,
        event_type: str,
        me: NodeId,
        incarnation: int,
        standing: StandingRegistrations,
        log: EventLog | None,
        outcomes: Outcomes,
        predicates: Mapping[str, Predicate],
        options: EpochOptions,
        settled: Callable[[ReadyTx, bool], list[Effect]],
        sign: Sign | None = None,
    ) -> None:
        self.event_type, self.me, self.incarnation = event_type, me, incarnation
        self.standing, self.log, self.outcomes = standing, log, outcomes
        self.predicates, self.options = predicates, options
        self.settled = settled  # carries a decision on to local subscribers, which do not vote
        self.decision_sender = DecisionSender(log, sign, self._is_over)
        self.late = LateVoters(log, standing, self.decision_sender)
        self.memory = EpochMemory(event_type, incarnation, log, options.note_after_s, self.decision_sender)
        self.waiting = EpochQueue(standing, predicates, options.members_max)
        self.held = HeldTransactions()  # waiting here or in flight
        self.in_flight: dict[int, Epoch] = {}
        self.volatile_number = 0
        self._newest_number = 0  # the highest number that this incarnation has assigned

    @property
    def queue(self) -> deque[ReadyTx]:
        """Transactions that wait to be prepared."""
        return self.waiting.ready

    @property
    def decided(self) -> Mapping[EpochId, Decided]:
        """Commits whose outcome a voter may still request."""
        return self.memory.decided

    @property
    def queries(self) -> Mapping[int, object]:
        """Numbers whose entries are being read from disk for voters."""
        return self.memory.queries

    # ------------------------------------------------------------------------------------------------ forming an epoch

    def submit(self, *ready: ReadyTx) -> list[Effect]:
        """Transactions are ready to be prepared; they start at once and together, unless an epoch is in flight."""
        self.waiting.ready.extend(ready)
        for one in ready:
            self.held.add(one)
        if self.log is not None and self.log.stale is not None:
            return self.reject_all(self.log.stale)
        return self.start()

    def reject_all(self, stale: StaleJournal) -> list[Effect]:
        """No index can be assigned: abort everything that waits for one."""
        waiting = list(self.waiting.ready)
        self.waiting.ready.clear()
        rejection = Rejection(RejectionCode.JOURNAL_STALE, str(stale))
        return [effect for ready in waiting for effect in self._settle_abort(ready, rejection, stale)]

    def withdraw(self, tx: TxId) -> bool:
        """Remove a transaction that is not being prepared yet; False if it is not in the queue."""
        if not self.waiting.withdraw(tx):
            return False
        self.held.discard(tx)
        return True

    def voting(self, tx: TxId) -> Epoch | None:
        """The epoch in which this transaction is being voted on."""
        for epoch in self.in_flight.values():
            if epoch.stage is VOTING and any(m.tx == tx for m in epoch.members):
                return epoch
        return None

    def holds(self, tx: TxId) -> bool:
        """Whether the transaction waits here or is in flight."""
        return tx in self.held

    def start(self) -> list[Effect]:
        """Form epochs from the queue as long as one may be in flight."""
        queue = self.waiting.ready
        effects: list[Effect] = []
        while queue and self._may_form():
            effects += self._form()
        return effects

    def _may_form(self) -> bool:
        """Whether another epoch may start. With a log, one epoch is in flight at a time. Without a log, an interactive
        transaction neither waits for others nor makes them wait: its publisher may take long to decide."""
        if self.log is not None:
            return not self.in_flight and self.log.opening is None
        interactive = self.waiting.ready[0].members is not None
        return interactive or all(m.members is not None for e in self.in_flight.values() for m in e.members)

    def _form(self) -> list[Effect]:
        group, voters, aborts = self.waiting.next_group(self._settle_abort)
        return aborts + (self._prepare_new(group, voters) if group else [])

    def _prepare_new(self, group: list[ReadyTx], voters: dict[str, Member]) -> list[Effect]:
        if self.log is not None:
            number, voters = self.log.reserve(), self._without_late(group, voters)
            if self.standing.registrations.keys() <= voters.keys():
                recipients = voters  # every registered replica votes already
            else:
                barred = self.log.unconfirmed.keys() | self.log.differing
                joiners = self.standing.joiners(group[0].spec, number, self.options.join_gap, barred)
                recipients = {**voters, **{key: m for key, m in joiners.items() if key not in self.late}}
        else:
            self.volatile_number += 1
            number, recipients = self.volatile_number, voters
        return self._prepare(number, 1, group, dict(recipients), frozenset(voters))

    def _without_late(self, group: list[ReadyTx], voters: dict[str, Member]) -> dict[str, Member]:
        """Omit voters that still work on an epoch that was decided without them, unless their votes are needed."""
        others = {key: m for key, m in voters.items() if key not in self.late}
        if len(others) == len(voters) or any(ready.include_late for ready in group):
            return voters
        return others if suffice(group, frozenset(), others, self.predicates) else voters

    def _prepare(
        self, number: int, attempt: int, group: list[ReadyTx], voters: dict[str, Member], counted: frozenset[str]
    ) -> list[Effect]:
        epoch_id = EpochId(self.event_type, number, attempt, self.me, self.incarnation)
        members = tuple([EpochMember(r.tx, r.last_sequence, r.events) for r in group])
        digest = member_digest([r.tx for r in group])
        self.in_flight[number] = Epoch(epoch_id, digest, group, voters, counted)
        self._newest_number = max(self._newest_number, number)
        window = self.options.sync_window_s if self.log is not None else group[0].spec.vote_timeout_s
        noted = self.memory.open(number) if self.log is None else 0
        before = BEGINNING if self.log is None else self.log.chain.end
        effects: list[Effect] = [
            SendTo(
                voters[key].address,
                PrepareEpoch(
                    epoch=epoch_id,
                    digest=digest,
                    voter=voters[key].voter,
                    members=members,
                    noted=noted,
                    before=before,
                ),
            )
            for key in sorted(voters)
        ]
        effects.append(SetTimer(("epoch", self.event_type, number), window))
        return effects

    # ----------------------------------------------------------------------------------------------------- the votes

    def on_voted(self, voted: EpochVoted, sender: Sender) -> list[Effect]:
        """Count a vote. It must come under a name to which the prepare was sent, from the identity of that voter: the
        name in the message alone proves nothing."""
        epoch, key = self.in_flight.get(voted.epoch.number), voter_key(sender.identity, voted.voter)
        if epoch is None or epoch.stage is not VOTING:
            return self.late.on_voted(voted, key, sender.incarnation)
        if epoch.id != voted.epoch or epoch.digest != voted.digest:
            return []  # of another attempt: its voter requests the outcome, or gets the newer attempt
        member = epoch.voters.get(key)
        if member is None:
            return [_not_asked(epoch, sender, "voted")]
        if member.incarnation != sender.incarnation:
            return []
        if not epoch.awaits(key) or not fits(voted, epoch.members):
            return []
        epoch.votes[key] = voted
        if self.log is not None and is_enough(epoch, self.standing.in_sync, self.predicates):
            return self._apply(epoch, Verdict(frozenset(epoch.votes), {}))
        return self._resolve(epoch) if epoch.everyone_voted() else []

    def drop(self, keys: Iterable[str], reason: str) -> list[Effect]:
        """These voters are lost: a NO from each that has not voted, and no more waiting for their finishes."""
        effects: list[Effect] = []
        for key in keys:
            effects += self.late.drop(key)
            for epoch in list(self.in_flight.values()):
                if key not in epoch.voters:
                    continue
                if epoch.stage is VOTING and epoch.awaits(key):
                    epoch.lost[key] = reason
                    if epoch.everyone_voted():
                        effects += self._resolve(epoch)
                elif epoch.stage is FINISHING and key in epoch.committing - epoch.finished:
                    effects += self._give_up_on(epoch, frozenset([key]))
        return effects

    def abort(self, tx: TxId, rejection: Rejection) -> list[Effect]:
        """The publisher aborts a transaction while votes are missing: every voter counts as having excluded it."""
        epoch = self.voting(tx)
        if epoch is None:
            return []
        for key in epoch.counted - epoch.votes.keys():
            epoch.lost[key] = rejection.text
        return self._apply(epoch, Verdict(frozenset(), {m.tx: rejection for m in epoch.members}))

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
            return self.late.give_up(number)
        if epoch.stage is FINISHING:
            return self.late.give_up(number) + self._give_up_on(epoch, epoch.committing - epoch.finished)
        missing = [key for key in epoch.counted if epoch.awaits(key)]
        lone = epoch.members[0]
        if self.log is None and len(epoch.members) == 1 and lone.members is not None:
            # The publisher of an interactive transaction decides whether to wait longer.
            epoch.unchecked = True
            return [SendTo(lone.publisher, VotesMissing(tx=lone.tx, missing=len(missing)))]
        for key in missing:
            epoch.lost[key] = "did not vote in time"
        return self._resolve(epoch)

    def _resolve(self, epoch: Epoch) -> list[Effect]:
        counted, votes, lost = epoch.counted, epoch.votes, epoch.lost
        if len(epoch.voters) > len(counted):  # there are joiners: their votes do not count for the verdict
            votes = {k: v for k, v in votes.items() if k in counted}
            lost = {k: r for k, r in lost.items() if k in counted}
        verdict = count_votes(
            epoch.members,
            epoch.voters,
            votes,
            lost,
            counted,
            self.predicates,
            majority_first=self.log is not None,
        )
        alarms: list[Effect] = [Alarm("rows-differ", text) for text in verdict.divergent]
        if verdict.excluded:
            verdict.put_back = frozenset([m.tx for m in epoch.members if self._late_may_help(epoch, verdict, m)])
        if verdict.again:
            return alarms + self._try_again(epoch, verdict)
        if len(votes) < len(epoch.votes) and verdict.committing and len(verdict.excluded) < len(epoch.members):
            verdict.committing |= self._timely_joiners(epoch, verdict)
        return alarms + self._apply(epoch, verdict)

    def _late_may_help(self, epoch: Epoch, verdict: Verdict, member: ReadyTx) -> bool:
        """Whether an excluded member may have enough voters together with the late ones, which got no prepare."""
        if self.log is None or member.tx not in verdict.excluded or member.include_late:
            return False
        others = {key: m for key, m in self.waiting.voters_of(member).items() if key not in epoch.voters}
        able = {key: epoch.voters[key] for key, vote in epoch.votes.items() if member.tx not in vote.excluded}
        return bool(others) and suffice([member], epoch.counted, {**able, **others}, self.predicates)

    def _timely_joiners(self, epoch: Epoch, verdict: Verdict) -> set[str]:
        """Joiners that commit, too: they prepared exactly the same members in time, and the constraints allow them."""
        rows = epoch.first_vote(verdict.committing).rows
        timely = {
            key
            for key, vote in epoch.votes.items()
            if key not in epoch.counted and vote.excluded.keys() == verdict.excluded.keys() and vote.rows == rows
        }
        if not timely:
            return timely
        all_voters = {key: epoch.voters[key] for key in sorted(verdict.committing | timely)}
        rest = [m for m in epoch.members if m.tx not in verdict.excluded]
        allowed = suffice(rest, epoch.counted & verdict.committing, all_voters, self.predicates)
        return timely if allowed else set()

    def _try_again(self, epoch: Epoch, verdict: Verdict) -> list[Effect]:
        """Prepare a new attempt at the same number without the excluded members; its prepare undoes the old one."""
        effects = self._leave_out(epoch, verdict)
        rest = [m for m in epoch.members if m.tx not in verdict.excluded]
        lost = [key for key in epoch.voters if key not in verdict.committing]
        effects += [self._decided(epoch, key, frozenset()) for key in sorted(lost)]
        if epoch.id.attempt >= self.options.attempts_max:
            for ready in rest:
                ready.alone, ready.started_with = True, epoch.counted
            self.waiting.put_back(rest)
            return effects + self._undo(epoch) + self._end(epoch, no_op=True) + self.start()
        voters = {key: epoch.voters[key] for key in sorted(verdict.committing)}
        return effects + self._prepare(epoch.id.number, epoch.id.attempt + 1, rest, voters, frozenset(voters))

    def _leave_out(self, epoch: Epoch, verdict: Verdict) -> list[Effect]:
        """Abort the excluded members, or put those back that are prepared again with more voters."""
        effects: list[Effect] = []
        again = []
        for ready in epoch.members:
            if ready.tx in verdict.put_back:
                ready.include_late, ready.started_with = True, epoch.counted
                again.append(ready)
            elif ready.tx in verdict.excluded:
                effects += self._settle_abort(ready, verdict.excluded[ready.tx])
        self.waiting.put_back(again)
        return effects

    # -------------------------------------------------------------------------------------------------- the decision

    def _apply(self, epoch: Epoch, verdict: Verdict) -> list[Effect]:
        committed = epoch.members
        aborts: list[Effect] = []
        if verdict.excluded:
            committed = [m for m in epoch.members if m.tx not in verdict.excluded]
            aborts = self._leave_out(epoch, verdict)
        if not committed:
            return self._undo(epoch) + aborts + self._end(epoch, no_op=True) + self.start()
        # From here on the epoch is decided. The first effect persists the decision, so no voter can receive a decision
        # that a crash of this broker would undo.
        epoch.stage = FINISHING
        epoch.committing = epoch.decided = verdict.committing
        epoch.committed = tuple([m.tx for m in committed])
        number = epoch.id.number
        effects: list[Effect] = [Persist(self._record(epoch, committed))]
        committing, late = hashed_all(epoch.committing), epoch.late() if self.log is not None else frozenset()
        effects += [self._decided(epoch, key, committing) for key in sorted(epoch.voters.keys() - late)]
        if late:
            self.late.begin(epoch, late)
            self.standing.near |= self.standing.identities(late & epoch.counted)
        effects.append(SetTimer(("epoch", self.event_type, number), self.options.finish_window_s))
        if self.log is not None:
            effects += self.log.pump_all()
        for ready in committed:
            if self.log is None or ready.members is not None:  # local subscribers receive a one-shot from the log
                effects += self.settled(ready, True)
        return effects + aborts

    def _record(self, epoch: Epoch, committed: list[ReadyTx]) -> LogAppended | EpochCommitted:
        if self.log is None:
            self.memory.decided[epoch.id] = Decided(epoch.digest, epoch.committing, epoch.committed)
            return EpochCommitted(
                epoch=epoch.id, digest=epoch.digest, transactions=epoch.committed, committing=epoch.committing
            )
        entry = LogEntry(
            number=epoch.id.number,
            transactions=tuple(
                [
                    LoggedTx(m.tx, m.spec.event_type, m.logged_events, m.spec.attributes, m.spec.limit, m.spec.tx_type)
                    for m in committed
                ]
            ),
            epoch=epoch.id,
            committing=hashed_all(epoch.committing),
        )
        self.log.fill(entry)
        # A replica that does not commit is lagging from this index on, and a joiner that commits is in sync. The change
        # is in the same record as the commit: a crash can't leave a lagging replica in the in-sync set.
        in_sync = self.standing.identities(epoch.committing)
        changed = in_sync != self.standing.in_sync
        if changed:
            self.standing.in_sync = in_sync
        return LogAppended(event_type=self.event_type, entry=entry, in_sync=in_sync if changed else None)

    def _decided(self, epoch: Epoch, key: str, committing: frozenset[str]) -> Effect:
        voter = epoch.voters[key]
        return self.decision_sender.decided(epoch.id, epoch.digest, voter.voter, committing, voter.address)

    def _undo(self, epoch: Epoch) -> list[Effect]:
        return [self._decided(epoch, key, frozenset()) for key in sorted(epoch.voters)]

    def _settle_abort(self, ready: ReadyTx, rejection: Rejection, stale: StaleJournal | None = None) -> list[Effect]:
        outcome = TxOutcome(tx=ready.tx, outcome=Outcome.ABORTED, rejection=rejection, stale=stale)
        self.held.discard(ready.tx)
        return self.outcomes.settle(outcome, ready.publisher) + self.settled(ready, False)

    # ----------------------------------------------------------------------------------------------------- finishing

    def on_finished(self, finished: EpochFinished, sender: Sender, at: Address) -> list[Effect]:
        key = voter_key(sender.identity, finished.voter)
        effects = self.memory.on_finished(finished.epoch, key, at) if finished.note else []
        if key in self.late:
            effects += self._late_finished(finished, key)
        epoch = self.in_flight.get(finished.epoch.number)
        if epoch is not None and epoch.id == finished.epoch:
            if key not in epoch.voters:
                return [*effects, _not_asked(epoch, sender, "finished")]
            epoch.finished.add(key)
            self._write_outcomes(epoch)  # while the other voters still work
            if epoch.stage is FINISHING and epoch.committing <= epoch.finished:
                effects += self._end(epoch, no_op=False) + self.start()
        return effects

    def _write_outcomes(self, epoch: Epoch) -> None:
        """Make the outcomes once, after the decision. A requester that comes earlier gets the outcome when the
        committing set has finished."""
        if epoch.committed and not epoch.outcomes:
            epoch.outcomes = outcomes_of(epoch, epoch.id.number if self.log is not None else None)
            for outcome, _ in epoch.outcomes:
                self.outcomes.remember(outcome)

    def _late_finished(self, finished: EpochFinished, key: str) -> list[Effect]:
        """A late voter has committed; if it has applied everything that is decided, it is in sync again."""
        number, standing = finished.epoch.number, self.standing
        effects = self.late.on_finished(finished, key)
        if number not in self.in_flight and not self.late.any_of(number):
            effects.append(CancelTimer(("epoch", self.event_type, number)))
        response = standing.registrations.get(key)
        if response is None or not response.replica or self.log is None:
            return effects
        response.position = max(response.position or 0, number)
        entry, elsewhere = self.log.tail.get(number), self.in_flight.keys() - {number}
        is_last = number == self.log.decided_upto and entry is not None and entry.epoch == finished.epoch
        barred = self.log.unconfirmed.keys() | self.log.differing
        if is_last and not elsewhere and self.log.opening is None and response.identity not in barred:
            standing.in_sync |= {response.identity}
            effects.append(Note(InSyncChanged(event_type=self.event_type, in_sync=standing.in_sync)))
        return effects

    def write_notes(self) -> list[Effect]:
        """Record, many at a time, which voters have finished; only then may a voter drop its memo."""
        return self.memory.write_notes()

    def _give_up_on(self, epoch: Epoch, late: frozenset[str]) -> list[Effect]:
        """Wait no longer for these voters, which have prepared and are silent. They finish when they are back; a
        replica lags until then."""
        effects: list[Effect] = []
        in_sync = self.standing.in_sync - self.standing.identities(late)
        if in_sync != self.standing.in_sync:
            self.standing.in_sync = in_sync
            effects.append(Persist(InSyncChanged(event_type=self.event_type, in_sync=in_sync)))
        if epoch.committing - epoch.finished == late:
            return effects + self._end(epoch, no_op=False) + self.start()
        epoch.committing -= late
        return effects

    def _end(self, epoch: Epoch, no_op: bool) -> list[Effect]:
        number = epoch.id.number
        del self.in_flight[number]
        self.held.discard_all(epoch.committed)
        self._write_outcomes(epoch)
        effects: list[Effect] = []
        if not self.late.any_of(number):
            effects.append(CancelTimer(("epoch", self.event_type, number)))
        pending = tuple(sorted(self._shown(epoch, key) for key in epoch.committing - epoch.finished))
        if pending:
            epoch.outcomes = [(msgspec.structs.replace(o, pending=pending), to) for o, to in epoch.outcomes]
            for outcome, _ in epoch.outcomes:
                self.outcomes.remember(outcome)
        effects += self.outcomes.settle_commits(epoch.outcomes)
        if no_op and self.log is None:
            self.memory.close(number)
        elif no_op and self.log is not None:
            entry = LogEntry(number=number)
            self.log.fill(entry)
            # A follower that receives the no-op entry counts its index as applied, so a crash must not free the index
            # for another entry: persist it first.
            effects.append(Persist(LogAppended(event_type=self.event_type, entry=entry)))
            effects += self.log.pump_all()
        return effects

    def _shown(self, epoch: Epoch, key: str) -> str:
        """A voter as publishers see it: its name where a set or a constraint names it, else a pseudonym."""
        named = self.log is not None or any(needs_identity(m.spec.constraints) for m in epoch.members)
        return (epoch.voters[key].identity if named else None) or hashed_voter(key)

    # -------------------------------------------------------------------------------------------- questions, recovery

    def on_outcome_requested(self, epoch: EpochId, digest: str, key: str, requester: Address) -> list[Effect]:
        """The response to a voter in doubt. No record means abort, unless the epoch is in progress."""
        live = self.in_flight.get(epoch.number)
        if live is not None and live.id == epoch:
            if key in live.voters:
                live.voters[key].address = requester  # it may have moved to another broker
            if live.stage is VOTING:
                return []
            response = self.decision_sender.decided(epoch, digest, voter_of(key), hashed_all(live.decided), requester)
            return [response, *self.late.on_outcome_requested(epoch, key)]
        return self.memory.respond(epoch, digest, voter_of(key), requester) + self.late.on_outcome_requested(epoch, key)

    def _is_over(self, epoch: EpochId) -> bool:
        """Whether no decision on this attempt can follow any more."""
        if epoch.incarnation != self.incarnation:
            return epoch.incarnation < self.incarnation
        live = self.in_flight.get(epoch.number)
        return epoch.number <= self._newest_number if live is None else epoch.attempt < live.id.attempt

    def on_read(self, entries: tuple[LogEntry, ...]) -> list[Effect]:
        """The entries of the requested numbers, from the disk."""
        return self.memory.on_read(entries)

    def recover(self, record: LogAppended | EpochCommitted | FinishesNoted | InSyncChanged) -> None:
        """Replay one record of the journal."""
        match record:
            case LogAppended(entry=entry, in_sync=in_sync, publisher=publisher):
                if self.log is not None:
                    self.log.fill(entry, publisher)
                if in_sync is not None:
                    self.standing.in_sync = in_sync
                for logged in entry.transactions:
                    self.outcomes.remember(TxOutcome(tx=logged.tx, outcome=Outcome.COMMITTED, log_number=entry.number))
            case InSyncChanged(in_sync=in_sync):
                self.standing.in_sync = in_sync
            case EpochCommitted(epoch=epoch, digest=digest, transactions=transactions, committing=committing):
                self.memory.decided[epoch] = Decided(digest, committing, transactions)
                for tx in transactions:
                    self.outcomes.remember(TxOutcome(tx=tx, outcome=Outcome.COMMITTED))
            case FinishesNoted(finished=finished):
                for epoch, voter in finished:
                    self.memory.drop_finished(epoch, voter)


def _not_asked(epoch: Epoch, sender: Sender, act: str) -> Effect:
    """No prepare went to this name and identity: the sender of the message is not the voter that it names."""
    reason = f"{sender.node} {act} in {epoch.id} under a name that is none of its voters'"
    return Reject(sender, "participate", epoch.id.event_type, reason)
