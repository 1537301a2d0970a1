"""Participants: what an application does with the events it subscribed to, alone or as part of a transaction.

Derive from `Participant` and override what you need; every callback may be a plain function or a coroutine. What
happens when one raises:

| callback | an exception means |
|---|---|
| `on_join` | scope `NONE`: this participant stays out |
| `on_notify` | ordinary: logged; from a durable subscription: tried again, until it succeeds |
| `on_tcm` | the routing transaction aborts, with the exception's words as the reason |
| `on_notify_tx`, `on_prepare` | a vote to abort, with the exception's words as the reason |
| `on_commit`, `on_abort`, `on_compensate` | tried again, until it succeeds: the outcome is decided |
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
    """An event as a subscriber gets it."""

    type: str
    body: dict[str, Any]
    tx: TxId | None = None  # the transaction it belongs to
    sequence: int | None = None  # its place in the transaction
    number: int | None = None  # its number in the log of a durable type
    sender: Sender | None = None  # who published it, if the type discloses that


Handler = Callable[[Received], Awaitable[None] | None]


class Resource(Protocol):
    """Something with a promise of its own that takes part through a participant: a file, a queue, a second database.

    `prepare` raises to vote for an abort; after it returned, `commit` and `abort` must succeed in the end, and may be
    called again.
    """

    def prepare(self, tx: TxId, events: Sequence[Received]) -> Awaitable[None] | None: ...

    def commit(self, tx: TxId) -> Awaitable[None] | None: ...

    def abort(self, tx: TxId) -> Awaitable[None] | None: ...


class Participant:
    """The callbacks of one subscription. Without an override it takes what `scope` says and does nothing with it."""

    scope = Scope.NON_TRANSACTIONAL  # what `on_join` answers unless it is overridden
    compensatable = False  # commits at `on_prepare`; an abort later calls `on_compensate` for each event, newest first

    def __init__(self) -> None:
        self.resources: list[Resource] = []
        self._handlers: dict[str, tuple[Handler | None, Handler | None]] = {}

    def enlist(self, *resources: Resource) -> None:
        """Let these take part in every transaction of this participant: its vote is the conjunction of theirs."""
        self.resources += resources

    def handle(self, event_type: str, handler: Handler | None = None, *, compensate: Handler | None = None) -> None:
        """Call `handler` for events of that very type, and `compensate` to undo one."""
        self._handlers[event_type] = (handler, compensate)

    def on_join(self, tx: TxId, spec: TxSpec) -> Awaitable[Scope] | Scope:
        """A transaction is announced: how much of it does this participant take?"""
        return self.scope

    def on_notify(self, event: Received) -> Awaitable[None] | None:
        """An ordinary event, or one of a transaction that is taken without being part of it."""
        handler = self._handler(event)
        return handler(event) if handler is not None else None

    def on_notify_tx(self, event: Received) -> Awaitable[None] | None:
        """An event inside a transaction."""
        handler = self._handler(event)
        return handler(event) if handler is not None else None

    def on_prepare(self, tx: TxId) -> Awaitable[None] | None:
        """Promise to commit; after this returns, only the decision counts."""
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
        """A promise of an earlier life was found in the site's journal, and its outcome is about to be carried out.

        Rebuild what `on_commit` or `on_abort` needs. Unless overridden, the events are handed to `on_notify_tx` again.
        """
        return _notify_all(self, events)

    def _handler(self, event: Received) -> Handler | None:
        known = self._handlers.get(event.type)
        return known[0] if known is not None else None


async def _notify_all(participant: Participant, events: Sequence[Received]) -> None:
    for event in events:
        answer = participant.on_notify_tx(event)
        if answer is not None:
            await answer


class BatchParticipant(Participant, ABC):
    """A replica: takes whole epochs as one unit of work and keeps its own position in the log.

    It is the memory of its promises, too: `promises` are found again after a crash. With the scope `LOCAL` it does not
    vote and takes everything from the log.
    """

    scope = Scope.DISTRIBUTED

    @abstractmethod
    async def point(self) -> LogPoint:
        """What of the log is applied."""

    async def promises(self) -> Sequence[Memo]:
        """Epochs that are prepared and not ended."""
        return ()

    @abstractmethod
    async def prepare_batch(self, memo: Memo, members: tuple[EpochMember, ...], before: LogPoint) -> BatchPrepared:
        """Apply an epoch and promise it, with the digest of the log behind it; names the members that can't be applied
        here."""

    @abstractmethod
    async def finish_batch(self, memo: Memo, committed: bool) -> LogPoint | None:
        """Commit or roll back an epoch, also one that is unknown here; returns the point reached by a commit."""

    @abstractmethod
    async def apply_entries(self, entries: tuple[LogEntry, ...], upto: int, history: str, digests: Digests) -> LogPoint:
        """Apply what others have committed, each once, with the digests; returns the point reached."""

    def on_history(self, problem: str) -> None:
        """Whether the database and the coordinator's log hold the same history; empty: they do. While they do not,
        nothing is applied."""
