"""How much of the logs a broker keeps: what every durable subscriber has taken may go, by age or for want of room.

What a subscriber has not taken is kept for it; when that fills the journal, the broker warns or refuses new durable
events, as configured. A subscriber that holds too much of the journal is dropped, unless it is a replica. Before old
segments go, everything else that the broker must not forget is written again.
"""

import time
from collections import deque
from collections.abc import Iterator
from enum import Enum

from tops.core.coordinator.log_opening import replicas_unheard
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
    OutcomesForgotten,
    PlansDeclared,
    PublishersKept,
    RoutingTxRefused,
    Started,
    SubscriptionKept,
    TxRefused,
    TypeDefined,
)
from tops.runtime.broker_node import BrokerNode
from tops.runtime.config import Retention

LOOK_EVERY_S = 2.0


class Room(Enum):
    ENOUGH = "enough"
    FULL = "full"  # over the size, and durable subscribers still need what is there


class Retainer:
    """Drops what nobody needs any more, a few times a minute."""

    def __init__(self, node: BrokerNode, retention: Retention) -> None:
        self.node, self.retention = node, retention
        self.room = Room.ENOUGH
        self.dropped_segments = 0
        self._marks: deque[tuple[float, int]] = deque()  # what the journal's end was at what time
        self._looked_at = 0.0

    def recovered(self) -> None:
        """Tell the logs from where on they are kept."""
        self._keep_from(self.node.store.journal.first_sequence)

    def _keep_from(self, sequence: int) -> None:
        """What lies before this record of the journal is gone, or is about to go."""
        for name, log in self.node.core.rendezvous.logs.items():
            index = self.node.store.indexes.get(name)
            first = log.last_number + 1
            if index is not None and len(index):
                first = index.first_from(sequence, log.undecided)
                if sequence > self.node.store.journal.first_sequence:
                    index.forget_before(first)
            log.keep_from(min(first, log.decided_upto + 1))

    async def step(self) -> None:
        now = time.time()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        journal = self.node.store.journal
        if self.retention.age is not None:
            self._marks.append((now, journal.next_sequence))
        self._drop_followers()
        keep_from = self._needed_from()
        needed = keep_from < journal.durable_sequence  # by somebody; else only the last segment is in the way
        over = journal.size_bytes > self.retention.size
        if not over:
            keep_from = min(keep_from, self._younger_from(now))
        dropped = await self._drop(keep_from)
        self._judge(over and needed and not dropped and journal.size_bytes > self.retention.size)

    def _judge(self, full: bool) -> None:
        if full and self.room is Room.ENOUGH:
            behind = ", ".join(sorted(self._behind())) or "nobody in particular"
            self.node.alarm(
                "journal-full",
                f"the journal is over {self.retention.size} bytes and durable subscribers still need it: {behind}",
            )
        self.room = Room.FULL if full else Room.ENOUGH
        self.node.refusing = full and self.retention.when_full == "refuse"

    def _behind(self) -> Iterator[str]:
        for log in self.node.core.rendezvous.logs.values():
            for feed in log.subscribers:
                if feed.position < log.last_number:
                    yield f"{feed.key} at {feed.position} of {log.last_number} in {log.event_type}"

    def _drop_followers(self) -> None:
        """Those for whom more of the journal is kept than one follower may hold."""
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
        """The first record of the journal that some durable subscriber has not taken."""
        store = self.node.store
        needed = store.journal.durable_sequence
        for name, log in self.node.core.rendezvous.logs.items():
            index = store.indexes.get(name)
            place = index.place(min(log.retain_from(), log.decided_upto + 1)) if index is not None else None
            if place is not None:
                needed = min(needed, place)
        return needed

    def _younger_from(self, now: float) -> int:
        """The first record that is younger than the age; 0, everything is kept, when no age is set."""
        if self.retention.age is None:
            return 0
        young = 0
        while self._marks and self._marks[0][0] < now - self.retention.age:
            young = self._marks.popleft()[1]
        if young:
            self._marks.appendleft((now - self.retention.age, young))
        return young

    async def _drop(self, keep_from: int) -> int:
        """Write again what must outlive the drop, make it durable, then drop whole segments."""
        store = self.node.store
        kept_from = store.journal.kept_from(keep_from)
        if kept_from == store.journal.first_sequence:
            return 0  # a checkpoint would only make the journal longer
        for record in self._state():
            store.append(record)
        self._keep_from(kept_from)  # before anything is waited for: nobody must begin at what goes in a moment
        for log in self.node.core.rendezvous.logs.values():
            store.append(_cut(log))
        await store.journal.sync()
        dropped = await store.journal.drop_before(kept_from)
        self.dropped_segments += dropped
        return dropped

    def _state(self) -> Iterator[AnyRecord]:
        """Everything but the logs' entries, and each log's last one: numbers must never be given twice."""
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
        for log in rendezvous.logs.values():
            yield from _last_entry(log)
            yield LogDecided(event_type=log.event_type, upto=log.decided_upto)
            if log.published:
                yield PublishersKept(event_type=log.event_type, published=log.published)
            yield from _history(log)
            for feed in log.subscribers:
                yield SubscriptionKept(
                    event_type=log.event_type, name=feed.key, position=feed.position, replica=feed.replica
                )
            for key, position in log.dropped.items():
                yield SubscriptionKept(event_type=log.event_type, name=key, position=position, dropped=True)
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
        yield OutcomesForgotten(lives=rendezvous.outcomes.lives(unfinished))
        for tx in rendezvous.outcomes.refused:
            yield TxRefused(tx=tx)
        coordinator = core.tree.coordinator
        if coordinator is not None:
            yield from coordinator.committed.values()
            for tx in coordinator.refused:
                yield RoutingTxRefused(tx=tx)


def _last_entry(log: EventLog) -> Iterator[LogAppended]:
    number = log.decided_upto
    if number in log.tail:
        yield LogAppended(event_type=log.event_type, entry=log.tail[number])


def _history(log: EventLog) -> Iterator[AnyRecord]:
    """How the log's history began, if not with the log, and what stands in its way."""
    name = log.event_type
    if log.began_in:
        # Where it began is behind the cut: of what replicas alone know the range is enough.
        point = LogPoint(log.chain.history, log.missing.stop - 1, log.chain.at(log.missing.stop - 1) or "")
        yield HistoryBegun(event_type=name, point=point, end=log.missing.start - 1, incarnation=log.began_in)
    if log.stale is not None:
        replica = log.stale.replica
        yield LogStale(event_type=name, replica=replica, point=LogPoint("", log.stale.replica_index, ""))
    if log.unheard:
        yield replicas_unheard(log)


def _cut(log: EventLog) -> LogCut:
    index = log.oldest - 1
    return LogCut(event_type=log.event_type, point=LogPoint(log.chain.history, index, log.chain.at(index) or ""))
