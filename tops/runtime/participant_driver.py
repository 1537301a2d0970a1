"""Turns a machine's calls into a participant's callbacks, and what these return or raise into results.

Callbacks of one transaction never overlap, and ordinary events of one subscription come one after the other. A decided
outcome is retried until the callback succeeds.
"""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from tops.model.errors import InvariantBroken
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import Scope
from tops.protocol.effects import (
    AbortTxCall,
    ApplyEntries,
    BatchPrepared,
    Call,
    CommitTxCall,
    FinishBatch,
    JoinTx,
    Memo,
    NotifyTx,
    PrepareBatch,
    PreparedWork,
    PrepareTx,
    TakeEvent,
)
from tops.protocol.messages import Event, Sender
from tops.runtime.in_turn import InTurn
from tops.runtime.participants import BatchParticipant, Participant, Received
from tops.runtime.site_journal import SiteJournal, WorkPrepared

AGAIN_FIRST_S, AGAIN_MAX_S = 0.05, 5.0

log = logging.getLogger("tops.site")

Done = Callable[[int, Any], None]


class ParticipantDriver:
    """Drives the participant of one subscription."""

    def __init__(self, participant: Participant, done: Done, key: str, journal: SiteJournal | None) -> None:
        self.participant, self._done, self.key, self._journal = participant, done, key, journal
        self._loop = asyncio.get_running_loop()  # cached: to look it up costs a system call each time
        self._tasks: set[asyncio.Task[None]] = set()
        self._epochs = InTurn()
        self._events: dict[TxId, list[Received]] = {}  # of transactions under way
        self._early: set[TxId] = set()  # committed at prepare
        self._ordinary: deque[Received] = deque()
        self._notifying = False
        self._plain_notify = not inspect.iscoroutinefunction(participant.on_notify)
        self._batches = participant if isinstance(participant, BatchParticipant) else None

    @property
    def backlog(self) -> int:
        """Number of ordinary events that the participant has not processed yet."""
        return len(self._ordinary) + int(getattr(self.participant, "backlog", 0))

    def prepared_work(self) -> tuple[list[PreparedWork], list[Memo]]:
        """Prepared work of an earlier incarnation, from the site's journal: undecided work, and memos of commits that
        are not noted yet."""
        if self._journal is None:
            return [], []
        return self._journal.open_prepared_work(self.key), self._journal.committed_memos(self.key)

    def forget(self, memo: Memo) -> None:
        """The coordinator has noted the commit: delete the memo."""
        if self._journal is not None:
            self._journal.forget(self.key, memo)

    def judged(self, problem: str) -> None:
        """The result of comparing a replica's database with the coordinator's log."""
        if self._batches is not None:
            self._batches.on_history(problem)

    def close(self) -> None:
        self._epochs.stop()
        for task in list(self._tasks):
            task.cancel()

    # -------------------------------------------------------------------------------------------------- ordinary events

    def deliver(self, event: Event, tx: TxId | None, sender: Sender | None = None, out_of_order: bool = False) -> None:
        received = Received(event.type, event.body, tx, sender=sender, out_of_order=out_of_order)
        if self._plain_notify and not self._ordinary and not self._notifying:
            try:
                result = self.participant.on_notify(received)
            except Exception:
                log.exception("on_notify raised", extra={"event_type": event.type, "subscription": self.key})
                return
            if result is not None:
                self._notifying = True
                self._start(self._notify_all(result))
            return
        self._ordinary.append(received)
        if not self._notifying:
            self._notifying = True
            self._start(self._notify_all(None))

    def deliver_all(self, event_type: str, bodies: Sequence[dict[str, Any]], sender: Sender | None = None) -> None:
        """Deliver several ordinary events; a participant that is a plain function gets them without a queue."""
        if not self._plain_notify or self._ordinary or self._notifying:
            for body in bodies:
                self.deliver(Event(event_type, body), None, sender)
            return
        notify = self.participant.on_notify
        for index, body in enumerate(bodies):
            try:
                result = notify(Received(event_type, body, sender=sender))
            except Exception:
                log.exception("on_notify raised", extra={"event_type": event_type, "subscription": self.key})
                continue
            if result is not None:
                self._notifying = True
                self._ordinary.extend(Received(event_type, later, sender=sender) for later in bodies[index + 1 :])
                self._start(self._notify_all(result))
                return

    async def _notify_all(self, first: Awaitable[None] | None) -> None:
        try:
            if first is not None:
                await self._notify(lambda: first)
            while self._ordinary:
                received = self._ordinary.popleft()
                await self._notify(lambda received=received: self.participant.on_notify(received))  # type: ignore[misc]
        finally:
            self._notifying = False

    async def _notify(self, call: Callable[[], Awaitable[None] | None]) -> None:
        try:
            await _awaited(call())
        except Exception:
            log.exception("on_notify raised", extra={"subscription": self.key})

    # -------------------------------------------------------------------------------------------------------- calls

    def call(self, call: Call) -> None:
        if self._batches is not None and isinstance(call, PrepareBatch | FinishBatch | ApplyEntries):
            self._epochs.put(self._complete(call))  # calls for a replica's epochs run one at a time
        else:
            self._start(self._complete(call))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _complete(self, call: Call) -> None:
        batches = self._batches
        result = await (self._result(call) if batches is None else self._batch(batches, call))
        self._done(call.call, result)

    async def _result(self, call: Call) -> Any:
        match call:
            case JoinTx(tx=tx, spec=spec):
                return await self._scope(lambda: self.participant.on_join(tx, spec))
            case TakeEvent(number=number, event=event):
                received = Received(event.type, event.body, None, None, number)
                return await self._insist(lambda: self.participant.on_notify(received), "on_notify")
            case NotifyTx(tx=tx, sequence=sequence, event=event):
                received = Received(event.type, event.body, tx, sequence)
                return await self._vote(lambda: self._notify_tx(tx, received))
            case PrepareTx(tx=tx, memo=memo, events=events):
                return await self._vote(lambda: self._prepare(tx, memo, events))
            case CommitTxCall(tx=tx):
                return await self._insist(lambda: self._commit(tx), "on_commit")
            case AbortTxCall(tx=tx, rejection=rejection):
                return await self._insist(lambda: self._abort(tx, str(rejection)), "on_abort")
        raise InvariantBroken(f"no participant handles a {type(call).__name__}")

    async def _batch(self, participant: BatchParticipant, call: Call) -> Any:
        if isinstance(call, PrepareBatch):
            try:
                return await participant.prepare_batch(call.memo, call.members, call.before)
            except Exception as error:
                log.exception("prepare_batch raised", extra={"epoch": str(call.memo.epoch)})
                rejection = Rejection(RejectionCode.PARTICIPANT_FAILED, _reason(error))
                return BatchPrepared({m.tx: rejection for m in call.members})
        if isinstance(call, FinishBatch):
            return await self._insist(lambda: participant.finish_batch(call.memo, call.committed), "finish_batch")
        if isinstance(call, ApplyEntries):
            entries, upto, history, digests = call.entries, call.upto, call.history, call.digests
            return await self._insist(
                lambda: participant.apply_entries(entries, upto, history, digests), "apply_entries"
            )
        return await self._result(call)

    async def _scope(self, call: Callable[[], Awaitable[Scope] | Scope]) -> Scope:
        try:
            return Scope(await _awaited(call()))
        except Exception:
            log.exception("on_join raised", extra={"subscription": self.key})
            return Scope.NONE

    async def _vote(self, call: Callable[[], Awaitable[None]]) -> str | None:
        try:
            await call()
        except Exception as error:
            log.info("vote to abort", extra={"subscription": self.key, "reason": _reason(error)})
            return _reason(error)
        return None

    async def _insist(self, call: Callable[[], Awaitable[Any] | None], what: str) -> Any:
        """Retry until it succeeds: a decided outcome must be carried out, and a durable event must not be lost."""
        pause_s = AGAIN_FIRST_S
        while True:
            try:
                return await _awaited(call())
            except Exception:
                log.exception(f"{what} raised and is tried again", extra={"subscription": self.key})
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, AGAIN_MAX_S)

    # ------------------------------------------------------------------------------------------- one transaction

    async def _notify_tx(self, tx: TxId, received: Received) -> None:
        await _awaited(self.participant.on_notify_tx(received))
        self._events.setdefault(tx, []).append(received)

    async def _prepare(self, tx: TxId, memo: Memo | None, events: Sequence[Event]) -> None:
        received = self._events.get(tx) or [Received(e.type, e.body, tx, i) for i, e in enumerate(events, start=1)]
        self._events[tx] = received
        participant = self.participant
        carried_out = tx in self._early  # in an earlier attempt; this one only records the new memo
        if not carried_out:
            await _awaited(participant.on_prepare(tx))
            for resource in participant.resources:
                await _awaited(resource.prepare(tx, received))
        early = participant.compensatable and memo is not None
        if self._journal is not None and memo is not None:
            # On disk before this returns, and so before the vote: after a crash the vote must still be true.
            await self._journal.prepare(WorkPrepared(self.key, tx, memo, tuple(received), early))
        if early and not carried_out:
            await self._insist(lambda: self._commit_early(tx), "on_commit")

    async def _commit_early(self, tx: TxId) -> None:
        await self._carry_out(tx)
        self._early.add(tx)
        if self._journal is not None:
            await self._journal.compensate(self.key, tx, len(self._events[tx]))

    async def _carry_out(self, tx: TxId) -> None:
        await _awaited(self.participant.on_commit(tx))
        for resource in self.participant.resources:
            await _awaited(resource.commit(tx))

    async def _commit(self, tx: TxId) -> None:
        await self._recovered(tx)
        kept = self._journal is not None and (self.key, tx) in self._journal.kept
        if tx not in self._early and not kept:
            await self._carry_out(tx)
        await self._end(tx, committed=True)

    async def _abort(self, tx: TxId, reason: str) -> None:
        await self._recovered(tx)
        if tx in self._early:
            await self._compensate(tx)
        else:
            await _awaited(self.participant.on_abort(tx, reason))
            for resource in self.participant.resources:
                await _awaited(resource.abort(tx))
        await self._end(tx, committed=False)

    async def _recovered(self, tx: TxId) -> None:
        """Restore what an earlier incarnation prepared."""
        work = self._journal.prepared.get((self.key, tx)) if self._journal is not None else None
        if work is None or tx in self._events:
            return
        carried_out = self._journal is not None and (self.key, tx) in self._journal.compensated
        if not carried_out:
            await _awaited(self.participant.on_recover(tx, work.events))
        self._events[tx] = list(work.events)
        if work.early and carried_out:
            self._early.add(tx)
        elif work.early:
            # The crash may have come before or after the early commit: carry it out (again).
            await self._commit_early(tx)

    async def _compensate(self, tx: TxId) -> None:
        """Compensate the newest event first; with a journal each step is recorded, so that none is repeated after a
        crash."""
        events = self._events.get(tx, [])
        left = len(events)
        if self._journal is not None:
            left = self._journal.compensated.get((self.key, tx), left)
        for index in range(left - 1, -1, -1):
            await _awaited(self.participant.on_compensate(events[index]))
            if self._journal is not None:
                await self._journal.compensate(self.key, tx, index)
            del events[index:]
        await _awaited(self.participant.on_abort(tx, "compensated"))

    async def _end(self, tx: TxId, *, committed: bool) -> None:
        self._events.pop(tx, None)
        self._early.discard(tx)
        if self._journal is not None:
            await self._journal.end(self.key, tx, committed)


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
