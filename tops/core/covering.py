"""Which filters a broker need not pass on, because others already ask for all that they ask for."""

from collections.abc import Iterable
from typing import Any

from tops.core.filter_index import FilterIndex
from tops.filters import Filter


def minimal_cover(filters: Iterable[Filter]) -> tuple[Filter, ...]:
    """The filters without those that another one covers: together they match the same events.

    In the order given; of equal ones the first stays.
    """
    distinct = [each for each in dict.fromkeys(filters) if each.satisfiable]
    # After the pass one way none is covered by one before it, after the pass back none by one behind it. Any order is
    # right; with the broad ones first the pass holds few filters, so that it takes little more time than the sorting.
    forth = _not_covered_by_predecessors(_broad_first(distinct))
    maximal = set(_not_covered_by_predecessors(reversed(forth)))
    return tuple(each for each in distinct if each in maximal)


def _not_covered_by_predecessors(filters: Iterable[Filter]) -> list[Filter]:
    kept: FilterIndex[Filter] = FilterIndex()
    result: list[Filter] = []
    for candidate in filters:
        # Whatever covers a filter matches every event that the filter matches, so it matches this one.
        if not any(other.covers(candidate) for other in kept.match(_some_event_of(candidate))):
            kept.add(candidate, candidate)
            result.append(candidate)
    return result


def _some_event_of(candidate: Filter) -> dict[str, Any]:
    """A body that the filter matches; None where any value would do, since a filter on values covers no `exists`."""
    return {
        constraint.attribute: None if constraint.allowed is None else constraint.allowed.intervals[0][0]
        for constraint in candidate.constraints
    }


def _broad_first(filters: list[Filter]) -> list[Filter]:
    """Few constraints first, then low ends first and high ends last: a cover mostly comes before what it covers."""
    by_high = sorted(filters, key=lambda each: (_shape(each), _highs(each)), reverse=True)
    return sorted(by_high, key=lambda each: (_shape(each), _lows(each)))


def _shape(each: Filter) -> tuple[int, list[tuple[str, str]]]:
    """Filters of one shape have ends of the same kinds, which can be compared."""
    names = [(c.attribute, "" if c.allowed is None else c.allowed.kind.value) for c in each.constraints]
    return len(names), names


def _lows(each: Filter) -> list[Any]:
    return [c.allowed.intervals[0][0] for c in each.constraints if c.allowed is not None]


def _highs(each: Filter) -> list[tuple[bool, Any]]:
    highs = [c.allowed.intervals[-1][1] for c in each.constraints if c.allowed is not None]
    return [(high is None, high) for high in highs]
