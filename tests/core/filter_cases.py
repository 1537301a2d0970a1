"""Operands, small domains and the plain meaning of predicates, for tests that compare filters with brute force."""

import itertools
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from tops.model.filters import Filter

START = datetime(2024, 1, 1, tzinfo=UTC)
LATEST = datetime.max.replace(tzinfo=UTC)
TINY = 5e-324
HIGHEST_BEFORE_SURROGATES, TOP = "\ud7ff", "\U0010ffff"

# Operands of each kind, with neighbours that have nothing between them and the ends of each domain.
OPERANDS: dict[str, list[Any]] = {
    "bool": [False, True],
    "int": [-(2**63), -(2**63) + 1, -1, 0, 1, 2, 4, 2**63 - 2, 2**63 - 1],
    "float": [-math.inf, -1.5, -TINY, -0.0, 0.0, TINY, 1.0, math.nextafter(1.0, 2.0), 1e308, math.inf],
    "str": ["", "\0", "a", "a\0", "a\0\0", "aa", "ab", "b", HIGHEST_BEFORE_SURROGATES, "\ue000", TOP, "a" + TOP],
    "bytes": [b"", b"\0", b"a", b"a\0", b"aa", b"b", b"\xff", b"\xff\xff", b"a\xff"],
    "timestamp": [
        datetime.min.replace(tzinfo=UTC),
        START,
        START + timedelta(microseconds=1),
        START + timedelta(microseconds=3),
        LATEST - timedelta(microseconds=1),
        LATEST,
    ],
}


def neighbours(kind: str, value: Any) -> Iterable[Any]:
    """Values next to an operand: if two sets of few operands differ anywhere, they differ at one of these."""
    match kind:
        case "int":
            return [v for v in (value - 1, value, value + 1) if -(2**63) <= v < 2**63]
        case "float":
            return [math.nextafter(value, -math.inf), value, math.nextafter(value, math.inf)]
        case "str":
            alphabet = ("\0", "a", HIGHEST_BEFORE_SURROGATES, "\ue000", TOP)
            return [value, *(value + end for end in alphabet), *(value[:-1] + end for end in alphabet), value[:-1]]
        case "bytes":
            ends = (b"\0", b"a", b"b", b"\xff")
            return [value, *(value + end for end in ends), *(value[:-1] + end for end in ends), value[:-1]]
        case "timestamp":
            step = timedelta(microseconds=1)
            inside = [value - step] if value.year > 1 else []
            return [*inside, value, *([value + step] if value != LATEST else [])]
    return [value]


STRINGS = ["".join(letters) for length in range(4) for letters in itertools.product("ab", repeat=length)]
DOMAINS: dict[str, list[Any]] = {
    kind: list(dict.fromkeys(value for operand in operands for value in neighbours(kind, operand)))
    for kind, operands in OPERANDS.items()
}
DOMAINS["str"] = list(dict.fromkeys([*DOMAINS["str"], *STRINGS, *(s + "\0" for s in STRINGS)]))

# A mention of x as a whole domain ("x >= the least value") and "x exists" agree on all values of one kind, but not on
# those of the others, so a value of another kind is part of what brute force enumerates.
for kind, stranger in (("bool", 7), ("int", 7.0), ("float", 7), ("str", b"a"), ("bytes", "a"), ("timestamp", 0)):
    DOMAINS[kind].append(stranger)

Predicate = tuple[str, str, Any]


def holds(predicate: Predicate, body: Mapping[str, Any]) -> bool:
    """The meaning of a predicate, said without sets."""
    attribute, operator, operand = predicate
    if attribute not in body:
        return False
    value = body[attribute]
    match operator:
        case "exists":
            return True
        case "in":
            return any(type(value) is type(each) and value == each for each in operand)
        case "range":
            return type(value) is type(operand[0]) and bool(operand[0] <= value <= operand[1])
        case _ if type(value) is not type(operand):
            return False
        case "prefix":
            return bool(value.startswith(operand))
        case "=":
            return bool(value == operand)
        case "!=":
            return bool(value != operand)
        case "<":
            return bool(value < operand)
        case "<=":
            return bool(value <= operand)
        case ">":
            return bool(value > operand)
        case ">=":
            return bool(value >= operand)
    raise AssertionError(operator)


def predicates(attribute: str, kind: str) -> st.SearchStrategy[Predicate]:
    operand = st.sampled_from(OPERANDS[kind])
    comparison = st.tuples(st.just(attribute), st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), operand)
    options = [
        comparison,
        comparison,
        st.tuples(st.just(attribute), st.just("in"), st.lists(operand, min_size=1, max_size=7)),
        st.tuples(st.just(attribute), st.just("range"), st.tuples(operand, operand).map(sorted).map(tuple)),
        st.tuples(st.just(attribute), st.just("exists"), st.none()),
    ]
    if kind in ("str", "bytes"):
        options.append(st.tuples(st.just(attribute), st.just("prefix"), operand))
    return st.one_of(options)


def conjunctions(kinds: Mapping[str, str]) -> st.SearchStrategy[list[Predicate]]:
    return st.lists(st.one_of([predicates(attribute, kind) for attribute, kind in kinds.items()]), max_size=4)


def build(conjunction: Iterable[Predicate]) -> Filter:
    built = Filter.everything()
    for attribute, operator, operand in conjunction:
        built = built.where(attribute, operator, operand)  # type: ignore[arg-type]
    return built


def bodies(kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    absent = object()
    choices = [[absent, *DOMAINS[kind]] for kind in kinds.values()]
    return [
        {name: value for name, value in zip(kinds, values, strict=True) if value is not absent}
        for values in itertools.product(*choices)
    ]


def where(*predicates: Predicate) -> Filter:
    return build(predicates)
