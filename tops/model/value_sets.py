"""Sets of values of one kind, with exact set algebra: the values that a filter allows for one attribute.

Every kind that can be ordered has a least value, and every value but the greatest has an immediate successor: n + 1
for integers, the next double for floats, the next microsecond for timestamps, and for strings and bytes the value with
a zero appended, since nothing sorts between "a" and "a\\0". So every comparison is a union of half-open intervals
`[low, high)`, and sorted intervals that do not touch are the only form of a set: equal sets are equal values, and no
result depends on whether a kind is dense.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

import msgspec

from tops.model.event_types import INT_MAX, INT_MIN, PYTHON_TYPES, AttributeKind, problem_with_value

Interval = tuple[Any, Any]  # [low, high); a high of None lies above every value


class _Order(NamedTuple):
    """The order of one kind: its least value, and the successor of a value (None after the greatest)."""

    least: Any
    after: Callable[[Any], Any]


_LATEST: Final = datetime.max.replace(tzinfo=UTC)
_ORDERS: Final = {
    AttributeKind.BOOL: _Order(False, lambda value: None if value else True),
    AttributeKind.INT: _Order(INT_MIN, lambda value: None if value == INT_MAX else value + 1),
    AttributeKind.FLOAT: _Order(
        -math.inf,
        # Adding zero turns the negative zero below zero's successor into zero.
        lambda value: None if value == math.inf else math.nextafter(value, math.inf) + 0.0,
    ),
    AttributeKind.STR: _Order("", lambda value: value + "\0"),
    AttributeKind.BYTES: _Order(b"", lambda value: value + b"\0"),
    AttributeKind.TIMESTAMP: _Order(
        datetime.min.replace(tzinfo=UTC),
        lambda value: None if value == _LATEST else value + timedelta(microseconds=1),
    ),
}
_LOW: Final = itemgetter(0)
_SCAN_MAX: Final = 4  # up to so many intervals a plain loop is faster than a binary search


class ValueSet(msgspec.Struct, frozen=True, array_like=True):
    """A set of values of one kind, in its canonical form.

    Build one with the functions below; the constructor is for decoders and rejects (as a decoding error) what is not
    canonical.
    """

    kind: AttributeKind
    intervals: tuple[Interval, ...]

    def __post_init__(self) -> None:
        if self.kind not in _ORDERS:
            raise ValueError(f"values of kind {self.kind.value} can't be ordered")
        previous_high: Any = None
        for position, (low, high) in enumerate(self.intervals):
            for bound in (low,) if high is None else (low, high):
                if problem := problem_with_value(bound, self.kind):
                    raise ValueError(f"a bound of a set of kind {self.kind.value} {problem}")
            if (position and (previous_high is None or not previous_high < low)) or not (high is None or low < high):
                raise ValueError("intervals are empty, touch or are out of order")
            previous_high = high

    def __contains__(self, value: Any) -> bool:
        if type(value) is not PYTHON_TYPES[self.kind] or not can_be_ordered(value):
            return False
        intervals = self.intervals
        if len(intervals) > _SCAN_MAX:
            position = bisect_right(intervals, value, key=_LOW)
            intervals = intervals[max(position - 1, 0) : position]
        for low, high in intervals:  # noqa: SIM110 - on the path of every event, where a generator costs twice as much
            if low <= value and (high is None or value < high):
                return True
        return False

    def __and__(self, other: Self) -> Self:
        self._same_kind(other)
        common: list[Interval] = []
        mine, theirs = 0, 0
        while mine < len(self.intervals) and theirs < len(other.intervals):
            (low, high), (other_low, other_high) = self.intervals[mine], other.intervals[theirs]
            lower_high = _lower(high, other_high)
            if lower_high is None or max(low, other_low) < lower_high:
                common.append((max(low, other_low), lower_high))
            if lower_high == high:
                mine += 1
            else:
                theirs += 1
        return type(self)(self.kind, tuple(common))

    def __invert__(self) -> Self:
        gaps: list[Interval] = []
        low = _ORDERS[self.kind].least
        for next_low, high in self.intervals:
            if low < next_low:
                gaps.append((low, next_low))
            if high is None:
                return type(self)(self.kind, tuple(gaps))
            low = high
        return type(self)(self.kind, (*gaps, (low, None)))

    def covers(self, other: Self) -> bool:
        """Whether every member of `other` is a member of this."""
        if self.kind is not other.kind:
            return False
        # Intervals of a set do not touch, so that each of the other's must lie within one of these.
        for low, high in other.intervals:
            position = bisect_right(self.intervals, low, key=_LOW)
            if not position:
                return False
            own_high = self.intervals[position - 1][1]
            if own_high is not None and (high is None or own_high < high):
                return False
        return True

    def overlaps(self, other: Self) -> bool:
        """Whether some value is a member of both."""
        return self.kind is other.kind and bool((self & other).intervals)

    def points(self) -> tuple[Any, ...] | None:
        """The members, if the set consists of single values with gaps between them; None if an interval is wider."""
        after = _ORDERS[self.kind].after
        if all(high == after(low) for low, high in self.intervals):
            return tuple(low for low, _ in self.intervals)
        return None

    def describe(self, attribute: str) -> str:
        """The set as a readable condition on `attribute`."""
        excluded = (~self).points()
        if excluded and self.points() is None:
            return " and ".join(f"{attribute} != {value!r}" for value in excluded)
        parts = [self._describe_interval(attribute, low, high) for low, high in self.intervals]
        return parts[0] if len(parts) == 1 else "(" + " or ".join(parts) + ")"

    def _describe_interval(self, attribute: str, low: Any, high: Any) -> str:
        order = _ORDERS[self.kind]
        if high == order.after(low):
            return f"{attribute} = {low!r}"
        if high is None:
            return f"{attribute} >= {low!r}"
        return f"{attribute} < {high!r}" if low == order.least else f"{low!r} <= {attribute} < {high!r}"

    def _same_kind(self, other: Self) -> None:
        if self.kind is not other.kind:
            raise TypeError(f"a set of kind {self.kind.value} and one of kind {other.kind.value} have no common order")


def can_be_ordered(value: Any) -> bool:
    """Whether a value of an orderable type has a place in the order; NaN and a time without a zone have none."""
    return bool(value == value) and not (type(value) is datetime and value.tzinfo is None)


def is_least(kind: AttributeKind, value: Any) -> bool:
    """Whether no value of the kind lies below `value`."""
    return bool(value == _ORDERS[kind].least)


def _lower(high: Any, other: Any) -> Any:
    if high is None or other is None:
        return other if high is None else high
    return min(high, other)


def exactly(kind: AttributeKind, values: Iterable[Any]) -> ValueSet:
    """The set of exactly these values."""
    after = _ORDERS[kind].after
    intervals: list[Interval] = []
    for value in sorted(set(values)):
        if intervals and intervals[-1][1] == value:
            intervals[-1] = (intervals[-1][0], after(value))
        else:
            intervals.append((value, after(value)))
    return ValueSet(kind, tuple(intervals))


def below(kind: AttributeKind, value: Any) -> ValueSet:
    """The values less than `value`."""
    least = _ORDERS[kind].least
    return ValueSet(kind, ((least, value),) if least < value else ())


def at_most(kind: AttributeKind, value: Any) -> ValueSet:
    """The values that are `value` or less."""
    order = _ORDERS[kind]
    return ValueSet(kind, ((order.least, order.after(value)),))


def starting_with(kind: AttributeKind, prefix: Any) -> ValueSet:
    """The strings, or bytes, that begin with `prefix`: an interval, since they sort next to each other."""
    end = _end_of_prefix(prefix) if kind is AttributeKind.STR else _end_of_bytes_prefix(prefix)
    return ValueSet(kind, ((prefix, end),))


def _end_of_prefix(prefix: str) -> str | None:
    """The least string above all that begin with `prefix`."""
    stem = prefix.rstrip(chr(sys.maxunicode))
    if not stem:
        return None
    following = ord(stem[-1]) + 1
    # No string that can be sent holds a surrogate.
    return stem[:-1] + chr(0xE000 if following == 0xD800 else following)


def _end_of_bytes_prefix(prefix: bytes) -> bytes | None:
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None
