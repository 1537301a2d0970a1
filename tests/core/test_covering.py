"""Passing on filters: the same events from fewer filters, and never fewer events."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from tests.core.filter_cases import bodies, build, conjunctions
from tops.core.broker.covering import Cover
from tops.model.filters import Filter

MERGED = {"flag": "bool", "count": "int"}
FILTERS = conjunctions(MERGED).map(build)


def changed(cover: Cover, changes: list[tuple[bool, Filter]]) -> tuple[set[Filter], set[Filter]]:
    """What is wanted after these changes, and what the next hop has been told to pass."""
    wanted: set[Filter] = set()
    told: set[Filter] = set()
    for comes, each in changes:
        if comes:
            wanted.add(each)
            cover.add(each)
        else:
            wanted.discard(each)
            cover.remove(each)
        added, removed = cover.changes()
        assert told.isdisjoint(added) and told.issuperset(removed)
        told = (told | set(added)) - set(removed)
        assert told == set(cover.passed_on)
    return wanted, told


@given(st.lists(st.tuples(st.booleans(), FILTERS), max_size=12))
@example([(True, Filter.nothing())])
@example([(True, Filter.where("count", "in", [0, 2])), (True, Filter.where("count", "=", 2))])
def test_few_filters_are_passed_on_with_none_to_spare(changes: list[tuple[bool, Filter]]) -> None:
    wanted, told = changed(Cover(), changes)

    assert told <= wanted
    for body in bodies(MERGED):
        assert any(f.matches(body) for f in wanted) == any(f.matches(body) for f in told)
    assert not any(one.covers(other) for one, other in itertools.permutations(told, 2))


@given(
    st.lists(FILTERS, min_size=1, max_size=12).flatmap(
        lambda pool: st.lists(st.tuples(st.booleans(), st.sampled_from(pool)), max_size=60)
    ),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_many_filters_are_passed_on_with_no_event_missing(
    changes: list[tuple[bool, Filter]], passed_on_max: int, looked_at_max: int, moved_max: int
) -> None:
    wanted, told = changed(Cover(passed_on_max, looked_at_max, moved_max), changes)

    assert len(told) <= passed_on_max
    for body in bodies(MERGED):
        assert not any(f.matches(body) for f in wanted) or any(f.matches(body) for f in told)
    satisfiable = {f for f in wanted if f.satisfiable}
    assert bool(satisfiable) == bool(told)


def test_one_broad_filter_stands_for_narrow_ones_that_come_after_it() -> None:
    broad = Filter.where("total", ">", -1)
    narrow = [Filter.where("total", ">", number).where("id", "=", number % 7) for number in range(3000)]

    _, told = changed(Cover(), [(True, broad), *((True, each) for each in narrow)])

    assert told == {broad}


def test_beyond_a_number_of_filters_all_events_are_asked_for_until_there_are_far_fewer() -> None:
    narrow = [Filter.where("id", "=", number) for number in range(100)]
    cover = Cover(passed_on_max=20)

    _, told = changed(cover, [(True, each) for each in narrow])
    assert told == {Filter.everything()}
    for each in narrow[5:]:
        cover.remove(each)

    assert set(cover.passed_on) == set(narrow[:5])
