"""Routing: which broker is a type's rendezvous, which way a letter goes, which links an event takes.

Paths come from the configured topology alone, never from who is alive, so that all brokers agree on them: the next
hops towards a rendezvous form a tree, and subscriptions travel up that tree leaving a trail that events follow down.
Of all filters only those travel on that stand for the others, and of those only the changes.
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
from tops.model.ordering import OrderingDomain, Placement

EVERYTHING = Filter.everything()
LINEAGES_MAX = 10_000


@lru_cache(maxsize=4096)
def rendezvous_of(brokers: tuple[NodeId, ...], family: str) -> NodeId:
    """The broker where a family of event types meets: highest hash wins, so that one broker more or less moves only
    the families that it wins or held."""
    return max(brokers, key=lambda b: hashlib.sha256(f"{b}\0{family}".encode()).digest())


def placed_with(domains: Iterable[OrderingDomain]) -> dict[str, str]:
    """Families that do not meet where their own names say, but where the name of their ordering domain does."""
    together = [domain for domain in domains if domain.placement is Placement.TOGETHER]
    return {name: domain.name for domain in together for name in domain.types}


class Topology:
    """The brokers of the configuration and the links between them."""

    def __init__(self, links: Mapping[NodeId, Iterable[NodeId]], domains: Sequence[OrderingDomain] = ()) -> None:
        self.domains = tuple(domains)
        self._placed = placed_with(domains)
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
        """The broker where a family of event types meets."""
        return rendezvous_of(self.brokers, self._placed.get(family, family))

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
    """What one broker knows of its links' interests, per event type."""

    def __init__(self) -> None:
        self.types = EventTypes()
        self._interest: dict[str, dict[NodeId, dict[Filter, int]]] = {}  # type -> link -> filter -> times asked for
        self._index: dict[str, FilterIndex[NodeId]] = {}
        self._changed: dict[str, dict[Filter, None]] = {}  # type -> filters, since the next hop was last told
        self._announced: dict[tuple[str, NodeId], Cover] = {}
        self._narrow: dict[str, int] = {}  # type -> how many of its filters ask for anything in particular
        self._unfiltered: dict[tuple[str, ...], list[NodeId]] = {}  # lineage -> links, while nothing changes
        self._disclosing: dict[tuple[str, ...], bool] = {}  # lineage -> whether subscribers learn the publisher
        self._of_family: dict[str, list[NodeId]] = {}  # family -> links, while nothing changes

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

    def forget_link(self, link: NodeId) -> set[str]:
        """The link's interest is gone; returns the event types that were touched."""
        touched = set()
        for event_type, links in self._interest.items():
            for interest in links.pop(link, {}):
                self._index[event_type].remove(link, interest)
                self._changes(event_type, interest, -1)
                touched.add(event_type)
        return touched

    def _changes(self, event_type: str, interest: Filter, change: int) -> None:
        self._unfiltered.clear()
        self._of_family.clear()
        self._changed.setdefault(event_type, {})[interest] = None
        if interest != EVERYTHING:
            self._narrow[event_type] = self._narrow.get(event_type, 0) + change

    def discloses_sender(self, lineage: tuple[str, ...]) -> bool:
        """Whether subscribers of the type, or of one of its ancestors, learn who published an event."""
        known = self._disclosing.get(lineage)
        if known is None:
            known = any(name in self.types and self.types.whole(name).discloses_sender for name in lineage)
            if len(self._disclosing) >= LINEAGES_MAX:
                self._disclosing.clear()
            self._disclosing[lineage] = known
        return known

    def links_of_family(self, family: str) -> list[NodeId]:
        """The links behind which somebody wants some events of some type of a family."""
        known = self._of_family.get(family)
        if known is None:
            types = [name for name in self._interest if name in self.types and self.types.family(name) == family]
            found = {link: None for name in types for link, filters in self._interest[name].items() if filters}
            known = self._of_family[family] = list(found)
        return known

    def interested_in_all(self, lineage: Iterable[str]) -> list[NodeId] | None:
        """The links that want every event of the type; None if some want a part, so that each must be looked at."""
        found: dict[NodeId, None] = {}
        for name in lineage:
            if self._narrow.get(name):
                return None
            found.update((link, None) for link, filters in self._interest.get(name, {}).items() if filters)
        return list(found)

    def interested(self, lineage: tuple[str, ...], attributes: Mapping[str, object]) -> Sequence[NodeId]:
        """The links behind which somebody wants this, by the type or one of its ancestors."""
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
        """What to tell the next hop towards the rendezvous since we last told it: filters to add, filters to remove.

        None for a type that meets here: there is nobody to tell. The parent's own interest is not sent back to it.
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
        """Everything this neighbour has been told, for when it meets us anew."""
        return [(t, f) for (t, p), cover in self._announced.items() if p == parent for f in cover.passed_on]
