"""Everything a machine may ask of the world.

Effects are data, and their order in a list is the order in which they happen. The one rule that everything rests on:
an effect behind a `Persist` is carried out only once that record is on disk, and so is every effect of later inputs,
since a machine's memory already knows what its disk does not yet. The runtime makes that cheap by putting many records
on disk together; the simulator makes it hurt by crashing in between.
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
    EpochId,
    EpochMember,
    Event,
    Letter,
    LinkMessage,
    LogEntry,
    Publication,
    Sender,
    TxSpec,
)
from tops.protocol.records import AnyRecord


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Something to be done by whoever drives the machine."""


class Post(Effect, frozen=True):
    """A letter to an address; the node that hosts the machine finds the way."""

    to: Address
    letter: Letter


class Disseminate(Effect, frozen=True):
    """A publication for the multicast tree; the node that hosts the machine finds the way."""

    publication: Publication


class Send(Effect, frozen=True):
    """Over one link, to the neighbour at its other end, in order."""

    link: NodeId
    message: LinkMessage


class Persist(Effect, frozen=True):
    """On disk before the next effect starts: whoever hears a decision may rely on it."""

    record: AnyRecord


class Note(Effect, frozen=True):
    """To the journal in its turn, but nobody waits for it: losing it in a crash costs work, never truth."""

    record: AnyRecord


class ReadLog(Effect, frozen=True):
    """Older entries of a log, from disk, for the feed of that name; answered with `log_read`."""

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
    """Something an operator must see: divergence in the making, a promise that is kept for too long."""

    kind: str
    text: str


class Reject(Effect, frozen=True):
    """A message of this sender was not acted on, since it claims something that its stamp does not bear out: to be
    audited, and to be answered where the sender is connected here. `subject` names the message as `Refused` does."""

    sender: Sender
    verb: str
    event_type: str
    reason: str
    subject: str = ""
    code: str = "not-yours"  # or "quota", or why a log does not take a transaction


class Answer(Effect, frozen=True):
    """The end of a request that the application made: a value, or an error to raise."""

    request: int
    value: Any = None
    error: TopsError | None = None


class Deliver(Effect, frozen=True):
    """An ordinary event (or a transactional one taken as such) for a subscription's application."""

    subscription: int
    event: Event
    tx: TxId | None = None
    sender: Sender | None = None  # for types that disclose it


class DeliverAll(Effect, frozen=True):
    """Ordinary events of one type, in order, for a subscription's application."""

    subscription: int
    event_type: str
    bodies: tuple[dict[str, Any], ...]
    sender: Sender | None = None  # for types that disclose it


class TxEnded(Effect, frozen=True):
    """Publishers hear how their transaction ended, too."""

    tx: TxId
    committed: bool
    reason: str


class Memo(msgspec.Struct, frozen=True, array_like=True):
    """What a participant keeps with its promise, so that it can ask for the decision after a crash."""

    epoch: EpochId
    digest: str
    voter: str
    transactions: tuple[TxId, ...]


class Promise(msgspec.Struct, frozen=True):
    """A promise that a participant found again after a crash, and which transactions it holds under it.

    These may be fewer than the memo names: a crash can come while the promises of an epoch are being renewed.
    """

    memo: Memo
    transactions: tuple[TxId, ...]


class Call(Effect, frozen=True):
    """A request to a subscription's participant. It answers with `call_done(call, result)`, in any time it needs;
    calls of one transaction are made one after the other."""

    subscription: int
    call: int


class AskJoin(Call, frozen=True):
    """Which scope? Result: `Scope`."""

    tx: TxId
    spec: TxSpec
    initiator: Address


class TakeEvent(Call, frozen=True):
    """An ordinary event of a durable type, from the log. Returns when it is safely taken; any result will do."""

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
    """Promise, durably, with `memo` (None: a local transaction, which commits right after). Result: None or a reason.

    A compensatable participant commits here and remembers what it consumed."""

    tx: TxId
    memo: Memo | None
    events: tuple[Event, ...]


class CommitTxCall(Call, frozen=True):
    """Carry out. `number`: the transaction comes from a log, which may deliver it again after a crash; a participant
    that remembers the number with its work sees that."""

    tx: TxId
    number: int | None = None


class AbortTxCall(Call, frozen=True):
    """Undo: roll back what is running or prepared; compensate, in reverse order, what was committed early."""

    tx: TxId
    rejection: Rejection


class ForgetPromise(Effect, frozen=True):
    """The coordinator knows that the promise is kept: the participant's memory of it may go."""

    subscription: int
    memo: Memo


class PrepareBatch(Call, frozen=True):
    """Apply an epoch as one unit and promise it. Result: `BatchPrepared`.

    `before` is what the database holds; the digest behind it is prepared with the epoch, in the same transaction."""

    memo: Memo
    members: tuple[EpochMember, ...]
    before: LogPoint


class FinishBatch(Call, frozen=True):
    """Commit or roll back an epoch, also one that is unknown here (it is rolled back already). Result, of a commit: the
    point that the database holds now."""

    memo: Memo
    committed: bool


class ApplyEntries(Call, frozen=True):
    """Apply what others have committed, in this order, each once. Result: the point reached."""

    entries: tuple[LogEntry, ...]
    upto: int
    history: str
    digests: Digests  # at every index that is applied


class HistoryJudged(Effect, frozen=True):
    """Whether a replica's database and the coordinator's log hold the same history; empty: they do."""

    subscription: int
    problem: str


class BatchPrepared(msgspec.Struct, frozen=True):
    """A participant's answer to `PrepareBatch`; `rows` and `results` have one element per member, excluded or not."""

    excluded: dict[TxId, Rejection]
    rows: tuple[tuple[int, ...], ...] = ()
    results: tuple[bytes, ...] = ()
    log_digest: str = ""  # what was prepared, as it will stand in the database; empty: nothing was
