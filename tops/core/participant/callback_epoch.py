"""One epoch at a participant that works by callbacks: several sub-transactions, one vote, one outcome.

States: VOTING -> PREPARED -> FINISHING -> FINISHED -> removed.

When the participant has carried out a commit, it sends `EpochFinished` until the coordinator has noted it: the
coordinator must keep the decision as long as a voter may request it. The confirmation mostly comes with the next
prepare, see `PreparedEpochs`.
"""

from collections.abc import Callable, Container, Sequence
from enum import Enum
from functools import partial

import msgspec

from tops.core.participant.doubt import Doubt
from tops.core.participant.sub_tx_executor import SubTxExecutor
from tops.model.ids import TxId, hashed
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.effects import CancelTimer, DropMemo, Effect, Memo, SendTo
from tops.protocol.messages import Address, EpochFinished, EpochId, EpochMember, EpochVoted


class EpochStage(Enum):
    VOTING = "voting"  # ends when every sub-transaction has voted
    PREPARED = "prepared"  # ends with the decision
    FINISHING = "finishing"  # the decision is being carried out
    FINISHED = "finished"  # committed; ends when the coordinator has noted it
    ENDED = "ended"


VOTING, PREPARED, FINISHING, FINISHED, ENDED = EpochStage  # read with every message


EpochKey = tuple[str, int, int, int]  # the voter's name; the coordinator's incarnation, the number, the attempt


def epoch_key(voter: str, epoch: EpochId) -> EpochKey:
    return (voter, epoch.incarnation, epoch.number, epoch.attempt)


class CallbackEpoch(msgspec.Struct, eq=False):
    """Collects the votes of the sub-transactions of one epoch and hands them its decision."""

    subscription: int
    memo: Memo
    key: EpochKey
    executors: dict[TxId, SubTxExecutor]
    doubt: Doubt
    _finished_here: "Callable[[CallbackEpoch], None]"
    _ended: "Callable[[CallbackEpoch], None]"
    _settled: Callable[[int], list[Effect]]
    stage: EpochStage = VOTING
    _votes: dict[TxId, Rejection | None] = {}
    _unfinished: set[TxId] = set()

    def prepare(self, members: Sequence[EpochMember]) -> list[Effect]:
        """Prepare every sub-transaction; one that is unknown here is excluded."""
        effects: list[Effect] = []
        for member in members:
            executor = self.executors.get(member.tx)
            if executor is None:
                effects += self._voted(
                    member.tx, Rejection(RejectionCode.PARTICIPANT_FAILED, f"{member.tx} is unknown here")
                )
            else:
                effects += executor.prepare(self.memo, member.last_sequence, partial(self._voted, member.tx))
        return effects

    def _voted(self, tx: TxId, rejection: Rejection | None) -> list[Effect]:
        self._votes[tx] = rejection
        if self.stage is not VOTING or len(self._votes) < len(self.memo.transactions):
            return []
        self.stage = PREPARED
        memo = self.memo
        excluded = {t: why.bounded() for t in memo.transactions if (why := self._votes[t]) is not None}
        vote = EpochVoted(epoch=memo.epoch, digest=memo.digest, voter=memo.voter, excluded=excluded)
        voted = SendTo(Address(memo.epoch.coordinator), vote)
        if len(excluded) == len(memo.transactions):
            self._end()  # nothing is prepared: no decision will come
            return [voted, *self._settled(self.subscription)]
        return [voted, self.doubt.wait]

    def on_decided(self, committing: frozenset[str]) -> list[Effect]:
        """The decision, from the coordinator or relayed by a peer that received it."""
        if self.stage not in (VOTING, PREPARED):
            return []
        self.stage = FINISHING
        committed = hashed(self.memo.voter) in committing
        live = self._live()
        self._unfinished = set(live)
        # A commit sets the timer again when it is carried out; until then the timer has no effect.
        effects: list[Effect] = [] if committed and live else [CancelTimer(self.doubt.timer)]
        if not live:
            self._end()
            return effects + self._settled(self.subscription)
        if not committed:
            return effects + self._undo(list(live.items()))
        for tx, executor in live.items():
            effects += executor.finish(True, partial(self._finished, tx, True))
        return effects

    def _live(self) -> dict[TxId, SubTxExecutor]:
        """The sub-transactions that the decision concerns."""
        return {tx: e for tx, e in self.executors.items() if self._votes.get(tx) is None and self.holds(e)}

    def _undo(self, left: list[tuple[TxId, SubTxExecutor]]) -> list[Effect]:
        """Undo the latest first, one after the other: what was committed early is compensated in reverse order."""
        if not left:
            return []
        tx, executor = left.pop()
        if not self.holds(executor):  # prepared in a later epoch meanwhile
            return self._finished(tx, False) + self._undo(left)
        return executor.finish(False, lambda: self._finished(tx, False) + self._undo(left))

    def holds(self, executor: SubTxExecutor) -> bool:
        """Whether this epoch was the last to prepare the sub-transaction. A later epoch that has prepared it again owns
        it: the decision on this one must not touch it."""
        return executor.epoch == self.memo.epoch

    def _finished(self, tx: TxId, committed: bool) -> list[Effect]:
        self._unfinished.discard(tx)
        if self._unfinished or self.stage is not FINISHING:
            return []
        if not committed:
            self._end()
            return self._settled(self.subscription)
        self.stage = FINISHED
        self._finished_here(self)
        return self.on_timer() + self._settled(self.subscription)

    def on_timer(self) -> list[Effect]:
        """Request the decision once more, or report once more that it is carried out."""
        if self.stage is PREPARED:
            return self.doubt.query()
        if self.stage is not FINISHED:
            return []
        epoch = self.memo.epoch
        finished = EpochFinished(epoch=epoch, voter=self.memo.voter, note=True)
        return [SendTo(Address(epoch.coordinator), finished), self.doubt.wait]

    def on_noted(self) -> list[Effect]:
        if self.stage is not FINISHED:
            return []
        self._end()
        return [CancelTimer(self.doubt.timer), DropMemo(self.subscription, self.memo)]

    def loses_one(self, members: Container[TxId]) -> bool:
        """Whether a sub-transaction that is prepared here, or being prepared, is not among these."""
        return self.stage in (VOTING, PREPARED) and any(tx not in members for tx in self._live())

    def superseded(self, members: Container[TxId]) -> list[Effect]:
        """A newer attempt replaces this one: its prepare takes over its members, the other members end here."""
        if self.stage not in (VOTING, PREPARED):
            return []
        self._end()
        effects: list[Effect] = [CancelTimer(self.doubt.timer)]
        for tx, executor in self.executors.items():
            if tx not in members and self.holds(executor):
                effects += executor.finish(False, list)
        return effects

    @property
    def settled(self) -> bool:
        """Whether its outcome has been carried out here."""
        return self.stage is FINISHED or self.stage is ENDED

    def _end(self) -> None:
        self.stage = ENDED
        self._ended(self)
