"""Routing: which broker is a type's rendezvous, which way a message goes, which links an event takes.

Paths come from the configured topology alone, never from which brokers are reachable, so that all brokers agree on
them: the next hops towards a rendezvous form a tree, and subscriptions travel up that tree and leave routes that events
follow down. Only filters that cover the others are forwarded, and of those only the changes.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from tops.core.broker.covering import Cover
from tops.core.broker.filter_index import FilterIndex
from tops.model.errors import ConfigError
from tops.model.event_types import EventType, EventTypes
from tops.model.filters import Filter
from tops.model.ids import NodeId

EVERYTHING = Filter.everything()
LINEAGES_MAX = 10_000


@lru_cache(maxsize=4096)
def rendezvous_of(brokers: tuple[NodeId, ...], family: str) -> NodeId:
    """The rendezvous broker of a family of event types: the one with the highest hash. Adding or removing one broker
    moves only the families that it gains or had."""
    return max(brokers, key=lambda b: hashlib.sha256(f"{b}\0{family}".encode()).digest())


class Topology:
    """The brokers of the configuration and the links between them."""

    def __init__(self, links: Mapping[NodeId, Iterable[NodeId]]) -> None:
        neighbours: dict[NodeId, set[NodeId]] = {b: set() for b in links}
        for broker, others in links.items():
            for other in others:
                if other not in neighbours:
                    raise ConfigError(f"broker {broker!r} has a link to {other!r}, which is not configured")
                neighbours[broker].add(other)
                neighbours[other].add(broker)
        self.neighbours = {b: tuple(sorted(n)) for b, n in sorted(neighbours.items())}
        self.brokers = tuple(self.neighbours)
        self._next_hops: dict[NodeId, dict[NodeId, NodeId]] = {b: self._towards(b) for b in self.brokers}

    def rendezvous(self, family: str) -> NodeId:
        """The rendezvous broker of a family of event types."""
        return rendezvous_of(self.brokers, family)

    def next_hop(self, broker: NodeId, target: NodeId) -> NodeId | None:
        """The neighbour of `broker` on the way to `target`; None if there is no way."""
        return self._next_hops.get(target, {}).get(broker)

    def _towards(self, target: NodeId) -> dict[NodeId, NodeId]:
        hops: dict[NodeId, NodeId] = {}
        reached, frontier = {target}, deque([target])
        while frontier:
            near = frontier.popleft()
            for far in self.neighbours[near]:
                if far not in reached:
                    reached.add(far)
                    hops[far] = near
                    frontier.append(far)
        return hops


class RoutingTable:
    """The interest of one broker's links, per event type."""

    def __init__(self) -> None:
        self.types = EventTypes()
        self._interest: dict[str, dict[NodeId, dict[Filter, int]]] = {}  # type -> link -> filter -> times added
        self._index: dict[str, FilterIndex[NodeId]] = {}
        self._changed: dict[str, dict[Filter, None]] = {}  # type -> filters, since the last message to the next hop
        self._announced: dict[tuple[str, NodeId], Cover] = {}
        self._narrow: dict[str, int] = {}  # type -> how many of its filters do not match everything
        self._unfiltered: dict[tuple[str, ...], list[NodeId]] = {}  # lineage -> links; cleared by every change
        self._disclosing: dict[tuple[str, ...], bool] = {}  # lineage -> whether subscribers learn the publisher

    def add(self, link: NodeId, definitions: tuple[EventType, ...], interest: Filter) -> None:
        if any(definition.name not in self.types for definition in definitions):
            self._disclosing.clear()
        name = self.types.define_all(definitions).name
        filters = self._interest.setdefault(name, {}).setdefault(link, {})
        filters[interest] = filters.get(interest, 0) + 1
        if filters[interest] == 1:
            self._index.setdefault(name, FilterIndex()).add(link, interest)
            self._changes(name, interest, 1)

    def remove(self, link: NodeId, event_type: str, interest: Filter) -> None:
        filters = self._interest.get(event_type, {}).get(link, {})
        if interest not in filters:
            return
        filters[interest] -= 1
        if not filters[interest]:
            del filters[interest]
            self._index[event_type].remove(link, interest)
            self._changes(event_type, interest, -1)

    def remove_link(self, link: NodeId) -> set[str]:
        """Remove the link's interest; returns the event types whose interest changed."""
        touched = set()
        for event_type, links in self._interest.items():
            for interest in links.pop(link, {}):
                self._index[event_type].remove(link, interest)
                self._changes(event_type, interest, -1)
                touched.add(event_type)
        return touched

    def _changes(self, event_type: str, interest: Filter, change: int) -> None:
        self._unfiltered.clear()
        self._changed.setdefault(event_type, {})[interest] = None
        if interest != EVERYTHING:
            self._narrow[event_type] = self._narrow.get(event_type, 0) + change

    def discloses_sender(self, lineage: tuple[str, ...]) -> bool:
        """Whether events of the type, or of one of its ancestors, name their publisher to subscribers."""
        known = self._disclosing.get(lineage)
        if known is None:
            known = any(name in self.types and self.types.whole(name).discloses_sender for name in lineage)
            if len(self._disclosing) >= LINEAGES_MAX:
                self._disclosing.clear()
            self._disclosing[lineage] = known
        return known

    def interested_in_all(self, lineage: Iterable[str]) -> list[NodeId] | None:
        """The links that want every event of the type; None if a link wants a part, so that each event must be
        matched."""
        found: dict[NodeId, None] = {}
        for name in lineage:
            if self._narrow.get(name):
                return None
            found.update((link, None) for link, filters in self._interest.get(name, {}).items() if filters)
        return list(found)

    def interested(self, lineage: tuple[str, ...], attributes: Mapping[str, object]) -> Sequence[NodeId]:
        """The links behind which a subscriber wants this, by the type or one of its ancestors."""
        known = self._unfiltered.get(lineage)
        if known is not None:
            return known
        found: dict[NodeId, None] = {}
        for name in lineage:
            index = self._index.get(name)
            if index is not None:
                found.update(dict.fromkeys(index.match(attributes)))
        links = list(found)
        if not any(map(self._narrow.get, lineage)):  # the attributes make no difference
            if len(self._unfiltered) >= LINEAGES_MAX:
                self._unfiltered.clear()
            self._unfiltered[lineage] = links
        return links

    def changes_for(self, parent: NodeId | None, event_type: str) -> tuple[list[Filter], list[Filter]]:
        """The changes for the next hop towards the rendezvous since the last call: filters to add, filters to remove.

        Nothing for a type whose rendezvous is here. The parent's own interest is not sent back to it.
        """
        changed = self._changed.pop(event_type, {})
        if parent is None:
            return [], []
        cover = self._announced.setdefault((event_type, parent), Cover())
        index = self._index.get(event_type)
        for interest in changed:
            if index is not None and any(link != parent for link in index.owners(interest)):
                cover.add(interest)
            else:
                cover.remove(interest)
        return cover.changes()

    def announced_to(self, parent: NodeId) -> list[tuple[str, Filter]]:
        """Everything that was sent to this neighbour, to be sent again on a new link."""
        return [(t, f) for (t, p), cover in self._announced.items() if p == parent for f in cover.passed_on]
