"""Matches an event against many filters of one event type, at a cost that follows the matches and not the filters.

Each filter is indexed under one of its constraints, the most selective one: single values in a hash table, intervals in
structures that are searched by bisection. An event looks up each of its values, and only the filters found that way
have their other constraints tested.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final, Generic, TypeVar

from tops.core.overlay.interval_index import IntervalTree, Rays
from tops.model.event_types import PYTHON_TYPES
from tops.model.filters import Constraint, Filter
from tops.model.value_sets import ValueSet, can_be_ordered, is_least

Owner = TypeVar("Owner", bound=Hashable)

# The share of events that satisfy a constraint, where the filters so far give no estimate; only the order counts.
_SHARE_TWO_ENDS: Final = 1 / 16
_SHARE_ONE_END: Final = 1 / 2
_SHARE_SEVERAL: Final = 3 / 4
_SHARE_EXISTS: Final = 1.0
# Beside each value in the table: a subscriber chooses the values, and hashes of numbers can be foreseen. Hashes of
# texts differ from process to process.
_SALT: Final = hash("values of filters")
_POINTS_PRIOR: Final = 64  # a table of few values is treated as if it had this many more


class _Entry(Generic[Owner]):
    """One filter, its owners, and the constraints that remain to be tested after a hit in the index."""

    __slots__ = ("access", "owners", "rest")

    def __init__(self, access: Constraint | None, rest: tuple[Constraint, ...]) -> None:
        self.access = access  # None: it has no constraint
        self.rest = rest
        self.owners: dict[Owner, None] = {}

    def rest_holds(self, body: Mapping[str, Any]) -> bool:
        for constraint in self.rest:  # noqa: SIM110 - on the path of every event
            if not constraint.holds_for(body):
                return False
        return True


class _ValueIndex(Generic[Owner]):
    """The filters that are indexed under one attribute and one kind of values."""

    def __init__(self) -> None:
        self._points: dict[tuple[int, Any], dict[_Entry[Owner], None]] = {}
        self._point_count = 0
        self._from: Rays[_Entry[Owner]] = Rays()
        self._until: Rays[_Entry[Owner]] = Rays()
        self._between: IntervalTree[_Entry[Owner]] = IntervalTree()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def share(self, points: tuple[Any, ...]) -> float:
        """The share of the indexed single values that are among `points`: high for a common value."""
        beside = sum(len(self._points.get((_SALT, point), ())) for point in points)
        return (beside + len(points)) / (self._point_count + _POINTS_PRIOR)

    def add(self, allowed: ValueSet, entry: _Entry[Owner]) -> None:
        self._size += 1
        if (points := allowed.points()) is not None:
            self._point_count += len(points)
            for point in points:
                self._points.setdefault((_SALT, point), {})[entry] = None
            return
        for low, high in allowed.intervals:
            if high is None:
                self._from.add(low, entry)
            elif is_least(allowed.kind, low):
                self._until.add(high, entry)
            else:
                self._between.add(low, high, entry)

    def remove(self, allowed: ValueSet, entry: _Entry[Owner]) -> None:
        self._size -= 1
        if (points := allowed.points()) is not None:
            self._point_count -= len(points)
            for point in points:
                entries = self._points[_SALT, point]
                del entries[entry]
                if not entries:
                    del self._points[_SALT, point]
            return
        two_ends = False
        for low, high in allowed.intervals:
            if high is None:
                self._from.remove(low, entry)
            elif is_least(allowed.kind, low):
                self._until.remove(high, entry)
            else:
                two_ends = True
        if two_ends:
            self._between.remove(entry)

    def containing(self, value: Any) -> Iterable[Iterable[_Entry[Owner]]]:
        """The entries whose set contains `value`, each once, in up to four groups."""
        return (
            self._points.get((_SALT, value), ()),
            self._from.up_to(value),
            self._until.beyond(value),
            self._between.containing(value),
        )


class FilterIndex(Generic[Owner]):
    """The filters of owners on one event type, and the owners whose filters match an event.

    An owner is any key of the caller (a link, a subscription). An owner may hold any number of filters; to hold one
    twice is to hold it once. Only bodies that fit the event type are to be matched.
    """

    def __init__(self) -> None:
        self._entries: dict[Filter, _Entry[Owner]] = {}
        self._unconstrained: dict[_Entry[Owner], None] = {}
        self._present: dict[str, dict[_Entry[Owner], None]] = {}
        self._values: dict[str, dict[type[Any], _ValueIndex[Owner]]] = {}
        self._filter_counts: dict[Owner, int] = {}
        self._arrivals: dict[Owner, int] = {}
        self._next_arrival = 0

    def __len__(self) -> int:
        """The number of distinct filters."""
        return len(self._entries)

    def add(self, owner: Owner, wanted: Filter) -> None:
        """Add a filter of `owner`."""
        entry = self._entries.get(wanted)
        if entry is None:
            entry = self._entries[wanted] = self._file(wanted)
        if owner in entry.owners:
            return
        entry.owners[owner] = None
        if owner not in self._arrivals:
            self._arrivals[owner] = self._next_arrival
            self._next_arrival += 1
        self._filter_counts[owner] = self._filter_counts.get(owner, 0) + 1

    def remove(self, owner: Owner, wanted: Filter) -> None:
        """Remove a filter of `owner`; nothing happens if it does not hold it."""
        entry = self._entries.get(wanted)
        if entry is None or owner not in entry.owners:
            return
        del entry.owners[owner]
        self._filter_counts[owner] -= 1
        if self._filter_counts[owner] == 0:
            del self._filter_counts[owner], self._arrivals[owner]
        if not entry.owners:
            del self._entries[wanted]
            self._unfile(wanted, entry)

    def match(self, body: Mapping[str, Any]) -> list[Owner]:
        """The owners of at least one matching filter, in the order in which they were added."""
        owners: set[Owner] = set()
        for group in self._candidates(body):
            for entry in group:
                if not entry.rest or entry.rest_holds(body):
                    owners.update(entry.owners)
        return sorted(owners, key=self._arrivals.__getitem__)

    def first_matches(self, body: Mapping[str, Any], looked_at_max: int) -> Iterator[Owner]:
        """Owners of matching filters among the first `looked_at_max` candidates, for a caller that needs only some."""
        for entry in islice(chain.from_iterable(self._candidates(body)), looked_at_max):
            if entry.rest_holds(body):
                yield from entry.owners

    def owners(self, wanted: Filter) -> Collection[Owner]:
        """The owners of a filter."""
        entry = self._entries.get(wanted)
        return entry.owners if entry is not None else ()

    def _candidates(self, body: Mapping[str, Any]) -> Iterable[Iterable[_Entry[Owner]]]:
        yield self._unconstrained
        for attribute, present in self._present.items():
            if attribute in body:
                yield present
        for attribute, by_type in self._values.items():
            value = body.get(attribute)
            values = by_type.get(type(value))
            if values is not None and can_be_ordered(value):
                yield from values.containing(value)

    def _file(self, wanted: Filter) -> _Entry[Owner]:
        access = min(wanted.constraints, key=self._share, default=None)
        entry = _Entry[Owner](access, tuple(each for each in wanted.constraints if each is not access))
        if not wanted.satisfiable:
            return entry
        if access is None:
            self._unconstrained[entry] = None
        elif access.allowed is None:
            self._present.setdefault(access.attribute, {})[entry] = None
        else:
            by_type = self._values.setdefault(access.attribute, {})
            by_type.setdefault(PYTHON_TYPES[access.allowed.kind], _ValueIndex()).add(access.allowed, entry)
        return entry

    def _unfile(self, wanted: Filter, entry: _Entry[Owner]) -> None:
        access = entry.access
        if not wanted.satisfiable:
            return
        if access is None:
            del self._unconstrained[entry]
        elif access.allowed is None:
            del self._present[access.attribute][entry]
            if not self._present[access.attribute]:
                del self._present[access.attribute]
        else:
            by_type, python_type = self._values[access.attribute], PYTHON_TYPES[access.allowed.kind]
            by_type[python_type].remove(access.allowed, entry)
            if not by_type[python_type]:
                del by_type[python_type]
            if not by_type:
                del self._values[access.attribute]

    def _share(self, constraint: Constraint) -> float:
        """An estimate of the share of events that satisfy the constraint; a filter is indexed under the smallest."""
        allowed = constraint.allowed
        if allowed is None:
            return _SHARE_EXISTS
        if (points := allowed.points()) is not None:
            values = self._values.get(constraint.attribute, {}).get(PYTHON_TYPES[allowed.kind])
            return len(points) / _POINTS_PRIOR if values is None else values.share(points)
        if len(allowed.intervals) > 1:
            return _SHARE_SEVERAL
        low, high = allowed.intervals[0]
        return _SHARE_ONE_END if high is None or is_least(allowed.kind, low) else _SHARE_TWO_ENDS
