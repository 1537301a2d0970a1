"""What a decision does to the tables of one broker: marks become entries, versions, or nothing.

    isolated   commit: the marks are a version; collapsed once no publication is routed by an earlier one any more
    others     commit: collapsed at once, since everybody has seen the changes all along
    all        abort: what was added is deleted, what was removed is there again

Regular routing goes on meanwhile, so neighbours may have more, or less, than they should have in the end. Therefore
every settlement compares what they have with what they should have, and sends the differences.
"""

from tops.core.routing_tx.steps import Work
from tops.core.routing_tx.tables import Mark
from tops.core.routing_tx.tree_routes import ADVERTISEMENT, SUBSCRIPTION, TreeRoutes
from tops.model.routing import RouteKey, TxKind
from tops.protocol.effects import Effect, SendOnLink
from tops.protocol.messages import RouteChanged, RouteEnded


class Settlement:
    """Carries out decisions on the tables of one broker."""

    def __init__(self, routes: TreeRoutes) -> None:
        self.routes = routes

    def prepare(self, work: Work, number: int) -> None:
        """A publication that is stamped with this number proves the commit: it is routed by the marks from now on."""
        for mark in self._marks(work):
            mark.number = number

    def commit(self, work: Work, number: int) -> list[Effect]:
        """The marks count for everybody from now on."""
        if work.kind is TxKind.ISOLATED:
            self.prepare(work, number)
            self.routes.number = max(self.routes.number, number)
        effects = self._neighbours_have(work)
        if work.kind is not TxKind.ISOLATED:
            effects += self.collapse(work)
        return effects + self._refresh(work)

    def collapse(self, work: Work) -> list[Effect]:
        """No publication is routed by an earlier version any more: there is only one from now on."""
        effects: list[Effect] = []
        for key in sorted(work.routes):
            entry = self.routes.tables.entries.get(key)
            marks = entry.marks.pop(work.tx, None) if entry is not None else None
            if entry is None or marks is None:
                continue
            entry.base = marks[-1].present
            if entry.base:
                continue
            if not entry.marks:  # nobody has added it again
                effects += self.routes.drop(entry)
            if entry.hop not in self.routes.neighbours and entry.route.kind is SUBSCRIPTION:
                effects.append(SendOnLink(entry.hop, RouteEnded(key=key)))
        return effects

    def abort(self, work: Work) -> list[Effect]:
        """Nothing has happened. Every broker does this by itself, so no order of compensations can go wrong."""
        effects: list[Effect] = []
        for key in sorted(work.routes):
            entry = self.routes.tables.entries.get(key)
            if entry is None:
                continue
            entry.marks.pop(work.tx, None)
            if not entry.base and not entry.marks:
                effects += self.routes.drop(entry)
        return effects + self._refresh(work)

    def _marks(self, work: Work) -> list[Mark]:
        found: list[Mark] = []
        for key in work.routes:
            entry = self.routes.tables.entries.get(key)
            if entry is not None:
                found += entry.marks.get(work.tx, [])
        return found

    def _neighbours_have(self, work: Work) -> list[Effect]:
        """What neighbours got by the transaction counts as regular. What is gone here since is withdrawn from them."""
        effects: list[Effect] = []
        for (key, link), present in sorted(work.sent.items()):
            entry = self.routes.tables.entries.get(key)
            if entry is None:
                if present:
                    effects.append(SendOnLink(link, RouteChanged(route=work.routes[key], added=False)))
            elif present:
                entry.sent.add(link)
            else:
                entry.sent.discard(link)
        return effects

    def _refresh(self, work: Work) -> list[Effect]:
        effects: list[Effect] = []
        for key in sorted(self._touched(work)):
            entry = self.routes.tables.entries.get(key)
            if entry is not None:
                effects += self.routes.refresh(entry)
        return effects

    def _touched(self, work: Work) -> set[RouteKey]:
        """The transaction's entries, and regular subscriptions that its advertisements attract or release."""
        touched = set(work.routes)
        for route in work.routes.values():
            if route.kind is ADVERTISEMENT:
                subscriptions = self.routes.tables.of_kind(SUBSCRIPTION, route.event_type)
                touched.update(s.route.key for s in subscriptions if s.route.filter.overlaps(route.filter))
        return touched
