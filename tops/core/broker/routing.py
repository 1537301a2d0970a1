"""Routing: which broker is a type's rendezvous, which way a message goes, which links an event takes.

Paths come from the configured topology alone, never from which brokers are reachable, so that all brokers agree on
them: the next hops towards a rendezvous form a tree, and subscriptions travel up that tree and leave routes that events
follow down. Only filters that cover the others are forwarded, and of those only the changes.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from tops.core.broker.covering import Cover
from tops.core.broker.filter_index import FilterIndex
from tops.model.errors import ConfigError, InvalidEventType
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.model.ordering import OrderingDomain, Placement
from tops.protocol.messages import Definitions

EVERYTHING = Filter.everything()
LINEAGES_MAX = 10_000


@lru_cache(maxsize=4096)
def rendezvous_of(brokers: tuple[NodeId, ...], family: str) -> NodeId:
    """The rendezvous broker of a family of event types: the one with the highest hash. Adding or removing one broker
    moves only the families that it gains or had."""
    return max(brokers, key=lambda b: hashlib.sha256(f"{b}\0{family}".encode()).digest())


def placed_with(domains: Iterable[OrderingDomain]) -> dict[str, str]:
    """The families whose rendezvous follows from the name of their ordering domain instead of their own name."""
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
        """The rendezvous broker of a family of event types."""
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


class Ancestries:
    """The parents of event types, as subscribers define them, for as long as a subscription needs them.

    Nothing else in a subscriber's definition is used: it may be the first to name a type that belongs to another
    publisher."""

    def __init__(self) -> None:
        self._parents: dict[str, str | None] = {}
        self._children: Counter[str] = Counter()
        self._not_early: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def note(self, definitions: Definitions) -> None:
        """Store the ancestry of a type. Raises InvalidEventType, and stores nothing, if it contradicts a known one."""
        above: set[str] = set()
        for definition in definitions:
            name, parent = definition.name, definition.parent
            if self._parents.get(name, parent) != parent:
                raise InvalidEventType(f"event type {name!r} has another parent here than {parent!r}")
            if parent is not None and parent not in above and parent not in self._parents:
                raise InvalidEventType(f"event type {name!r}: parent {parent!r} is unknown; define it first")
            above.add(name)
        for definition in definitions:
            if definition.name not in self._parents:
                self._parents[definition.name] = definition.parent
                if definition.parent is not None:
                    self._children[definition.parent] += 1
        last = definitions[-1]
        if last.durable or last.parent is not None or last.discloses_sender:
            self._not_early.add(last.name)

    def may_pass_early(self, name: str) -> bool:
        """Whether no subscriber's definition of the type rules out that its events pass before the rendezvous."""
        return name not in self._not_early

    def lineage(self, name: str) -> list[str]:
        """The type's own name, its parent's, and so on up."""
        lineage = [name]
        while (parent := self._parents[lineage[-1]]) is not None:
            lineage.append(parent)
        return lineage

    def definitions(self, name: str) -> Definitions:
        """The definitions that another broker needs for routing the type."""
        return tuple(
            EventType(each, parent=self._parents[each], durable=each in self._not_early)
            for each in reversed(self.lineage(name))
        )

    def drop(self, name: str, is_wanted: Callable[[str], bool]) -> None:
        """Remove a type without subscriptions, and the ancestors that were stored because of it."""
        current: str | None = name
        while current is not None and current in self._parents and not self._children[current]:
            if is_wanted(current):
                return
            parent = self._parents.pop(current)
            self._not_early.discard(current)
            del self._children[current]
            if parent is not None:
                self._children[parent] -= 1
            current = parent


class RoutingTable:
    """The interest of one broker's links, per event type."""

    def __init__(self) -> None:
        self.types = Ancestries()
        self._interest: dict[str, dict[NodeId, dict[Filter, int]]] = {}  # type -> link -> filter -> times added
        self._index: dict[str, FilterIndex[NodeId]] = {}
        self._changed: dict[str, dict[Filter, None]] = {}  # type -> filters, since the last message to the next hop
        self._announced: dict[tuple[str, NodeId], Cover] = {}
        self._narrow: dict[str, int] = {}  # type -> how many of its filters do not match everything
        self._unfiltered: dict[tuple[str, ...], list[NodeId]] = {}  # lineage -> links; cleared by every change
        self._of_family: dict[str, list[NodeId]] = {}  # family -> links; cleared by every change

    def add(self, link: NodeId, definitions: Definitions, interest: Filter) -> None:
        self.types.note(definitions)
        name = definitions[-1].name
        filters = self._interest.setdefault(name, {}).setdefault(link, {})
        filters[interest] = filters.get(interest, 0) + 1
        if filters[interest] == 1:
            self._index.setdefault(name, FilterIndex()).add(link, interest)
            self._changes(name, interest, 1)

    def remove(self, link: NodeId, event_type: str, interest: Filter) -> None:
        links = self._interest.get(event_type, {})
        filters = links.get(link, {})
        if interest not in filters:
            return
        filters[interest] -= 1
        if not filters[interest]:
            del filters[interest]
            if not filters:
                del links[link]
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

    def drop_idle(self, event_type: str) -> None:
        """Remove all state of a type without subscriptions. Call it after the next hop has received the changes:
        these are computed from the state."""
        if self._interest.get(event_type):
            return
        for kept in (self._interest, self._index, self._changed, self._narrow):
            kept.pop(event_type, None)
        self.types.drop(event_type, self._interest.__contains__)

    def _changes(self, event_type: str, interest: Filter, change: int) -> None:
        self._unfiltered.clear()
        self._of_family.clear()
        self._changed.setdefault(event_type, {})[interest] = None
        if interest != EVERYTHING:
            self._narrow[event_type] = self._narrow.get(event_type, 0) + change

    def links_of_family(self, family: str) -> list[NodeId]:
        """The links with subscriptions to any type of a family."""
        known = self._of_family.get(family)
        if known is None:
            types = [name for name in self._interest if name in self.types and self.types.lineage(name)[-1] == family]
            found = {link: None for name in types for link, filters in self._interest[name].items() if filters}
            known = self._of_family[family] = list(found)
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
        if not self._interest.get(event_type):
            announced = self._announced.pop((event_type, parent), None)
            return [], [] if announced is None else announced.passed_on
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
