"""The sites of one broker as subscribers of a domain: their changes go to the topic managers through here.

The broker remembers the latest change of each, so that managers which have lost their memory get it again, and so that
the subscription of a site that is lost is ended for it.
"""

from collections.abc import Iterator

from tops.model.ids import NodeId
from tops.model.ordering import Layout
from tops.protocol.effects import Effect, SendTo
from tops.protocol.messages import (
    Address,
    ChangeSubscription,
    KnownSubscription,
    PartialCut,
    StageStarted,
    SubscriptionsAnnounced,
)

SUBSCRIPTIONS_PER_MESSAGE = 500


class OrderingEdge:
    """What one broker knows of its sites' subscriptions in one domain."""

    def __init__(self, layout: Layout, me: NodeId, incarnation: int) -> None:
        self._layout, self._me, self._incarnation = layout, me, incarnation
        self.latest: dict[Address, KnownSubscription] = {}

    def on_change(self, change: ChangeSubscription, subscriber: Address) -> list[Effect]:
        """A site's request, which its broker passes on in its name."""
        numbers = self._layout.number_of
        if subscriber.broker != self._me or not all(name in numbers for name in (*change.types, *change.former)):
            return []  # a site learns the domains from its broker, and sends its requests to that one
        topics = tuple(sorted({numbers[name] for name in change.types}))
        known = self.latest.get(subscriber)
        if not change.name:  # durable subscriptions need no groups
            if known is not None and known.version > change.version:
                return []
            self.latest[subscriber] = KnownSubscription(subscriber, self._incarnation, change.version, topics)
        members = {*topics, *(numbers[name] for name in change.former)}
        return self._pass(subscriber, change.version, topics, members, change.name) if members else []

    def site_lost(self, subscriber: Address) -> list[Effect]:
        """The subscription of the site ends, as if the site had requested it."""
        known = self.latest.pop(subscriber, None)
        if known is None or not known.topics:
            return []
        return self._pass(subscriber, known.version + 1, (), set(known.topics), "")

    def _pass(
        self, subscriber: Address, version: int, topics: tuple[int, ...], members: set[int], name: str
    ) -> list[Effect]:
        cut = PartialCut(
            domain=self._layout.domain.name,
            subscriber=subscriber,
            incarnation=self._incarnation,
            version=version,
            topics=topics,
            members=tuple(sorted(members)),
            entries={},
            name=name,
        )
        return [SendTo(Address(self._layout.stages[self._layout.lowest(members)]), cut)]

    def on_started(self, started: StageStarted, broker: NodeId) -> list[Effect]:
        """Topic managers have lost the subscriptions to their topics."""
        return [SendTo(Address(broker), announced) for announced in self._announced(started, broker)]

    def _announced(self, started: StageStarted, broker: NodeId) -> Iterator[SubscriptionsAnnounced]:
        stage = self._layout.stage_at(broker)
        stage_of = self._layout.stage_of
        known = [k for k in self.latest.values() if any(stage_of[topic] == stage for topic in k.topics)]
        for first in range(0, max(len(known), 1), SUBSCRIPTIONS_PER_MESSAGE):
            yield SubscriptionsAnnounced(
                domain=started.domain,
                incarnation=started.incarnation,
                subscriptions=tuple(known[first : first + SUBSCRIPTIONS_PER_MESSAGE]),
                last=first + SUBSCRIPTIONS_PER_MESSAGE >= len(known),
            )
