"""The routing tables of one broker: advertisements (SRT) and subscriptions (PRT), in all versions that are in use.

There is one entry per key. Transactions do not copy tables; they leave marks on entries: *added by* and *removed by*. A
view says which marks count. A commit number turns a mark into a version: the entry is seen by whoever routes by the
tables of that commit or of a later one.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tops.core.overlay.filter_index import FilterIndex
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.routing import RouteKey, RouteKind, client_of
from tops.protocol.messages import Route

AT_ONCE = 0  # the number of a mark that counts in every view: transactions without isolation
ALL_STEPS = 2**62
CLIENTS_MAX = 100_000  # whose generations are remembered


class View(NamedTuple):
    """Which state is looked at: all commits up to `stamp` and, of one transaction, the changes of its first steps."""

    stamp: int
    tx: TxId | None = None
    before: int = ALL_STEPS


class Mark:
    """A transaction's change of one entry: it is there from this step on, or no longer. `number` None: nobody else sees
    the change."""

    __slots__ = ("number", "present", "step")

    def __init__(self, step: int, present: bool, number: int | None) -> None:
        self.step, self.present, self.number = step, present, number


class Entry:
    """An advertisement or a subscription, and where it came from."""

    __slots__ = ("base", "hop", "marks", "route", "sent")

    def __init__(self, route: Route, hop: NodeId, base: bool) -> None:
        self.route, self.hop = route, hop
        self.base = base  # committed, in all versions
        self.marks: dict[TxId, list[Mark]] = {}  # in the order of the transaction's steps
        self.sent: set[NodeId] = set()  # the neighbours that have it from here as a regular one

    def mark(self, tx: TxId, mark: Mark) -> None:
        """One more change by a transaction, which may have changed the entry before."""
        self.marks.setdefault(tx, []).append(mark)

    def visible(self, view: View) -> bool:
        """Whether the view has the entry: by the last commit that it has, then by changes that are visible at once,
        then by the transaction's own."""
        if not self.marks:
            return self.base
        present = self._by_commits(view)
        for tx, marks in self.marks.items():
            if marks[-1].number == AT_ONCE and tx != view.tx:
                if not marks[-1].present:
                    return False
                present = True
        for mark in self.marks.get(view.tx, ()) if view.tx is not None else ():
            if mark.step < view.before:
                present = mark.present
        return present

    def is_regular(self, number: int) -> bool:
        """Whether it is committed and not removed by a commit, when `number` is the last one applied."""
        return self._by_commits(View(number)) if self.marks else self.base

    def _by_commits(self, view: View) -> bool:
        present, latest = self.base, AT_ONCE
        for marks in self.marks.values():
            last = marks[-1]
            if last.number is not None and latest < last.number <= view.stamp:
                present, latest = last.present, last.number
        return present


class Tables:
    """SRT and PRT of one broker."""

    def __init__(self) -> None:
        self.entries: dict[RouteKey, Entry] = {}
        self._of_type: dict[tuple[RouteKind, str], dict[RouteKey, Entry]] = {}
        self._index: dict[str, FilterIndex[RouteKey]] = {}  # subscriptions by event type
        self._generations: OrderedDict[str, int] = OrderedDict()  # the latest one of each client

    # ------------------------------------------------------------------------------------------------------- changes

    def is_outdated(self, route: Route) -> bool:
        """Whether its client has registered at another broker since: what still comes from the former one must not
        count, also where the newer entry is gone already."""
        client = client_of(route.key)
        latest = self._generations.get(client, 0)
        if route.generation < latest:
            return True
        self._generations[client] = route.generation
        self._generations.move_to_end(client)
        if len(self._generations) > CLIENTS_MAX:
            self._generations.popitem(last=False)
        return False

    def put(self, route: Route, hop: NodeId, base: bool) -> Entry:
        """The entry of a route; an older generation of it gives way, a newer one stays as it is."""
        known = self.entries.get(route.key)
        if known is None:
            known = self.entries[route.key] = Entry(route, hop, base)
            self._of_type.setdefault((route.kind, route.event_type), {})[route.key] = known
            if route.kind is RouteKind.SUBSCRIPTION:
                self._index.setdefault(route.event_type, FilterIndex()).add(route.key, route.filter)
        elif route.generation >= known.route.generation:
            if route.generation > known.route.generation:
                known.sent.clear()  # neighbours may have got it from elsewhere since, and are about to lose that
            known.route, known.hop = route, hop  # type and filter belong to the key, and never change
            known.base = known.base or base
        return known

    def drop(self, key: RouteKey) -> Entry | None:
        """Take an entry out, in all versions and whatever transactions say of it."""
        known = self.entries.pop(key, None)
        if known is not None:
            route = known.route
            del self._of_type[route.kind, route.event_type][key]
            if route.kind is RouteKind.SUBSCRIPTION:
                self._index[route.event_type].remove(key, route.filter)
        return known

    # ------------------------------------------------------------------------------------------------------ look-ups

    def of_kind(self, kind: RouteKind, event_type: str) -> Iterator[Entry]:
        """All entries of one kind and type."""
        yield from self._of_type.get((kind, event_type), {}).values()

    def from_hop(self, hop: NodeId) -> list[Entry]:
        """What came over one link, advertisements first."""
        found = [entry for entry in self.entries.values() if entry.hop == hop]
        return sorted(found, key=lambda entry: (entry.route.kind.value, entry.route.key))

    def overlapping(self, kind: RouteKind, event_type: str, wanted: Filter, view: View) -> list[Entry]:
        """The visible entries that have events in common with a filter, in the order of their keys."""
        found = [
            entry
            for entry in self.of_kind(kind, event_type)
            if entry.visible(view) and entry.route.filter.overlaps(wanted)
        ]
        return sorted(found, key=lambda entry: entry.route.key)

    def wants(self, route: Route, hop: NodeId, link: NodeId, view: View, without: RouteKey | None = None) -> bool:
        """Whether a subscription from `hop` goes to another neighbour: an overlapping advertisement came from there."""
        if link == hop:
            return False
        return any(
            entry.hop == link
            and entry.route.key != without
            and entry.visible(view)
            and entry.route.filter.overlaps(route.filter)
            for entry in self.of_kind(RouteKind.ADVERTISEMENT, route.event_type)
        )

    def matching(self, event_type: str, body: Mapping[str, Any], view: View) -> list[Entry]:
        """The visible subscriptions that want an event, in the order of their keys."""
        index = self._index.get(event_type)
        if index is None:
            return []
        found = (self.entries[key] for key in index.match(body))
        return sorted((e for e in found if e.visible(view)), key=lambda entry: entry.route.key)
