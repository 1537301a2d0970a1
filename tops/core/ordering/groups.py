"""Sequencing groups: with which other topics an event must be ordered, from the subscriptions that contain its topic.

Total order needs the topics that two subscriptions hold together with the event's; causal order those that one does. A
group that is too large is always safe, one that is too small is not. So the first event after a change still has the
topics of the group before it, and managers that have lost their memory order with the whole domain until every broker
has announced its subscriptions again.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from tops.model.ids import NodeId
from tops.model.ordering import Layout
from tops.protocol.messages import Address, KnownSubscription

ENDED_MAX = 100_000  # subscribers that have ended and whose last version is remembered


class Group(NamedTuple):
    """A sequencing group, as one stage sees it. The topics of one stage are ordered by their managers' memory, those of
    lower stages by what has passed, those of higher stages when the timestamp gets there."""

    here: tuple[int, ...]
    lower: tuple[int, ...]
    higher: tuple[int, ...]


class Groups:
    """The subscriptions to the topics of one stage, and the sequencing groups that follow from them."""

    def __init__(self, layout: Layout, stage: int) -> None:
        self._layout, self._stage = layout, stage
        self._least = 1 if layout.domain.causal else 2  # subscriptions that hold two topics together
        self._topics = frozenset(t for t in layout.topics if layout.stage_of[t] == stage)
        self.known: OrderedDict[Address, KnownSubscription] = OrderedDict()
        self._together: dict[int, Counter[int]] = {topic: Counter() for topic in self._topics}
        self._members: dict[int, set[int]] = {topic: {topic} for topic in self._topics}
        self._left: dict[int, set[int]] = {}  # topics that left a group since the last event
        self._groups: dict[int, Group] = {}
        self._whole = self._split(layout.topics)
        self.whole = True  # whether every group is the whole domain
        self._started: dict[NodeId, int] = {}  # the latest known incarnation of each broker

    def store(self, subscription: KnownSubscription) -> bool:
        """Take a subscription's change; False for one that is older than what is known."""
        subscriber = subscription.subscriber
        if subscription.incarnation < self._started.get(subscriber.broker, 0):
            return False
        known = self.known.get(subscriber)
        if known is not None and known.version >= subscription.version:
            return known.version == subscription.version
        former = frozenset(known.topics) if known is not None else frozenset()
        self.known[subscriber] = subscription
        self.known.move_to_end(subscriber)
        if not subscription.topics and len(self.known) > ENDED_MAX:
            self._forget_ended()
        self._count(former, frozenset(subscription.topics))
        return True

    def forget_sites_of(self, broker: NodeId, incarnation: int) -> None:
        """A broker has started: the subscribers of its earlier incarnations have ended."""
        self._started[broker] = max(self._started.get(broker, 0), incarnation)
        ended = [s for s, known in self.known.items() if s.broker == broker and known.incarnation < incarnation]
        for subscriber in ended:
            self._count(frozenset(self.known.pop(subscriber).topics), frozenset())

    def announced(self) -> None:
        """All brokers have announced their subscriptions: groups are exact from the next event but one."""
        if self.whole and not self._layout.domain.durable:
            self.whole = False
            self._left = {topic: set(self._layout.topics) for topic in self._topics}

    def _forget_ended(self) -> None:
        ended = next((s for s, known in self.known.items() if not known.topics), None)
        if ended is not None:
            del self.known[ended]

    def _count(self, former: frozenset[int], topics: frozenset[int]) -> None:
        for topic in self._topics.intersection(former | topics):
            before = former if topic in former else frozenset[int]()
            after = topics if topic in topics else frozenset[int]()
            for other in before - after:
                self._add(topic, other, -1)
            for other in after - before:
                self._add(topic, other, 1)

    def _add(self, topic: int, other: int, change: int) -> None:
        together, members = self._together[topic], self._members[topic]
        together[other] += change
        if other == topic:
            return
        enough = together[other] >= self._least
        if enough and other not in members:
            members.add(other)
        elif not enough and other in members:
            members.discard(other)
            self._left.setdefault(topic, set()).add(other)
        else:
            return
        self._groups.pop(topic, None)

    def of(self, topic: int) -> Group:
        """The sequencing group of a topic."""
        if self.whole:
            return self._whole
        known = self._groups.get(topic)
        if known is None:
            known = self._groups[topic] = self._split(sorted(self._members[topic]))
        return known

    def for_next_event(self, topic: int) -> Group:
        """The sequencing group that the next event of a topic is numbered with."""
        left = self._left.pop(topic, None)
        if left is None or self.whole:
            return self.of(topic)
        return self._split(sorted(left | self._members[topic]))

    def _split(self, topics: Iterable[int]) -> Group:
        here: list[int] = []
        lower: list[int] = []
        higher: list[int] = []
        for topic in topics:
            stage = self._layout.stage_of[topic]
            (here if stage == self._stage else lower if stage > self._stage else higher).append(topic)
        return Group(tuple(here), tuple(lower), tuple(higher))
