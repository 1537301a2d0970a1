"""Routing by rendezvous: which links an event takes.

The next hops towards a rendezvous form a tree, and subscriptions travel up that tree leaving a trail that events follow
down. Of all filters only those travel on that stand for the others, and of those only the changes.
"""

from collections.abc import Iterable, Mapping, Sequence

from tops.core.broker.covering import Cover
from tops.core.overlay.filter_index import FilterIndex
from tops.model.event_types import EventType, EventTypes
from tops.model.filters import Filter
from tops.model.ids import NodeId

EVERYTHING = Filter.everything()
LINEAGES_MAX = 10_000


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
