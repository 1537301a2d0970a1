"""The topic managers of one domain at one broker: one stage of the sequencer.

    publisher ──event──► stage 2 ──partial timestamp──► stage 1 ──► stage 0
                          │  numbers the event           entries of   completes
                          ◄──────── complete timestamp ───────────────┘
                          └──event and timestamp──► subscribers, by index

Every event and every change of a subscription is a *line* through the stages, from the lowest that it concerns up to
the highest. A stage handles one line at a time and passes them on in that order, also lines that do not concern it;
what is passed between stages neither overtakes nor gets lost (`chain`). So lines never cross, and "before at the stages
that both pass" is one order. An entry of a timestamp is how many events of that topic are before this one in it.

Within a stage all managers see the same order, so they share one memory: `numbered` for their own topics, `lower` for
the topics of lower stages, which is the maximum over the entries that have passed.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import msgspec

from tops.core.ordering.chain import Incoming, Outgoing, first_of
from tops.core.ordering.groups import Groups
from tops.model.ids import NodeId
from tops.model.ordering import Layout
from tops.protocol.effects import Alarm, Effect, Note, Persist, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    ChainItem,
    ChainPassed,
    ChainTaken,
    CutMade,
    KnownSubscription,
    PartialCut,
    PartialTimestamp,
    StageOpening,
    TimestampCompleted,
    Waiting,
)
from tops.protocol.records import (
    AnyRecord,
    EventNumbered,
    ManagersKept,
    PassedTaken,
    TimestampKept,
    TimestampPassed,
)

Release = Callable[[int, int, Waiting | None, dict[int, int]], list[Effect]]
RETRY_S = 0.5


class Pending(msgspec.Struct):
    """An index that is not released. `waiting` None: its event was numbered again, and nothing is to be sent."""

    waiting: Waiting | None
    line: PartialTimestamp | None = None  # what was passed on; None: the line ended at this stage
    entries: dict[int, int] | None = None  # the complete timestamp


class TopicManagers:
    """All topic managers of one domain at one broker."""

    def __init__(self, layout: Layout, me: NodeId, incarnation: int, release: Release) -> None:
        """`release` is called with topic, index, event and timestamp, strictly by index."""
        stage = layout.stage_at(me)
        assert stage is not None
        self.layout, self.me, self.incarnation, self.stage = layout, me, incarnation, stage
        self.durable = layout.domain.durable
        self.groups = Groups(layout, stage)
        first = 0 if self.durable else first_of(incarnation)
        self.numbered = {t: first for t in layout.topics if layout.stage_of[t] == stage}
        self.lower: dict[int, int] = {}
        self.pending: dict[int, OrderedDict[int, Pending]] = {topic: OrderedDict() for topic in self.numbered}
        self.incoming = Incoming()
        self.outgoing: dict[NodeId, Outgoing] = {}
        self.hops = 0  # partial timestamps that were passed on
        self._release = release
        self._to_open: deque[tuple[int, Waiting]] = deque()
        # Without a journal a stage does not know what passed it before its start; the stage below sends it the counts.
        self.is_open = self.durable or stage == len(layout.stages) - 1
        self._owes_opening = False
        self._flushing = self._retrying = False

    @property
    def timer(self) -> tuple[str, str]:
        return ("ordering", self.layout.domain.name)

    # ------------------------------------------------------------------------------------------------------ events

    def publish(self, topic: int, waiting: Waiting) -> list[Effect]:
        """An event that is new: give it its index, and its timestamp as far as this stage can."""
        if not self.is_open:
            self._to_open.append((topic, waiting))
            return []
        return self._number(topic, waiting)

    def _number(self, topic: int, waiting: Waiting) -> list[Effect]:
        group = self.groups.for_next_event(topic)
        numbered, lower = self.numbered, self.lower
        index = numbered[topic] = numbered[topic] + 1
        entries = {t: numbered[t] for t in group.here}
        for t in group.lower:
            entries[t] = lower.get(t, 0)
        pending = self.pending[topic]
        if not group.higher:
            if not pending:
                return self._release(topic, index, waiting, entries)
            pending[index] = Pending(waiting, None, entries)
            return []
        item = PartialTimestamp(topic=topic, index=index, group=group.higher, entries=entries)
        pending[index] = Pending(waiting, item)
        place = self._to(self.layout.stages[self.stage - 1]).put(item)
        if not self.durable:
            return self._flush_soon()
        record = EventNumbered(domain=self.layout.domain.name, waiting=waiting, timestamp=item, place=place)
        return [Persist(record), *self._flush_soon()]

    def waits(self, topic: int, is_wanted: Callable[[Waiting], bool]) -> bool:
        """Whether such an event of this topic is not released."""
        return any(p.waiting is not None and is_wanted(p.waiting) for p in self.pending[topic].values()) or any(
            t == topic and is_wanted(waiting) for t, waiting in self._to_open
        )

    def _release_all(self, topic: int) -> list[Effect]:
        """Release what is complete, strictly by index."""
        pending = self.pending[topic]
        effects: list[Effect] = []
        while pending:
            index, first = next(iter(pending.items()))
            if first.entries is None:
                break
            del pending[index]
            effects += self._release(topic, index, first.waiting, first.entries)
        return effects

    # -------------------------------------------------------------------------------------------------- from stages

    def on_passed(self, passed: ChainPassed, sender: NodeId) -> list[Effect]:
        """Items from another stage: lines on their way up, and complete timestamps on their way back."""
        if passed.types > len(self.layout.topics):
            text = f"{sender} knows more types of ordering domain {passed.domain!r}: start {self.me} with its new list"
            return [Alarm("ordering-types", text)]
        effects: list[Effect] = []
        for place, item in self.incoming.fresh(sender, passed):
            effects += self._take(item, sender, place)
        upto = self.incoming.taken[sender]
        return [*effects, SendTo(Address(sender), ChainTaken(domain=passed.domain, upto=upto))]

    def on_taken(self, taken: ChainTaken, sender: NodeId) -> list[Effect]:
        self._to(sender).on_taken(taken.upto)
        if not self.durable:
            return []
        return [Note(PassedTaken(domain=taken.domain, to=sender, upto=taken.upto))]

    def _take(self, item: ChainItem, sender: NodeId, place: int) -> list[Effect]:
        if isinstance(item, PartialTimestamp):
            return self._take_timestamp(item, sender, place)
        if isinstance(item, PartialCut):
            return self.on_cut(item)
        if isinstance(item, TimestampCompleted):
            return self._take_completed(item, sender, place)
        return self._open(item)

    def _take_timestamp(self, item: PartialTimestamp, sender: NodeId, place: int) -> list[Effect]:
        self._raise_lower(item.entries)
        numbered = self.numbered
        mine = [t for t in item.group if t in numbered]
        entries = {**item.entries, **{t: numbered[t] for t in mine}}
        onward: PartialTimestamp | TimestampCompleted
        if len(mine) < len(item.group):
            left = tuple(t for t in item.group if t not in numbered)
            to = self.layout.stages[self.stage - 1]
            onward = PartialTimestamp(topic=item.topic, index=item.index, group=left, entries=entries)
            self.hops += 1
        else:
            to = self.layout.broker_of[item.topic]
            onward = TimestampCompleted(topic=item.topic, index=item.index, entries=entries)
        onward_place = self._to(to).put(onward)
        if not self.durable:
            return self._flush_soon()
        record = TimestampPassed(
            domain=self.layout.domain.name, sender=sender, taken=place, to=to, item=onward, place=onward_place
        )
        return [Persist(record), *self._flush_soon()]

    def _raise_lower(self, entries: dict[int, int]) -> None:
        lower, numbered = self.lower, self.numbered
        for topic, index in entries.items():
            if index > lower.get(topic, 0) and topic not in numbered:
                lower[topic] = index

    def _take_completed(self, item: TimestampCompleted, sender: NodeId, place: int) -> list[Effect]:
        pending = self.pending[item.topic].get(item.index)
        if pending is None or pending.entries is not None:
            return []  # its event was numbered again
        pending.entries = item.entries
        released = self._release_all(item.topic)
        if not self.durable:
            return released
        kept = TimestampKept(domain=self.layout.domain.name, sender=sender, taken=place, timestamp=item)
        return [Persist(kept), *released]

    # ------------------------------------------------------------------------------------------------ subscriptions

    def on_cut(self, cut: PartialCut) -> list[Effect]:
        """A change of a subscription passes: store it, and write what is numbered here."""
        subscription = KnownSubscription(cut.subscriber, cut.incarnation, cut.version, cut.topics)
        if not self.groups.store(subscription):
            return []
        self._raise_lower(cut.entries)
        entries = dict(cut.entries)
        for topic in cut.members:
            if topic in self.numbered:
                entries[topic] = self.numbered[topic]
        if self.layout.highest(cut.members) < self.stage:
            self._to(self.layout.stages[self.stage - 1]).put(msgspec.structs.replace(cut, entries=entries))
            return self._flush_soon()
        made = CutMade(domain=self.layout.domain.name, version=cut.version, entries=entries, name=cut.name)
        return [SendTo(cut.subscriber, made)]

    # ------------------------------------------------------------------------------------------- restarts of others

    def on_started(self, broker: NodeId, incarnation: int) -> list[Effect]:
        """Another broker has started, and has lost what it did not journal."""
        self.groups.forget_sites_of(broker, incarnation)
        if broker in self.outgoing:
            self.outgoing[broker].send_again()
        other = self.layout.stage_at(broker)
        if other is None:
            return []
        effects: list[Effect] = []
        if not self.durable and other < self.stage:
            for topic in self.pending:
                effects += self._number_again(topic, other)
            if other == self.stage - 1:
                effects += self._send_opening(broker)
        return effects + self._flush_soon()

    def _send_opening(self, to: NodeId) -> list[Effect]:
        self._owes_opening = not self.is_open
        if self.is_open:
            self._to(to).put(StageOpening(clocks={**self.lower, **self.numbered}))
        return []

    def _open(self, opening: StageOpening) -> list[Effect]:
        self._raise_lower(opening.clocks)
        if self.is_open:
            return []
        self.is_open = True
        effects: list[Effect] = []
        if self._owes_opening:
            effects += self._send_opening(self.layout.stages[self.stage - 1])
        while self._to_open:
            effects += self._number(*self._to_open.popleft())
        return effects + self._flush_soon()

    def _number_again(self, topic: int, lost: int) -> list[Effect]:
        """Lines through a stage that lost them get a new index, and so do those behind them: the order of one
        publisher's events stays. The indexes that they had are skipped."""
        pending = self.pending[topic]
        affected = [
            index
            for index, p in pending.items()
            if p.waiting is not None and p.entries is None and p.line is not None
            if self.layout.highest(p.line.group) <= lost
        ]
        if not affected:
            return []
        again: list[Waiting] = []
        for index, p in pending.items():
            if index >= affected[0] and p.waiting is not None:
                again.append(p.waiting)
                p.waiting, p.entries = None, {}
        effects: list[Effect] = []
        for waiting in again:
            effects += self._number(topic, waiting)
        return effects + self._release_all(topic)

    # ------------------------------------------------------------------------------------------------ time, sending

    def _to(self, broker: NodeId) -> Outgoing:
        outgoing = self.outgoing.get(broker)
        if outgoing is None:
            outgoing = self.outgoing[broker] = Outgoing(broker, self.incarnation)
        return outgoing

    def _flush_soon(self) -> list[Effect]:
        """What is passed on in one iteration of the event loop shares messages."""
        if self._flushing or not any(outgoing.waiting for outgoing in self.outgoing.values()):
            return []
        self._flushing = True
        return [SetTimer((*self.timer, "flush"), 0.0)]

    def on_timer(self, kind: str) -> list[Effect]:
        effects: list[Effect] = []
        if kind == "retry":
            self._retrying = False
            for outgoing in self.outgoing.values():
                outgoing.send_again()
        else:
            self._flushing = False
        domain, types = self.layout.domain.name, len(self.layout.topics)
        for broker, outgoing in self.outgoing.items():
            effects += [SendTo(Address(broker), message) for message in outgoing.unsent(domain, types)]
        if not self._retrying and any(outgoing.waiting for outgoing in self.outgoing.values()):
            self._retrying = True
            effects.append(SetTimer((*self.timer, "retry"), RETRY_S))
        return effects

    # --------------------------------------------------------------------------------------------------- durability

    def recover(self, record: AnyRecord) -> None:
        """One record of a durable domain, in order."""
        match record:
            case EventNumbered(waiting=waiting, timestamp=item, place=place):
                self.numbered[item.topic] = max(self.numbered[item.topic], item.index)
                self.pending[item.topic][item.index] = Pending(waiting, item)
                self._to(self.layout.stages[self.stage - 1]).recover(place, item)
            case TimestampPassed(sender=sender, taken=taken, to=to, item=item, place=place):
                self.incoming.recover(sender, taken)
                self._raise_lower(item.entries)
                self._to(to).recover(place, item)
            case TimestampKept(sender=sender, taken=taken, timestamp=item):
                self.incoming.recover(sender, taken)
                if (pending := self.pending[item.topic].get(item.index)) is not None:
                    pending.entries = item.entries
            case PassedTaken(to=to, upto=upto):
                self._to(to).on_taken(upto)
            case ManagersKept(numbered=numbered, lower=lower, taken=taken):
                self.numbered.update(numbered)
                self._raise_lower(lower)
                for sender, place in taken.items():
                    self.incoming.recover(sender, place)

    def recover_released(self, topic: int, index: int) -> None:
        """The event of this index is in its log."""
        self.numbered[topic] = max(self.numbered[topic], index)
        self.pending[topic].pop(index, None)

    def recovered(self) -> list[Effect]:
        """The journal has been read: resume the lines that were under way."""
        effects = [effect for topic in self.pending for effect in self._release_all(topic)]
        return effects + self._flush_soon()

    def kept(self) -> Iterator[AnyRecord]:
        """The records that must be written again before old segments of the journal are deleted."""
        domain = self.layout.domain.name
        if not self.durable:
            return
        yield ManagersKept(
            domain=domain, numbered=dict(self.numbered), lower=dict(self.lower), taken=dict(self.incoming.taken)
        )
        places = {id(item): place for outgoing in self.outgoing.values() for place, item in outgoing.waiting}
        for pending in self.pending.values():
            for p in pending.values():
                if p.waiting is not None and p.line is not None:
                    place = places.pop(id(p.line), 0)
                    yield EventNumbered(domain=domain, waiting=p.waiting, timestamp=p.line, place=place)
                    if p.entries is not None:
                        done = TimestampCompleted(topic=p.line.topic, index=p.line.index, entries=p.entries)
                        yield TimestampKept(domain=domain, sender=self.me, taken=0, timestamp=done)
        for broker, outgoing in self.outgoing.items():
            for place, item in outgoing.waiting:
                if id(item) in places and isinstance(item, PartialTimestamp | TimestampCompleted):
                    yield TimestampPassed(domain=domain, sender=self.me, taken=0, to=broker, item=item, place=place)
