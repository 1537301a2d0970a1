"""What a site has prepared: the epochs that it votes in, the decisions that it received, and its doubts.

A participant that works by callbacks has one `CallbackEpoch` per attempt; a replica manages its epochs itself
(`EpochExecutor`), and messages for it are only passed on here.
"""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from tops.core.commit.decision_sender import CheckProof
from tops.core.commit.eviction import trim
from tops.core.participant.callback_epoch import CallbackEpoch, EpochKey, EpochStage, epoch_key
from tops.core.participant.doubt import Doubt
from tops.core.participant.sub_transactions import SubTransactions
from tops.core.participant.sub_tx_executor import SubTxExecutor
from tops.core.participant.subscriptions import Subscription, Subscriptions
from tops.core.participant.turns import Turn, Turns
from tops.core.participant.voters import Voters
from tops.model.ids import NodeId, TxId, standing_pseudonym
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import TxType
from tops.protocol.effects import Alarm, Effect, Memo, PreparedWork, SendTo
from tops.protocol.messages import (
    Address,
    AppliedIndexReported,
    DecisionRelayed,
    EpochDecided,
    EpochId,
    EpochMember,
    EpochVoted,
    Event,
    FinishNoted,
    GetAppliedIndex,
    PrepareEpoch,
    QueryPeers,
    TxSpec,
)

BUSY = Rejection(RejectionCode.BUSY, "the participant has another epoch in progress, which it may have to undo")
DECIDED_WITHOUT = Rejection(RejectionCode.ABORTED, "it was decided without a vote")
CoordinatorIncarnation = tuple[str, NodeId, int]  # of an event type


class PreparedEpochs:
    """The epochs of one site's participants, from the prepare to the coordinator's note."""

    def __init__(
        self,
        subscriptions: Subscriptions,
        sub_transactions: SubTransactions,
        voters: Voters,
        brokers: Sequence[NodeId],
        doubt_s: float,
        check_proof: CheckProof | None,
    ) -> None:
        """`check_proof` is None in a cluster without keys, where peers are trusted."""
        self._check_proof = check_proof
        self._subscriptions, self._sub_transactions, self._voters = subscriptions, sub_transactions, voters
        self._brokers, self._doubt_s = brokers, doubt_s
        self.epochs: dict[EpochKey, CallbackEpoch] = {}
        self._retried: dict[tuple[str, int, int], CallbackEpoch] = {}  # the attempt that counts, if not the first
        self._finished: dict[CoordinatorIncarnation, dict[EpochKey, CallbackEpoch]] = {}  # not noted
        self._turns = Turns(self.epochs, voters)
        self._decisions: OrderedDict[EpochId, EpochDecided] = OrderedDict()

    def on_prepare(self, prepare: PrepareEpoch) -> list[Effect]:
        number = self._voters.subscription(prepare.voter)
        s = self._subscriptions.all.get(number)
        if s is None and number not in self._voters.own:
            return []  # no subscription of this site votes under that name: the coordinator stops waiting at a time-out
        if prepare.epoch in self._decisions:
            return []  # too late: this attempt has been decided
        if s is not None and s.replica is not None:
            return s.replica.on_prepare(prepare)
        key = epoch_key(prepare.voter, prepare.epoch)
        if key in self.epochs or (self._retried and self._is_retried_later(key)):
            return []
        former = self._former(key) if prepare.epoch.attempt > 1 else []
        left = {m.tx for m in prepare.members} if former else set()
        if number in self._voters.serial:
            if lessened := [e for e in former if e.loses_one(left)]:
                self._turns.wait(number, self._with_events(number, prepare))
                return [effect for e in lessened for effect in e.on_decided(frozenset())]
            turn = self._turns.admit(number, prepare)
            if turn is Turn.LATER:
                return []
            if turn is Turn.NEVER:
                return self._decline(number, prepare)
        effects = self._drop_noted(prepare.epoch, prepare.noted)
        for known in former:
            effects += known.superseded(left)
        transactions: list[TxId] = []
        executors: dict[TxId, SubTxExecutor] = {}
        for member in prepare.members:
            transactions.append(member.tx)
            executor = self._sub_transactions.get(member.tx, number)
            if (executor is None or executor.undoing) and member.events is not None and s is not None:
                executor, begun = self._one_shot(s, prepare.epoch, member.tx, member.events, executor)
                effects += begun
            if executor is not None:
                executors[member.tx] = executor
        memo = Memo(prepare.epoch, prepare.digest, prepare.voter, tuple(transactions))
        epoch = self._open_epoch(number, memo, key, executors)
        return effects + epoch.prepare(prepare.members)

    def _with_events(self, number: int, prepare: PrepareEpoch) -> PrepareEpoch:
        """The prepare with all events, so that the members can be executed once more after they have been undone."""
        members = []
        for member in prepare.members:
            executor = self._sub_transactions.get(member.tx, number)
            if member.events is None and executor is not None and executor.last_sequence == member.last_sequence:
                member = EpochMember(member.tx, member.last_sequence, tuple(executor.events))
            members.append(member)
        return msgspec.structs.replace(prepare, members=tuple(members))

    def _decline(self, number: int, prepare: PrepareEpoch) -> list[Effect]:
        """Vote NO on all members, and undo what was begun of them."""
        excluded = dict.fromkeys([m.tx for m in prepare.members], BUSY)
        vote = EpochVoted(epoch=prepare.epoch, digest=prepare.digest, voter=prepare.voter, excluded=excluded)
        effects: list[Effect] = [SendTo(Address(prepare.epoch.coordinator), vote)]
        return effects + self._abandon(number, prepare, BUSY)

    def _abandon(self, number: int, prepare: PrepareEpoch, rejection: Rejection) -> list[Effect]:
        found = [self._sub_transactions.get(m.tx, number) for m in prepare.members]
        return [effect for e in found if e is not None for effect in e.abandon(rejection)]

    def _next_turn(self, number: int) -> list[Effect]:
        """An epoch has ended at a participant: one that waited for it may be prepared now."""
        effects: list[Effect] = []
        while number in self._voters.serial and (prepare := self._turns.next(number)) is not None:
            effects += self.on_prepare(prepare)  # this does nothing if the epoch was decided meanwhile
            self._release(prepare.voter)
        return effects

    def _release(self, voter: str) -> None:
        if self._voters.release(voter):
            s = self._subscriptions.by_voter(voter)
            if s is None or s.voter != voter:  # a name for one transaction, or for a link that has ended
                self._voters.names.pop(voter, None)

    def _one_shot(
        self, s: Subscription, epoch: EpochId, tx: TxId, events: tuple[Event, ...], former: SubTxExecutor | None
    ) -> tuple[SubTxExecutor, list[Effect]]:
        spec = TxSpec(epoch.event_type, TxType.DISTRIBUTED, census=None)
        executor = self._sub_transactions.open(s, tx, spec, standing_pseudonym(s.secret, tx), s.voter)
        executor.begin()
        if former is not None:
            executor.follow(former)
        effects: list[Effect] = []
        for sequence, event in enumerate(events, start=1):
            effects += executor.on_event(sequence, event)
        return executor, effects

    def _is_retried_later(self, key: EpochKey) -> bool:
        later = self._retried.get(key[:3])
        return later is not None and later.memo.epoch.attempt > key[3]

    def _former(self, key: EpochKey) -> list[CallbackEpoch]:
        """The earlier attempts at the same number that are known here."""
        return [e for attempt in range(1, key[3]) if (e := self.epochs.get((*key[:3], attempt))) is not None]

    def _open_epoch(
        self, number: int, memo: Memo, key: EpochKey, executors: dict[TxId, SubTxExecutor]
    ) -> CallbackEpoch:
        doubt = Doubt(memo, self._brokers, self._doubt_s)
        epoch = self.epochs[key] = CallbackEpoch(
            number, memo, key, executors, doubt, self._epoch_finished, self._epoch_ended, self._next_turn
        )
        if key[3] > 1:
            self._retried[key[:3]] = epoch
        self._voters.retain(memo.voter)
        return epoch

    def _epoch_finished(self, epoch: CallbackEpoch) -> None:
        self._finished.setdefault(coordinator_incarnation(epoch.memo.epoch), {})[epoch.key] = epoch

    def _drop_noted(self, latest: EpochId, below: int) -> list[Effect]:
        """Drop the memos of finishes that the coordinator has noted. Numbers finish in about their order, so the scan
        stops at the first one that is not noted."""
        incarnation = coordinator_incarnation(latest)
        finished = self._finished.get(incarnation)
        effects: list[Effect] = []
        while finished:
            key, oldest = next(iter(finished.items()))
            if oldest.memo.epoch.number >= below:
                return effects
            del finished[key]
            effects += oldest.on_noted()
        self._finished.pop(incarnation, None)
        return effects

    def _epoch_ended(self, epoch: CallbackEpoch) -> None:
        key = epoch.key
        del self.epochs[key]
        if self._retried and self._retried.get(key[:3]) is epoch:
            del self._retried[key[:3]]
        self._release(epoch.memo.voter)

    def on_decided(self, decided: EpochDecided) -> list[Effect]:
        self._decisions[decided.epoch] = decided
        trim(self._decisions)
        if self._turns.waiting:
            number = self._voters.subscription(decided.voter)
            withdrawn = self._turns.withdraw(number, decided.epoch)
            if withdrawn is not None:
                effects = self._abandon(number, withdrawn, DECIDED_WITHOUT)
                self._release(withdrawn.voter)
                return effects
        return self._learn(decided.voter, decided.epoch, decided.digest, decided.committing, decided.log_digest)

    def _learn(
        self, voter: str, epoch: EpochId, digest: str, committing: frozenset[str], log_digest: str
    ) -> list[Effect]:
        known = self.epochs.get(epoch_key(voter, epoch))
        if known is not None and known.memo.epoch == epoch and known.memo.digest == digest:
            return known.on_decided(committing)
        replica = self._subscriptions.replica_of(voter)
        return replica.learn(epoch, digest, committing, log_digest) if replica is not None else []

    def on_query_peers(self, query: QueryPeers, requester: Address) -> list[Effect]:
        known = self._decisions.get(query.epoch)
        if known is None or known.digest != query.digest or (self._check_proof is not None and not known.proof):
            return []  # not received in this incarnation, or without the proof that a peer requires
        knows = DecisionRelayed(
            epoch=known.epoch,
            digest=known.digest,
            committing=known.committing,
            log_digest=known.log_digest,
            proof=known.proof,
        )
        return [SendTo(requester, knows)]

    def on_decision_relayed(self, knows: DecisionRelayed) -> list[Effect]:
        epoch, decision = knows.epoch, (knows.digest, knows.committing, knows.log_digest)
        voters = [e.memo.voter for e in self.epochs.values() if e.memo.epoch == epoch]
        subscriptions = [*self._subscriptions.leaving.values(), *self._subscriptions.all.values()]
        replicas = [s.replica for s in subscriptions if s.replica is not None and s.replica.is_at(epoch)]
        if not voters and not replicas:
            return []
        if self._check_proof is not None and (why := self._check_proof(knows.text, epoch.coordinator, knows.proof)):
            text = f"{epoch}: a peer relayed a decision that its coordinator has not signed; it is ignored: {why}"
            return [Alarm("unsigned-decision", text)]
        effects = [effect for voter in voters for effect in self._learn(voter, epoch, *decision)]
        return effects + [effect for replica in replicas for effect in replica.learn(epoch, *decision)]

    def on_get_applied_index(self, query: GetAppliedIndex) -> list[Effect]:
        """A coordinator has started: report the applied index, and the highest index that is known to be decided."""
        replica = self._subscriptions.replica_named(query.name, query.event_type)
        if replica is None:
            return []
        committed = [epoch for epoch, decided in self._decisions.items() if decided.committing]
        received = [
            epoch.number
            for epoch in committed
            if epoch.event_type == query.event_type
            and epoch.incarnation >= query.since
            and (query.resumed_in is None or epoch.incarnation < query.resumed_in)
        ]
        reported = AppliedIndexReported(
            event_type=query.event_type,
            incarnation=query.incarnation,
            point=replica.point,
            decided=max([replica.decided, *received]),
            transactions=replica.committed_after(query.end),
        )
        return [SendTo(Address(self._subscriptions.rendezvous(query.event_type)), reported)]

    def on_noted(self, noted: FinishNoted) -> list[Effect]:
        epoch = self.epochs.get(epoch_key(noted.voter, noted.epoch))
        if epoch is None or epoch.memo.epoch != noted.epoch:
            return []
        incarnation = coordinator_incarnation(noted.epoch)
        finished = self._finished.get(incarnation, {})
        finished.pop(epoch.key, None)
        if not finished:
            self._finished.pop(incarnation, None)
        return epoch.on_noted()

    def on_doubt(self, voter: str, incarnation: int, number: int, attempt: int) -> list[Effect]:
        """The doubt timer of an epoch: request its decision again, or report its finish again."""
        epoch = self.epochs.get((voter, incarnation, number, attempt))
        if epoch is not None:
            return epoch.on_timer()
        replica = self._subscriptions.replica_of(voter)
        return replica.on_doubt() if replica is not None else []

    def recover(self, number: int, prepared_work: Sequence[PreparedWork], kept: Sequence[Memo] = ()) -> list[Effect]:
        """Prepared work that a participant found after a crash, and commits (`kept`) that are not noted yet."""
        s = self._subscriptions.all.get(number)
        found = [*prepared_work, *(PreparedWork(memo, ()) for memo in kept)]
        for retain in found:
            self._voters.names[retain.memo.voter] = number
        if s is not None and s.replica is not None:
            return s.replica.recover([p.memo for p in prepared_work])
        effects: list[Effect] = []
        for retain in sorted(found, key=lambda p: p.memo.epoch.attempt):
            memo = retain.memo
            executors: dict[TxId, SubTxExecutor] = {}
            for tx in retain.transactions:
                spec = TxSpec(memo.epoch.event_type, TxType.DISTRIBUTED)
                executors[tx] = self._sub_transactions.recover(tx, number, spec, memo)
            epoch = self._open_epoch(number, memo, epoch_key(memo.voter, memo.epoch), executors)
            # No open sub-transaction is left: the commit was carried out before the crash.
            epoch.stage = EpochStage.PREPARED if executors else EpochStage.FINISHED
            effects += epoch.on_timer()
        return effects


def coordinator_incarnation(epoch: EpochId) -> CoordinatorIncarnation:
    """What assigned the epoch's number: an incarnation of a coordinator, for one event type."""
    return (epoch.event_type, epoch.coordinator, epoch.incarnation)
