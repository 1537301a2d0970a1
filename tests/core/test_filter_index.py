"""The filter index: the same answers as asking every filter, in the owners' order, through any history of changes."""

import math
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.core.filter_cases import DOMAINS, build, conjunctions
from tops.core.overlay.filter_index import FilterIndex
from tops.core.overlay.interval_index import IntervalTree
from tops.model.filters import Filter

KINDS = {"flag": "bool", "count": "int", "ratio": "float", "name": "str", "blob": "bytes", "at": "timestamp"}
FILTERS = conjunctions(KINDS).map(build)
BODIES = st.fixed_dictionaries({}, optional={name: st.sampled_from(DOMAINS[kind]) for name, kind in KINDS.items()})


class IndexAgainstScan(RuleBasedStateMachine):
    """Adds and removes in any order, and asks both."""

    def __init__(self) -> None:
        super().__init__()
        self.index: FilterIndex[int] = FilterIndex()
        self.held: dict[int, list[Filter]] = {}  # owners in the order in which they came

    @rule(owner=st.integers(0, 5), filters=st.lists(FILTERS, min_size=1, max_size=5))
    def add(self, owner: int, filters: list[Filter]) -> None:
        for wanted in filters:
            self.index.add(owner, wanted)
            held = self.held.setdefault(owner, [])
            if wanted not in held:
                held.append(wanted)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if not self.held:
            return
        owner = data.draw(st.sampled_from(sorted(self.held)))
        wanted = data.draw(st.sampled_from(self.held[owner]))
        self.index.remove(owner, wanted)
        self.held[owner].remove(wanted)
        if not self.held[owner]:
            del self.held[owner]

    @rule(body=BODIES)
    def match(self, body: dict[str, Any]) -> None:
        scanned = [owner for owner, filters in self.held.items() if any(each.matches(body) for each in filters)]
        assert self.index.match(body) == scanned

    @invariant()
    def holds_each_distinct_filter_once(self) -> None:
        assert len(self.index) == len({each for filters in self.held.values() for each in filters})


TestIndexAgainstScan = IndexAgainstScan.TestCase


def nested_and_scattered_intervals() -> list[Filter]:
    """Enough two-sided intervals for several rebuilds of the tree, of all widths."""
    return [
        Filter.where("count", "range", (start, start + width)).where("name", "prefix", "ab"[start % 2])
        for start in range(0, 200, 3)
        for width in (1, 7, 150)
    ]


def test_hundreds_of_intervals_answer_like_a_scan_while_they_come_and_go() -> None:
    index: FilterIndex[int] = FilterIndex()
    filters = dict(enumerate(nested_and_scattered_intervals()))
    bodies = [{"count": count, "name": name} for count in range(-1, 360, 4) for name in ("a", "bb")]

    for owner, wanted in filters.items():
        index.add(owner, wanted)
        if owner % 50 == 0:
            index.match(bodies[owner % len(bodies)])
    for gone in [*range(0, 201, 2)]:
        index.remove(gone, filters.pop(gone))
        body = bodies[gone % len(bodies)]
        assert index.match(body) == [owner for owner, wanted in filters.items() if wanted.matches(body)]

    for body in bodies:
        assert index.match(body) == [owner for owner, wanted in filters.items() if wanted.matches(body)]


def test_owners_are_named_once_and_in_the_order_they_came() -> None:
    index: FilterIndex[str] = FilterIndex()
    index.add("late in the alphabet", Filter.where("id", "=", 1))
    index.add("b", Filter.everything())
    index.add("a", Filter.where("id", ">", 0))
    index.add("late in the alphabet", Filter.where("id", "exists"))

    assert index.match({"id": 1}) == ["late in the alphabet", "b", "a"]

    index.remove("late in the alphabet", Filter.where("id", "=", 1))
    index.remove("late in the alphabet", Filter.where("id", "exists"))
    index.add("late in the alphabet", Filter.where("id", "=", 1))

    assert index.match({"id": 1}) == ["b", "a", "late in the alphabet"]


def test_removing_what_was_never_placed_changes_nothing() -> None:
    index: FilterIndex[str] = FilterIndex()
    index.add("a", Filter.where("id", "=", 1))

    index.remove("a", Filter.where("id", "=", 2))
    index.remove("b", Filter.where("id", "=", 1))

    assert index.match({"id": 1}) == ["a"]


@pytest.mark.parametrize("value", [math.nan, datetime(2024, 1, 1), None, [1], {}, 2**70])
def test_a_value_without_a_place_in_any_order_matches_like_a_scan(value: Any) -> None:
    index: FilterIndex[Filter] = FilterIndex()
    filters = [
        Filter.where("x", ">", 0.5),
        Filter.where("x", "!=", 1.5),
        Filter.where("x", "<", datetime.fromisoformat("2030-01-01T00:00:00Z")),
        Filter.where("x", "exists"),
        Filter.where("x", ">", 5),
    ]
    for wanted in filters:
        index.add(wanted, wanted)

    assert index.match({"x": value}) == [wanted for wanted in filters if wanted.matches({"x": value})]


def test_an_event_visits_few_of_many_filters_even_if_all_share_a_common_value() -> None:
    """What keeps matching cheap: a value that everyone asks for is not what filters are filed under."""
    visited: list[object] = []

    class CountingBody(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            visited.append(key)
            return super().get(key, default)

    index: FilterIndex[int] = FilterIndex()
    for number in range(2000):
        index.add(number, Filter.where("status", "=", "open").where("id", "=", number * 2))

    assert index.match(CountingBody(status="open", id=1000)) == [500]
    assert len(visited) < 100


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=120), st.integers(0, 130))
def test_an_interval_tree_finds_exactly_the_intervals_that_contain_a_value(
    intervals: list[tuple[int, int]], value: int
) -> None:
    tree: IntervalTree[int] = IntervalTree()
    for item, (low, width) in enumerate(intervals):
        tree.add(low, low + width, item)

    found = tree.containing(value)

    assert sorted(found) == [item for item, (low, width) in enumerate(intervals) if low <= value < low + width]
