"""Participants: what an application does with events, ordinary ones or those of a transaction.

Derive from `Participant` and override what you need; every callback may be a plain function or a coroutine. An
exception in a callback means:

| callback | an exception means |
|---|---|
| `on_join` | scope `NONE`: this participant stays out |
| `on_notify` | ordinary: it is logged; from a durable subscription: it is retried until it succeeds |
| `on_tcm` | the routing transaction aborts, with the exception's text as the reason |
| `on_notify_tx`, `on_prepare` | a vote to abort, with the exception's text as the reason |
| `on_commit`, `on_abort`, `on_compensate` | it is retried until it succeeds: the outcome is decided |
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from tops.model.ids import TxId
from tops.model.log_points import Digests, LogPoint
from tops.model.transactions import Scope
from tops.protocol.effects import BatchPrepared, Memo
from tops.protocol.messages import EpochMember, LogEntry, Sender, TxSpec


class Received(msgspec.Struct, frozen=True, gc=False):
    """An event as a subscriber receives it."""

    type: str
    body: dict[str, Any]
    tx: TxId | None = None  # the transaction it belongs to
    sequence: int | None = None  # its number within the transaction
    number: int | None = None  # its index in the log of a durable type
    sender: Sender | None = None  # its publisher, if the type discloses it
    out_of_order: bool = False  # in an ordering domain: it came too late for its place


Handler = Callable[[Received], Awaitable[None] | None]


class Resource(Protocol):
    """Something that can prepare and takes part through a participant: a file, a queue, a second database.

    `prepare` raises an exception to vote for an abort. After it has returned, `commit` and `abort` must succeed
    eventually; they may be called repeatedly.
    """

    def prepare(self, tx: TxId, events: Sequence[Received]) -> Awaitable[None] | None: ...

    def commit(self, tx: TxId) -> Awaitable[None] | None: ...

    def abort(self, tx: TxId) -> Awaitable[None] | None: ...


class Participant:
    """The callbacks of one subscription. Without an override it takes part with `scope` and does nothing."""

    scope = Scope.NON_TRANSACTIONAL  # the result of `on_join` unless it is overridden
    compensatable = False  # commits at `on_prepare`; an abort later calls `on_compensate` for each event, newest first

    def __init__(self) -> None:
        self.resources: list[Resource] = []
        self._handlers: dict[str, tuple[Handler | None, Handler | None]] = {}

    def enlist(self, *resources: Resource) -> None:
        """Add resources to every transaction of this participant: its vote is YES only if all of them prepare."""
        self.resources += resources

    def handle(self, event_type: str, handler: Handler | None = None, *, compensate: Handler | None = None) -> None:
        """Call `handler` for events of exactly that type, and `compensate` to undo one."""
        self._handlers[event_type] = (handler, compensate)

    def on_join(self, tx: TxId, spec: TxSpec) -> Awaitable[Scope] | Scope:
        """A transaction is announced: return the scope in which this participant takes part."""
        return self.scope

    def on_notify(self, event: Received) -> Awaitable[None] | None:
        """An ordinary event, or one of a transaction in which this participant is non-transactional."""
        handler = self._handler(event)
        return handler(event) if handler is not None else None

    def on_notify_tx(self, event: Received) -> Awaitable[None] | None:
        """An event inside a transaction."""
        handler = self._handler(event)
        return handler(event) if handler is not None else None

    def on_prepare(self, tx: TxId) -> Awaitable[None] | None:
        """Prepare to commit. After this has returned, only the decision ends the transaction."""
        return None

    def on_tcm(self, tx: Any, event: Received) -> Awaitable[None] | None:
        """A tcm of a routing transaction: issue operations of it through `tx`, a `tops.RoutingTransaction`."""
        return None

    def on_planned(self, subscription: Any) -> Awaitable[None] | None:
        """A static plan has made a `tops.TreeSubscription` at this site; its events follow, once it has committed."""
        return None

    def on_commit(self, tx: TxId) -> Awaitable[None] | None:
        """The transaction is committed."""
        return None

    def on_abort(self, tx: TxId, reason: str) -> Awaitable[None] | None:
        """The transaction is aborted: undo what is running or prepared."""
        return None

    def on_compensate(self, event: Received) -> Awaitable[None] | None:
        """Undo one event of a transaction that this participant had committed early."""
        known = self._handlers.get(event.type)
        return known[1](event) if known is not None and known[1] is not None else None

    def on_recover(self, tx: TxId, events: Sequence[Received]) -> Awaitable[None] | None:
        """Prepared work of an earlier incarnation was found in the site's journal, and its outcome is about to be
        carried out.

        Rebuild what `on_commit` or `on_abort` needs. Unless overridden, `on_notify_tx` is called with the events again.
        """
        return _notify_all(self, events)

    def _handler(self, event: Received) -> Handler | None:
        known = self._handlers.get(event.type)
        return known[0] if known is not None else None


async def _notify_all(participant: Participant, events: Sequence[Received]) -> None:
    for event in events:
        result = participant.on_notify_tx(event)
        if result is not None:
            await result


class BatchParticipant(Participant, ABC):
    """A replica: applies whole epochs as one unit of work and stores its own position in the log.

    It also stores what it has prepared: `prepared_work` returns that after a crash. With the scope `LOCAL` it does not
    vote and applies everything from the log.
    """

    scope = Scope.DISTRIBUTED

    @abstractmethod
    async def point(self) -> LogPoint:
        """The point of the log that is applied."""

    async def prepared_work(self) -> Sequence[Memo]:
        """The memos of epochs that are prepared and not decided."""
        return ()

    @abstractmethod
    async def prepare_batch(self, memo: Memo, members: tuple[EpochMember, ...], before: LogPoint) -> BatchPrepared:
        """Apply an epoch and prepare it, with the digest of the log after it; the result names the members that can't
        be applied here."""

    @abstractmethod
    async def finish_batch(self, memo: Memo, committed: bool) -> LogPoint | None:
        """Commit or roll back an epoch, which may be unknown here; returns the point reached by a commit."""

    @abstractmethod
    async def apply_entries(self, entries: tuple[LogEntry, ...], upto: int, history: str, digests: Digests) -> LogPoint:
        """Apply entries of the log, each once, with the digests; returns the point reached."""

    def on_history(self, problem: str) -> None:
        """The database was compared with the coordinator's log: a problem, or empty if they hold the same history.
        While they do not, nothing is applied."""
