"""All effects that a machine may return.

Effects are data, and the driver carries them out in the order of the list. The central rule: an effect behind a
`Persist` is carried out only once that record is on disk, and so is every effect of later inputs, since they may
depend on state that is in memory and not on disk yet. The runtime makes that cheap by writing many records together
(group commit); the simulator tests it by crashing in between.
"""

from collections.abc import Hashable
from typing import Any

import msgspec

from tops.model.errors import TopsError
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.log_points import Digests, LogPoint
from tops.model.rejections import Rejection
from tops.protocol.messages import (
    Address,
    AddressedMessage,
    EpochId,
    EpochMember,
    Event,
    LinkMessage,
    LogEntry,
    Publication,
    Sender,
    TxSpec,
)
from tops.protocol.records import AnyRecord


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Something that the machine's driver carries out."""


class SendTo(Effect, frozen=True):
    """A message to an address; the node that hosts the machine routes it."""

    to: Address
    message: AddressedMessage


class Disseminate(Effect, frozen=True):
    """A publication for the multicast tree; the node that hosts the machine routes it."""

    publication: Publication


class SendOnLink(Effect, frozen=True):
    """A message over one link, to the neighbour at its other end; messages of one link stay in order."""

    link: NodeId
    message: LinkMessage


class Persist(Effect, frozen=True):
    """On disk before the next effect starts: a node that receives a decision may rely on it."""

    record: AnyRecord


class Note(Effect, frozen=True):
    """To the journal in order, without waiting for the disk: losing it in a crash costs repeated work and nothing
    else."""

    record: AnyRecord


class ReadLog(Effect, frozen=True):
    """Older entries of a log, from disk, for the feed of that name; the driver returns them with `log_read`."""

    event_type: str
    feed: str
    first: int
    last: int


class SetTimer(Effect, frozen=True):
    """Call back with `key` after that many seconds; a timer with the same key is replaced."""

    key: Hashable
    after_s: float


class CancelTimer(Effect, frozen=True):
    key: Hashable


class Alarm(Effect, frozen=True):
    """Something that an operator must see, such as a divergence, or a transaction that stays in doubt."""

    kind: str
    text: str


class Reject(Effect, frozen=True):
    """A message of this sender was not acted on, since its stamp does not justify what the message claims. It is
    audited, and the sender gets a `MessageRejected` if it is connected here. `subject`: as in that message."""

    sender: Sender
    verb: str
    event_type: str
    reason: str
    subject: str = ""
    code: str = "not-yours"  # or "quota", or why a log does not take a transaction


class CompleteRequest(Effect, frozen=True):
    """A request of the application has ended: its value, or an error to raise."""

    request: int
    value: Any = None
    error: TopsError | None = None


class Deliver(Effect, frozen=True):
    """An ordinary event (or a transactional one for a non-transactional subscriber) for a subscription's
    application."""

    subscription: int
    event: Event
    tx: TxId | None = None
    sender: Sender | None = None  # for types that disclose it
    out_of_order: bool = False  # in an ordering domain: what is ordered before or behind it is not known


class DeliverAll(Effect, frozen=True):
    """Ordinary events of one type, in order, for a subscription's application."""

    subscription: int
    event_type: str
    bodies: tuple[dict[str, Any], ...]
    sender: Sender | None = None  # for types that disclose it


class TxEnded(Effect, frozen=True):
    """The outcome of a transaction, for its publishers' applications."""

    tx: TxId
    committed: bool
    reason: str


class Memo(msgspec.Struct, frozen=True, array_like=True):
    """What a participant stores durably with its prepared work, so that it can request the decision after a crash."""

    epoch: EpochId
    digest: str
    voter: str
    transactions: tuple[TxId, ...]


class PreparedWork(msgspec.Struct, frozen=True):
    """Prepared work that a participant found after a crash: the memo, and the transactions that are prepared under it.

    These may be fewer than the memo names: the crash may have come while a new attempt was being prepared.
    """

    memo: Memo
    transactions: tuple[TxId, ...]


class Call(Effect, frozen=True):
    """A call to a subscription's participant. The driver returns the result with `call_done(call, result)`, after any
    time; calls of one transaction are made one after the other."""

    subscription: int
    call: int


class JoinTx(Call, frozen=True):
    """Choose a scope. Result: `Scope`."""

    tx: TxId
    spec: TxSpec
    initiator: Address


class TakeEvent(Call, frozen=True):
    """Process an ordinary event of a durable type, from the log. When the call returns the event is acknowledged; the
    result is ignored."""

    number: int
    event: Event


class TakeTcm(Call, frozen=True):
    """A tcm of a routing transaction: issue operations of it. Result: None, or a reason why it can't."""

    tx: TxId
    op: str  # of the tcm: operations that it triggers name it
    event: Event


class PlannedSubscription(Effect, frozen=True):
    """A static plan made a subscription at this site; its events follow under that number."""

    subscription: int
    tx: TxId
    event_type: str
    filter: Filter


class NotifyTx(Call, frozen=True):
    """Process an event inside the transaction. Result: None, or a reason why it can't."""

    tx: TxId
    sequence: int
    event: Event


class PrepareTx(Call, frozen=True):
    """Prepare durably, with `memo` (None: a local transaction, which commits right after). Result: None, or a reason
    for a NO.

    A compensatable participant commits here, and stores the events for a compensation."""

    tx: TxId
    memo: Memo | None
    events: tuple[Event, ...]


class CommitTxCall(Call, frozen=True):
    """Commit. `number`: the transaction comes from a log, which may deliver it again after a crash; a participant that
    stores the number with its work recognises that."""

    tx: TxId
    number: int | None = None


class AbortTxCall(Call, frozen=True):
    """Abort: roll back what is running or prepared; compensate, in reverse order, what was committed early."""

    tx: TxId
    rejection: Rejection


class DropMemo(Effect, frozen=True):
    """The coordinator has noted that the commit is carried out: the participant may delete the memo."""

    subscription: int
    memo: Memo


class PrepareBatch(Call, frozen=True):
    """Apply an epoch as one unit and prepare it. Result: `BatchPrepared`.

    `before` is the point that the database holds; the digest after the epoch is prepared with it, in the same
    transaction."""

    memo: Memo
    members: tuple[EpochMember, ...]
    before: LogPoint


class FinishBatch(Call, frozen=True):
    """Commit or roll back an epoch; an unknown one is rolled back already. Result of a commit: the point that the
    database holds now."""

    memo: Memo
    committed: bool


class ApplyEntries(Call, frozen=True):
    """Apply entries of the log, in this order, each once. Result: the point reached."""

    entries: tuple[LogEntry, ...]
    upto: int
    history: str
    digests: Digests  # at every index that is applied


class HistoryJudged(Effect, frozen=True):
    """The result of comparing a replica's database with the coordinator's log: a problem, or empty if they agree."""

    subscription: int
    problem: str


class BatchPrepared(msgspec.Struct, frozen=True):
    """The result of `PrepareBatch`; `rows` and `results` have one element per member, excluded or not."""

    excluded: dict[TxId, Rejection]
    rows: tuple[tuple[int, ...], ...] = ()
    results: tuple[bytes, ...] = ()
    log_digest: str = ""  # the digest that was prepared with the epoch; empty: nothing was prepared
