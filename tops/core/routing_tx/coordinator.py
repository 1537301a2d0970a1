"""The coordinator of the routing domain: it gives commits their numbers, decides, and remembers what it decided.

    OPEN ── commit asked for ──► QUEUED (isolated) ──► PREPARING ── all voted ──► committed
      │                             │                     │
      └──────── abort, time-out, initiator lost, a new epoch, a vote against ──► aborted (no record)

One isolated transaction is between prepare and decision at a time, so that the numbers are a serial order; an idle one
holds up nobody. A commit is on disk before anybody is sent it. Without a record a transaction is aborted.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from tops.core.routing_tx.termination import RESTARTED
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.routing import TxKind
from tops.protocol.effects import CancelTimer, Effect, Persist, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    AskRoutingTx,
    BeginRoutingTx,
    BrokerJoins,
    DomainOpened,
    EndRoutingTx,
    PlannedKind,
    PlannedStep,
    PlanStarted,
    PrepareRoutingTx,
    PublisherLost,
    RoutingTxBegan,
    RoutingTxDecided,
    RoutingTxEnded,
    RoutingTxVoted,
    Sender,
    TreeMessage,
    TxEpoch,
)
from tops.protocol.records import RoutingTxCommitted, RoutingTxRefused

OUTCOMES_MAX: Final = 10_000
TIMEOUT_MAX_S: Final = 3600.0
TIMER: Final = "routing"
BROKER: Final = "broker"  # the role of brokers

Flood = Callable[[TreeMessage], list[Effect]]


class State(Enum):
    """How far an open transaction is."""

    OPEN = "open"  # its initiator issues operations
    QUEUED = "queued"  # another isolated one is being prepared
    PREPARING = "preparing"  # the brokers vote


class OpenTx(msgspec.Struct):
    """A transaction that is not decided."""

    tx: TxId
    kind: TxKind
    initiator: Sender
    address: Address
    deadline: float
    steps: tuple[PlannedStep, ...] = ()
    state: State = State.OPEN
    number: int = 0


class RoutingCoordinator:
    """Decides on the transactions of a routing domain, at one broker."""

    def __init__(self, incarnation: int, flood: Flood) -> None:
        """`flood` sends a message to every broker of the tree, this one first."""
        self.incarnation, self._flood = incarnation, flood
        self._began_anew = 0
        self.number = 0
        self.open: dict[TxId, OpenTx] = {}
        self.committed: OrderedDict[TxId, RoutingTxCommitted] = OrderedDict()
        self.aborted: OrderedDict[TxId, Rejection] = OrderedDict()  # only to give the reason when asked again
        self.rejected: OrderedDict[TxId, None] = OrderedDict()  # asked about before they arrived
        self.not_everywhere: dict[TxId, int] = {}  # commits that some broker may not have applied, with their numbers
        self.joined: dict[str, tuple[int, int]] = {}  # brokers, with their incarnation and session
        self._queue: deque[TxId] = deque()
        self._preparing: TxId | None = None  # the isolated one that is

    @property
    def epoch(self) -> TxEpoch:
        """Transactions do not live longer than this."""
        return (self.incarnation, self._began_anew)

    # ------------------------------------------------------------------------------------------------ what is asked

    def on_begin(self, begin: BeginRoutingTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        """A transaction begins; a static one is complete with this."""
        tx = begin.tx
        if tx in self.open or tx in self.committed or tx in self.aborted or tx in self.rejected:
            return self._tell(tx, at)
        if not tx.startswith(f"{sender.node}.{sender.incarnation}."):
            return []  # not the sender's to begin; its broker rejects that before
        timeout_s = min(max(begin.timeout_s, 0.0), TIMEOUT_MAX_S)
        one = self.open[tx] = OpenTx(tx, begin.kind, sender, at, now + timeout_s, begin.steps)
        timer = SetTimer((TIMER, tx), timeout_s)
        if begin.kind is not TxKind.STATIC:
            return [timer, SendTo(at, RoutingTxBegan(tx=tx, base=self.number))]
        one.state = State.PREPARING
        return [timer, *self._flood(PlanStarted(tx=tx, epoch=self.epoch, steps=begin.steps))]

    def on_end(self, end: EndRoutingTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        """Its initiator wants it to end, or the broker of somebody who takes part rejects it."""
        one = self.open.get(end.tx)
        if not self._may_end(end, sender):
            return []
        if one is None:
            return self._end_unknown(end, at)
        if end.commit and one.state is not State.OPEN:
            return []  # asked for already
        if not end.commit:
            return self._abort(one, end.rejection or Rejection(RejectionCode.ABORTED, "its initiator aborted it"))
        if one.kind is not TxKind.ISOLATED:
            return self._prepare(one, 0)
        one.state = State.QUEUED
        self._queue.append(one.tx)
        return self._next()

    def _may_end(self, end: EndRoutingTx, sender: Sender) -> bool:
        """Its initiator may, and the broker of an initiator that is lost may abort."""
        if end.tx.startswith(f"{sender.node}.{sender.incarnation}."):
            return True
        return sender.role == BROKER and not end.commit

    def _end_unknown(self, end: EndRoutingTx, at: Address) -> list[Effect]:
        """Of an earlier epoch, perhaps: brokers that still hold something of it are told as well."""
        told = self._tell(end.tx, at)
        if end.tx in self.committed:
            return told
        rejection = self.aborted.setdefault(end.tx, end.rejection or RESTARTED)
        return [*told, *self._flood(RoutingTxDecided(tx=end.tx, committed=False, rejection=rejection))]

    def on_asked(self, asked: AskRoutingTx, sender: Sender, at: Address, now: float) -> list[Effect]:
        """A participant in doubt asks; one that asks too early does so again. What is not known here may be on its way,
        on a path that the question has overtaken: it must not begin any more."""
        tx = asked.tx
        if tx in self.open:
            return []
        if tx in self.committed or tx in self.aborted or tx in self.rejected:
            return self._tell(tx, at)
        self._reject(tx)
        return [Persist(RoutingTxRefused(tx=tx)), *self._tell(tx, at)]

    def _reject(self, tx: TxId) -> None:
        self.rejected[tx] = None
        if len(self.rejected) > OUTCOMES_MAX:
            self.rejected.popitem(last=False)

    def _tell(self, tx: TxId, at: Address) -> list[Effect]:
        if tx in self.open:
            return [SendTo(at, RoutingTxBegan(tx=tx, base=self.number))]
        if tx in self.committed:
            return [SendTo(at, RoutingTxEnded(tx=tx, committed=True))]
        return [SendTo(at, RoutingTxEnded(tx=tx, committed=False, rejection=self.aborted.get(tx, RESTARTED)))]

    def on_publisher_lost(self, lost: PublisherLost, sender: Sender) -> list[Effect]:
        """A site is gone for good, or for longer than anybody waits; only its broker knows."""
        if sender.role != BROKER:
            return []
        rejection = Rejection(RejectionCode.PUBLISHER_LOST, "its initiator is gone")
        effects: list[Effect] = []
        for one in list(self.open.values()):
            if (one.initiator.node, one.initiator.incarnation) == (lost.site, lost.incarnation):
                effects += self._abort(one, rejection)
        return effects

    def on_timer(self, tx: TxId) -> list[Effect]:
        """The transaction has had its time."""
        one = self.open.get(tx)
        return [] if one is None else self._abort(one, Rejection(RejectionCode.TIMED_OUT, "it was not decided in time"))

    # --------------------------------------------------------------------------------------------- prepare and decide

    def _next(self) -> list[Effect]:
        """The next isolated transaction in the queue is prepared, once the one before it is decided."""
        while self._queue and self._preparing is None:
            one = self.open.get(self._queue.popleft())
            if one is not None:
                self._preparing = one.tx
                return self._prepare(one, self.number + 1)
        return []

    def _prepare(self, one: OpenTx, number: int) -> list[Effect]:
        one.state, one.number = State.PREPARING, number
        return self._flood(PrepareRoutingTx(tx=one.tx, kind=one.kind, epoch=self.epoch, number=number))

    def on_voted(self, voted: RoutingTxVoted) -> list[Effect]:
        """The vote of the whole tree."""
        one = self.open.get(voted.tx)
        if one is None or one.state is not State.PREPARING or voted.epoch != self.epoch:
            return []
        missed = [i for i, s in enumerate(one.steps) if s.kind is PlannedKind.TCM and i not in voted.reached]
        if voted.rejection is not None:
            return self._abort(one, voted.rejection)
        if missed:
            text = f"the tcm at place {missed[0]} of the plan reached no site"
            return self._abort(one, Rejection(RejectionCode.NO_RECEIVER, text))
        return self._commit(one, voted.participants)

    def _commit(self, one: OpenTx, participants: tuple[str, ...]) -> list[Effect]:
        record = RoutingTxCommitted(tx=one.tx, number=one.number, participants=participants)
        self._remember(record)
        self.number = max(self.number, one.number)
        self.not_everywhere[one.tx] = one.number
        self._close(one)
        decided = RoutingTxDecided(tx=one.tx, committed=True, number=one.number)
        # Persist before anything is sent: whoever knows of a commit may rely on it.
        return [Persist(record), CancelTimer((TIMER, one.tx)), *self._flood(decided), *self._next()]

    def _abort(self, one: OpenTx, rejection: Rejection) -> list[Effect]:
        self._close(one)
        self.aborted[one.tx] = rejection
        if len(self.aborted) > OUTCOMES_MAX:
            self.aborted.popitem(last=False)
        decided = RoutingTxDecided(tx=one.tx, committed=False, rejection=rejection)
        told = RoutingTxEnded(tx=one.tx, committed=False, rejection=rejection)
        return [CancelTimer((TIMER, one.tx)), *self._flood(decided), SendTo(one.address, told), *self._next()]

    def _close(self, one: OpenTx) -> None:
        del self.open[one.tx]
        if self._preparing == one.tx:
            self._preparing = None

    def applied_everywhere(self, tx: TxId) -> list[Effect]:
        """Every broker has applied a commit."""
        self.not_everywhere.pop(tx, None)
        return []

    # ------------------------------------------------------------------------------------------------------- recovery

    def recover(self, record: RoutingTxCommitted | RoutingTxRefused) -> None:
        """One record of the journal, in order."""
        if isinstance(record, RoutingTxRefused):
            self._reject(record.tx)
            return
        self._remember(record)
        self.number = max(self.number, record.number)
        self.not_everywhere[record.tx] = record.number

    def _remember(self, record: RoutingTxCommitted) -> None:
        self.committed[record.tx] = record
        if len(self.committed) > OUTCOMES_MAX:
            forgotten, _ = self.committed.popitem(last=False)
            self.not_everywhere.pop(forgotten, None)

    def recovered(self) -> list[Effect]:
        """The journal is read: what it has no commit of is aborted everywhere."""
        return self._open_domain()

    def on_joins(self, joins: BrokerJoins, sender: Sender, at: Address, now: float) -> list[Effect]:
        """A broker, or one of its links, has lost what it knew of open transactions."""
        session = (joins.incarnation, joins.session)
        if self.joined.get(sender.node, (0, 0)) >= session:
            return []
        self.joined[sender.node] = session
        self._began_anew += 1
        lost, self._queue, self._preparing = list(self.open.values()), deque(), None
        effects = self._open_domain()
        for one in lost:
            effects += self._abort(one, RESTARTED)
        return effects

    def _open_domain(self) -> list[Effect]:
        committed = tuple(sorted(self.not_everywhere.items()))
        joined = {broker: incarnation for broker, (incarnation, _) in sorted(self.joined.items())}
        return self._flood(DomainOpened(epoch=self.epoch, number=self.number, committed=committed, joined=joined))
