"""How much of the logs a broker retains: what all durable subscribers have acknowledged may be truncated.

Entries that a subscriber has not acknowledged are retained for it; when that fills the journal, the broker warns or
rejects new durable events, as configured. A subscriber for which too much of the journal is retained is dropped, unless
it is a replica. Before old segments are deleted, all other state that they contain is written again (a checkpoint).
"""

import time
from collections import deque
from collections.abc import Iterator
from enum import Enum

from tops.core.coordinator.log_opening import replicas_unconfirmed
from tops.core.log.event_log import EventLog
from tops.model.log_points import LogPoint
from tops.protocol.messages import PROTOCOL
from tops.protocol.records import (
    AnyRecord,
    EpochCommitted,
    HistoryBegun,
    InSyncChanged,
    LogAppended,
    LogCut,
    LogDecided,
    LogStale,
    MembersDeclared,
    OutcomesTruncated,
    PlansDeclared,
    PublishersRetained,
    RoutingTxRefused,
    Started,
    SubscriptionAdvanced,
    TxRejected,
    TypeDefined,
)
from tops.runtime.broker_node import BrokerNode
from tops.runtime.config import Retention

CHECK_EVERY_S = 2.0


class JournalSpace(Enum):
    ENOUGH = "enough"
    FULL = "full"  # over the size, and durable subscribers still need the entries


class Retainer:
    """Truncates the journal regularly."""

    def __init__(self, node: BrokerNode, retention: Retention) -> None:
        self.node, self.retention = node, retention
        self.space = JournalSpace.ENOUGH
        self.dropped_segments = 0
        self._marks: deque[tuple[float, int]] = deque()  # time -> end of the journal
        self._checked_at = 0.0

    def recovered(self) -> None:
        """After recovery: set from where on the logs are retained."""
        self._keep_from(self.node.store.journal.first_sequence)

    def _keep_from(self, sequence: int) -> None:
        """Records of the journal before this one are deleted, or about to be deleted: truncate the logs accordingly."""
        for name, log in self.node.core.rendezvous.logs.items():
            index = self.node.store.indexes.get(name)
            first = log.last_number + 1
            if index is not None and len(index):
                first = index.first_from(sequence, log.undecided)
                if sequence > self.node.store.journal.first_sequence:
                    index.truncate_before(first)
            log.keep_from(min(first, log.decided_upto + 1))

    async def step(self) -> None:
        now = time.time()
        if now - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        journal = self.node.store.journal
        if self.retention.age is not None:
            self._marks.append((now, journal.next_sequence))
        self._drop_followers()
        keep_from = self._needed_from()
        needed = (
            keep_from < journal.durable_sequence
        )  # by a subscriber; otherwise only the last segment prevents truncation
        over = journal.size_bytes > self.retention.size
        if not over:
            keep_from = min(keep_from, self._younger_from(now))
        dropped = await self._drop(keep_from)
        self._set_full(over and needed and not dropped and journal.size_bytes > self.retention.size)

    def _set_full(self, full: bool) -> None:
        if full and self.space is JournalSpace.ENOUGH:
            behind = ", ".join(sorted(self._behind())) or "none is behind"
            self.node.alarm(
                "journal-full",
                f"the journal is over {self.retention.size} bytes and durable subscribers still need it: {behind}",
            )
        self.space = JournalSpace.FULL if full else JournalSpace.ENOUGH
        self.node.rejecting = full and self.retention.when_full == "refuse"

    def _behind(self) -> Iterator[str]:
        for log in self.node.core.rendezvous.logs.values():
            for feed in log.subscribers:
                if feed.position < log.last_number:
                    yield f"{feed.key} at {feed.position} of {log.last_number} in {log.event_type}"

    def _drop_followers(self) -> None:
        """Drop followers for which more of the journal is retained than the limit for one follower."""
        node, most = self.node, self.retention.follower_bytes
        if node.store.journal.size_bytes <= most:
            return
        sequence = node.store.journal.within(most)
        for name, log in node.core.rendezvous.logs.items():
            index = node.store.indexes.get(name)
            if index is None or not log.subscribers:
                continue
            dropped, effects = node.core.drop_followers(
                name, index.first_from(sequence, log.undecided), time.monotonic()
            )
            node.act(effects)
            for feed in dropped:
                node.follower_dropped(feed, log.last_number, most)

    def _needed_from(self) -> int:
        """The first record of the journal that a durable subscriber has not acknowledged."""
        store = self.node.store
        needed = store.journal.durable_sequence
        for name, log in self.node.core.rendezvous.logs.items():
            index = store.indexes.get(name)
            sequence = index.sequence_of(min(log.retain_from(), log.decided_upto + 1)) if index is not None else None
            if sequence is not None:
                needed = min(needed, sequence)
        return needed

    def _younger_from(self, now: float) -> int:
        """The first record that is younger than the age; 0 (everything is retained) if no age is set."""
        if self.retention.age is None:
            return 0
        young = 0
        while self._marks and self._marks[0][0] < now - self.retention.age:
            young = self._marks.popleft()[1]
        if young:
            self._marks.appendleft((now - self.retention.age, young))
        return young

    async def _drop(self, keep_from: int) -> int:
        """Write a checkpoint, make it durable, then delete whole segments. In the other order a crash in between would
        lose state."""
        store = self.node.store
        kept_from = store.journal.kept_from(keep_from)
        if kept_from == store.journal.first_sequence:
            return 0  # a checkpoint would only make the journal longer
        for record in self._state():
            store.append(record)
        self._keep_from(
            kept_from
        )  # before the first await: no reader may start at an entry that is about to be deleted
        for log in self.node.core.rendezvous.logs.values():
            store.append(_cut(log))
        await store.journal.sync()
        dropped = await store.journal.drop_before(kept_from)
        self.dropped_segments += dropped
        return dropped

    def _state(self) -> Iterator[AnyRecord]:
        """The records of a checkpoint: everything except the logs' entries, and each log's last entry, so that no index
        is assigned twice."""
        core = self.node.core
        rendezvous = core.rendezvous
        yield Started(incarnation=core.incarnation, protocol=PROTOCOL)
        for name in rendezvous.families:
            history = rendezvous.logs[name].chain.history if name in rendezvous.logs else ""
            yield TypeDefined(event_type=rendezvous.types.definitions(name)[-1], history=history)
        for name, plans in rendezvous.known.plans.items():
            yield PlansDeclared(event_type=name, plans=plans)
        for name, members in rendezvous.known.members.items():
            yield MembersDeclared(event_type=name, members=members)
        yield from core.ordering.kept()
        for log in rendezvous.logs.values():
            yield from _last_entry(log)
            yield LogDecided(event_type=log.event_type, upto=log.decided_upto)
            if log.published:
                yield PublishersRetained(event_type=log.event_type, published=log.published)
            yield from _history(log)
            for feed in log.subscribers:
                yield SubscriptionAdvanced(
                    event_type=log.event_type, name=feed.key, position=feed.position, replica=feed.replica
                )
            for key, position in log.dropped.items():
                yield SubscriptionAdvanced(event_type=log.event_type, name=key, position=position, dropped=True)
        for family, epochs in rendezvous.epochs.items():
            if family in rendezvous.logs:
                yield InSyncChanged(event_type=family, in_sync=epochs.standing.in_sync)
            for epoch, decided in epochs.decided.items():
                yield EpochCommitted(
                    epoch=epoch,
                    digest=decided.digest,
                    transactions=decided.transactions,
                    committing=decided.committing,
                )
        in_flight = [epoch for epochs in rendezvous.epochs.values() for epoch in epochs.in_flight.values()]
        unfinished = [tx for epoch in in_flight for tx in epoch.committed]
        yield OutcomesTruncated(incarnations=rendezvous.outcomes.incarnations(unfinished))
        for tx in rendezvous.outcomes.rejected:
            yield TxRejected(tx=tx)
        coordinator = core.tree.coordinator
        if coordinator is not None:
            yield from coordinator.committed.values()
            for tx in coordinator.rejected:
                yield RoutingTxRefused(tx=tx)


def _last_entry(log: EventLog) -> Iterator[LogAppended]:
    number = log.decided_upto
    if number in log.tail:
        yield LogAppended(event_type=log.event_type, entry=log.tail[number])


def _history(log: EventLog) -> Iterator[AnyRecord]:
    """The beginning of the log's history, if it did not begin with the log, and what restricts the log."""
    name = log.event_type
    if log.began_in:
        # The history's first index is truncated: only the range of numbers that only replicas have is needed.
        point = LogPoint(log.chain.history, log.missing.stop - 1, log.chain.at(log.missing.stop - 1) or "")
        yield HistoryBegun(event_type=name, point=point, end=log.missing.start - 1, incarnation=log.began_in)
    if log.stale is not None:
        replica = log.stale.replica
        yield LogStale(event_type=name, replica=replica, point=LogPoint("", log.stale.replica_index, ""))
    if log.unconfirmed:
        yield replicas_unconfirmed(log)


def _cut(log: EventLog) -> LogCut:
    index = log.oldest - 1
    return LogCut(event_type=log.event_type, point=LogPoint(log.chain.history, index, log.chain.at(index) or ""))
