"""Regular routing along the tree: which neighbour has which route from here, and where publications go.

Advertisements go to every neighbour but the one that they came from. Subscriptions go to the neighbours that an
overlapping advertisement came from; one that overlaps with none waits here until an advertisement attracts it. What a
neighbour has from here is compared with what it should have whenever either changes, and only differences are sent.
There is no covering: a transaction may remove the subscription that covers another one.
"""

from collections.abc import Callable, Iterable

from tops.core.routing_tx.tables import Entry, Tables, View
from tops.model.ids import NodeId
from tops.model.routing import RouteKey, RouteKind, number_of
from tops.protocol.effects import Effect, SendOnLink
from tops.protocol.messages import Route, RouteChanged, TreeDelivered, TreePublished

ADVERTISEMENT, SUBSCRIPTION = RouteKind.ADVERTISEMENT, RouteKind.SUBSCRIPTION


class TreeRoutes:
    """The tables of one broker and what its neighbours in the tree have of them."""

    def __init__(self, neighbours: Iterable[NodeId]) -> None:
        self.neighbours = tuple(sorted(neighbours))
        self.tables = Tables()
        # Called when a regular change goes to a neighbour: it supersedes what transactions have sent there.
        self.on_sent: Callable[[RouteKey, NodeId], None] = lambda key, link: None
        self.number = 0  # the last commit of an isolated transaction that is applied here

    @property
    def view(self) -> View:
        """What regular operations see."""
        return View(self.number)

    # ----------------------------------------------------------------------------------------------- regular changes

    def change(self, link: NodeId, changed: RouteChanged) -> list[Effect]:
        """A site or a neighbour has a route now, or no longer."""
        return self._add(changed.route, link) if changed.added else self._remove(changed.route, link)

    def _add(self, route: Route, link: NodeId) -> list[Effect]:
        if self.tables.is_outdated(route):
            return []
        entry = self.tables.put(route, link, base=True)
        # What transactions have sent before counts no more, here as at the sender: see `on_sent`.
        entry.marks.clear()
        return self.refresh_around(entry)

    def _remove(self, route: Route, link: NodeId) -> list[Effect]:
        known = self.tables.entries.get(route.key)
        if known is None or known.hop != link or known.route.generation > route.generation:
            return []
        return self.drop(known)

    def drop(self, entry: Entry) -> list[Effect]:
        """Take an entry out and away from the neighbours that have it from here."""
        self.tables.drop(entry.route.key)
        effects: list[Effect] = []
        for link in sorted(entry.sent):
            self.on_sent(entry.route.key, link)
            effects.append(SendOnLink(link, RouteChanged(route=entry.route, added=False)))
        return effects + (self._refresh_attracted(entry) if entry.route.kind is ADVERTISEMENT else [])

    def remove_link(self, link: NodeId) -> list[Effect]:
        """Everything that came over a link is gone, and what was sent over it as well."""
        for entry in self.tables.entries.values():
            entry.sent.discard(link)
        effects: list[Effect] = []
        for entry in self.tables.from_hop(link):
            effects += self.drop(entry)
        return effects

    def meet(self, neighbour: NodeId) -> list[Effect]:
        """A neighbour that has nothing from here: it is sent what it should have."""
        self.forget_sent(neighbour)
        effects: list[Effect] = []
        for key in sorted(self.tables.entries):
            effects += self.refresh(self.tables.entries[key])
        return effects

    def forget_sent(self, neighbour: NodeId) -> None:
        """The neighbour has lost what it had from here."""
        for entry in self.tables.entries.values():
            entry.sent.discard(neighbour)

    # --------------------------------------------------------------------------------------------------- differences

    def refresh(self, entry: Entry) -> list[Effect]:
        """Send each neighbour the difference between what it has of an entry and what it should have."""
        effects: list[Effect] = []
        regular = entry.is_regular(self.number)
        for link in self.neighbours:
            wanted = regular and self._goes_to(entry, link)
            if wanted == (link in entry.sent):
                continue
            if wanted:
                entry.sent.add(link)
            else:
                entry.sent.discard(link)
            self.on_sent(entry.route.key, link)
            effects.append(SendOnLink(link, RouteChanged(route=entry.route, added=wanted)))
        return effects

    def refresh_around(self, entry: Entry) -> list[Effect]:
        """The same for an entry that changed and, if it is an advertisement, for the subscriptions that it attracts."""
        effects = self.refresh(entry)
        return effects + (self._refresh_attracted(entry) if entry.route.kind is ADVERTISEMENT else [])

    def _refresh_attracted(self, advertisement: Entry) -> list[Effect]:
        route = advertisement.route
        effects: list[Effect] = []
        for entry in sorted(self.tables.of_kind(SUBSCRIPTION, route.event_type), key=lambda e: e.route.key):
            if entry.route.filter.overlaps(route.filter):
                effects += self.refresh(entry)
        return effects

    def _goes_to(self, entry: Entry, link: NodeId) -> bool:
        if entry.route.kind is ADVERTISEMENT:
            return link != entry.hop
        return self.tables.wants(entry.route, entry.hop, link, self.view)

    # -------------------------------------------------------------------------------------------------- publications

    def destinations(
        self, event_type: str, body: dict[str, object], view: View, origin: NodeId
    ) -> tuple[list[NodeId], dict[NodeId, tuple[int, ...]]]:
        """The neighbours that an event goes to, and the sites here with the numbers of their subscriptions."""
        links: dict[NodeId, None] = {}
        sites: dict[NodeId, tuple[int, ...]] = {}
        for entry in self.tables.matching(event_type, body, view):
            if entry.hop not in self.neighbours:
                sites[entry.hop] = (*sites.get(entry.hop, ()), number_of(entry.route.key))
            elif entry.hop != origin:
                links[entry.hop] = None
        return sorted(links), dict(sorted(sites.items()))

    def publish(self, published: TreePublished, origin: NodeId) -> list[Effect]:
        """A regular publication: by the tables of the commit that it is stamped with, here as everywhere."""
        event = published.event
        links, sites = self.destinations(event.type, event.body, View(published.stamp), origin)
        effects: list[Effect] = [SendOnLink(link, published) for link in links]
        for site, numbers in sites.items():
            effects.append(SendOnLink(site, TreeDelivered(event=event, subscriptions=numbers)))
        return effects
