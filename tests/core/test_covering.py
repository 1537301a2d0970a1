"""Merging filters: the same events from fewer filters."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from tests.core.filter_cases import bodies, build, conjunctions
from tops.core.covering import minimal_cover
from tops.filters import Filter

MERGED = {"flag": "bool", "count": "int"}


@given(st.lists(conjunctions(MERGED).map(build), max_size=8))
@example([Filter.nothing()])
@example([Filter.where("count", "in", [0, 2]), Filter.where("count", "=", 2), Filter.where("count", "=", 2)])
def test_a_minimal_cover_matches_the_same_events_with_no_filter_to_spare(filters: list[Filter]) -> None:
    cover = minimal_cover(filters)

    assert set(cover) <= set(filters)
    for body in bodies(MERGED):
        assert any(f.matches(body) for f in filters) == any(f.matches(body) for f in cover)
    assert not any(one.covers(other) for one, other in itertools.permutations(cover, 2))
    assert list(cover) == [f for f in dict.fromkeys(filters) if f in cover]


def test_one_broad_filter_stands_for_thousands_of_narrow_ones() -> None:
    narrow = [Filter.where("total", ">", number).where("id", "=", number % 7) for number in range(3000)]
    broad = Filter.where("total", ">", -1)

    assert minimal_cover([*narrow, broad]) == (broad,)
    assert minimal_cover(narrow) == tuple(narrow[:7])
