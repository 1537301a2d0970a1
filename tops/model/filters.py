"""Which events a subscriber wants: filters, and how they relate to each other.

A filter is a conjunction of predicates on attributes. It is kept as one set of allowed values per attribute, so that
matching, overlap and covering are exact, and equivalent filters are equal. `tops.core.overlay.filter_index` matches
many filters against one event.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from tops.model.errors import InvalidFilter
from tops.model.event_types import KINDS, AttributeKind, EventType, problem_with_name, problem_with_value
from tops.model.value_sets import ValueSet, at_most, below, exactly, starting_with

Operator = Literal["=", "!=", "<", "<=", ">", ">=", "range", "in", "prefix", "exists"]

_COMPARISONS: Final[Mapping[str, Callable[[AttributeKind, Any], ValueSet]]] = {
    "=": lambda kind, value: exactly(kind, [value]),
    "!=": lambda kind, value: ~exactly(kind, [value]),
    "<": below,
    "<=": at_most,
    ">": lambda kind, value: ~at_most(kind, value),
    ">=": lambda kind, value: ~below(kind, value),
}
_encode: Final = msgspec.msgpack.Encoder().encode
_OPERATORS: Final = (*_COMPARISONS, "range", "in", "prefix", "exists")


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """A filter's condition on one attribute: it is present and, unless `allowed` is None, its value is in the set."""

    attribute: str
    allowed: ValueSet | None

    def __post_init__(self) -> None:
        if problem := problem_with_name(self.attribute):
            raise ValueError(f"the name of attribute {self.attribute!r} {problem}")
        if self.allowed is not None and not self.allowed.intervals:
            raise ValueError(f"attribute {self.attribute!r} is allowed no value")

    def holds_for(self, body: Mapping[str, Any]) -> bool:
        """Whether the attribute is in the body with an allowed value."""
        if self.allowed is None:
            return self.attribute in body
        # None is in no set, so an absent attribute needs no look-up of its own.
        return body.get(self.attribute) in self.allowed

    def covers(self, other: "Constraint") -> bool:
        """Whether every value that `other` allows is allowed here; both are on one attribute."""
        return self.allowed is None or (other.allowed is not None and self.allowed.covers(other.allowed))

    def overlaps(self, other: "Constraint") -> bool:
        """Whether some value is allowed by both; both are on one attribute."""
        return self.allowed is None or other.allowed is None or self.allowed.overlaps(other.allowed)


class _Where:
    """`where`, on the class to start a filter and on a filter to narrow it."""

    def __init__(self, base: "Filter | None" = None) -> None:
        self._base = base

    def __get__(self, base: "Filter | None", owner: object) -> "_Where":
        return _Where(base)

    def __call__(self, attribute: str, operator: Operator, operand: object = None) -> "Filter":
        narrowing = _single(attribute, operator, operand)
        return narrowing if self._base is None else self._base & narrowing


class Filter(msgspec.Struct, frozen=True, array_like=True):
    """A conjunction of predicates; an attribute that it does not mention is unconstrained.

    Begin with `Filter.where("total", ">", 10)` and narrow with `.where(...)` or `&`. The operand gives a predicate its
    kind, and only values of that kind satisfy it: 10 compares with ints, 10.0 with floats, and one attribute takes
    operands of one kind. `range` takes `(low, high)`, both included; `in` a list, tuple or set; `prefix` a str or
    bytes; `exists` nothing. A predicate on an absent attribute is false, `!=` too.

    The constructor is for decoders; it rejects (as a decoding error) what is not canonical.
    """

    constraints: tuple[Constraint, ...] = ()  # by attribute, in order of the names
    satisfiable: bool = True  # False: the predicates contradict each other, so that no event matches

    where = _Where()

    def __post_init__(self) -> None:
        names = [constraint.attribute for constraint in self.constraints]
        if names != sorted(set(names)) or (names and not self.satisfiable):
            raise ValueError("constraints are out of order, repeated or beside a contradiction")

    @classmethod
    def everything(cls) -> "Filter":
        """The filter that every event matches."""
        return cls()

    @classmethod
    def nothing(cls) -> "Filter":
        """The filter that no event matches; any contradiction is equal to it."""
        return cls(satisfiable=False)

    def __and__(self, other: "Filter") -> "Filter":
        if not (self.satisfiable and other.satisfiable):
            return Filter.nothing()
        merged = {constraint.attribute: constraint.allowed for constraint in self.constraints}
        for constraint in other.constraints:
            attribute, allowed = constraint.attribute, constraint.allowed
            known = merged.get(attribute)
            if known is not None and allowed is not None:
                if known.kind is not allowed.kind:
                    raise InvalidFilter(
                        f"filter on attribute {attribute!r} compares it with {known.kind.value} and "
                        f"{allowed.kind.value} values; use operands of one kind"
                    )
                allowed &= known
            merged[attribute] = known if allowed is None else allowed
        if any(allowed is not None and not allowed.intervals for allowed in merged.values()):
            return Filter.nothing()
        return Filter(tuple(Constraint(attribute, merged[attribute]) for attribute in sorted(merged)))

    def encoded_bytes(self) -> int:
        """Its size on the wire, which counts for quotas; 0 for the filter that every event matches."""
        return len(_encode(self)) if self.constraints else 0

    def matches(self, body: Mapping[str, Any]) -> bool:
        """Whether an event with this body is wanted."""
        if not self.constraints:
            return self.satisfiable
        return self.satisfiable and all(constraint.holds_for(body) for constraint in self.constraints)

    def overlaps(self, other: "Filter") -> bool:
        """Whether some event matches both."""
        if not (self.satisfiable and other.satisfiable):
            return False
        theirs = {constraint.attribute: constraint for constraint in other.constraints}
        return all(
            constraint.overlaps(theirs[constraint.attribute])
            for constraint in self.constraints
            if constraint.attribute in theirs
        )

    def covers(self, other: "Filter") -> bool:
        """Whether every event that matches `other` matches this filter."""
        if not (self.satisfiable and other.satisfiable):
            return not other.satisfiable
        theirs = {constraint.attribute: constraint for constraint in other.constraints}
        return all(
            constraint.attribute in theirs and constraint.covers(theirs[constraint.attribute])
            for constraint in self.constraints
        )

    def check_against(self, event_type: EventType) -> None:
        """Raise InvalidFilter for a filter that does not fit this type; pass a type with its inherited attributes."""
        for constraint in self.constraints:
            kind = event_type.kind_of(constraint.attribute)
            subject = f"filter on event type {event_type.name!r}: attribute {constraint.attribute!r}"
            if kind is None:
                known = ", ".join(map(repr, event_type.attributes)) or "no attributes"
                raise InvalidFilter(f"{subject} is unknown; the type has {known}")
            if constraint.allowed is not None and constraint.allowed.kind is not kind:
                if kind is AttributeKind.STRUCTURE:
                    raise InvalidFilter(f"{subject} is a structure, which takes no operator but 'exists'")
                raise InvalidFilter(f"{subject} is {kind.value}, but compared with {constraint.allowed.kind.value}")

    def __str__(self) -> str:
        if not self.satisfiable:
            return "nothing"
        return " and ".join(map(_describe, self.constraints)) or "everything"


def _describe(constraint: Constraint) -> str:
    if constraint.allowed is None:
        return f"{constraint.attribute} exists"
    return constraint.allowed.describe(constraint.attribute)


def _single(attribute: str, operator: str, operand: object) -> Filter:
    if problem := problem_with_name(attribute):
        raise InvalidFilter(f"filter: the name of attribute {attribute!r} {problem}")
    allowed = _allowed(f"filter: {attribute!r} {operator}", operator, operand)
    if allowed is not None and not allowed.intervals:
        return Filter.nothing()
    return Filter((Constraint(attribute, allowed),))


def _allowed(predicate: str, operator: str, operand: object) -> ValueSet | None:
    if operator in _COMPARISONS:
        kind, values = _operands(predicate, [operand])
        return _COMPARISONS[operator](kind, values[0])
    if operator == "exists":
        if operand is not None:
            raise InvalidFilter(f"{predicate}: takes no operand")
        return None
    if operator == "prefix":
        if not isinstance(operand, str | bytes):
            raise InvalidFilter(f"{predicate}: takes a str or bytes, not a {type(operand).__name__}")
        kind, values = _operands(predicate, [operand])
        return starting_with(kind, values[0])
    if operator == "in":
        if not isinstance(operand, list | tuple | set | frozenset) or not operand:
            raise InvalidFilter(f"{predicate}: takes a list, tuple or set with at least one value")
        return exactly(*_operands(predicate, operand))
    if operator == "range":
        if not isinstance(operand, list | tuple) or len(operand) != 2:
            raise InvalidFilter(f"{predicate}: takes a pair (low, high), both included")
        kind, (low, high) = _operands(predicate, operand)
        if low > high:
            raise InvalidFilter(f"{predicate}: the low end {low!r} is above the high end {high!r}")
        return at_most(kind, high) & ~below(kind, low)
    raise InvalidFilter(f"{predicate}: no such operator; use one of {', '.join(_OPERATORS)}")


def _operands(predicate: str, given: Iterable[object]) -> tuple[AttributeKind, list[Any]]:
    """The operands in canonical form, and their common kind."""
    values = [_canonical(predicate, value) for value in given]
    kinds = {KINDS.get(type(value)) for value in values}
    kind = kinds.pop()
    if kinds:
        raise InvalidFilter(f"{predicate}: operands of one kind only; an int is no float")
    if kind is None or kind is AttributeKind.STRUCTURE:
        raise InvalidFilter(f"{predicate}: can't compare with a {type(values[0]).__name__}")
    for value in values:
        if problem := problem_with_value(value, kind):
            raise InvalidFilter(f"{predicate}: the operand {problem}")
    return kind, values


def _canonical(predicate: str, value: object) -> object:
    """A timestamp is converted to UTC, in which timestamps are compared; negative zero becomes positive zero."""
    if isinstance(value, float):
        return value + 0.0
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is None:
        raise InvalidFilter(f"{predicate}: a datetime without a time zone is ambiguous; give it one")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidFilter(f"{predicate}: {value.isoformat()} lies outside the years 1 to 9999 in UTC") from None
