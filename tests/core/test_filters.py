"""Filters: matching, and overlap and covering checked against brute force over every kind."""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.filter_cases import OPERANDS, START, TINY, Predicate, bodies, build, conjunctions, holds, where
from tops.model.errors import InvalidFilter
from tops.model.event_types import EventType
from tops.model.filters import Filter


def check_against_brute_force(kinds: Mapping[str, str], first: list[Predicate], second: list[Predicate]) -> None:
    one, other = build(first), build(second)
    matched = [
        (all(holds(predicate, body) for predicate in first), all(holds(predicate, body) for predicate in second))
        for body in bodies(kinds)
    ]

    assert [(one.matches(body), other.matches(body)) for body in bodies(kinds)] == matched
    assert one.overlaps(other) == other.overlaps(one) == any(a and b for a, b in matched)
    assert one.covers(other) == all(a for a, b in matched if b)
    assert other.covers(one) == all(b for a, b in matched if a)
    assert one.satisfiable == any(a for a, _ in matched)
    if all(a == b for a, b in matched):
        assert one == other
        assert hash(one) == hash(other)
    assert (one & other) == build([*second, *first])


@pytest.mark.parametrize("kind", OPERANDS)
@given(data=st.data())
def test_overlaps_and_covers_agree_with_brute_force_on_one_attribute(kind: str, data: st.DataObject) -> None:
    kinds = {"x": kind}

    first, second = data.draw(conjunctions(kinds)), data.draw(conjunctions(kinds))

    check_against_brute_force(kinds, first, second)


@given(data=st.data())
def test_overlaps_and_covers_agree_with_brute_force_on_several_attributes(data: st.DataObject) -> None:
    kinds = {"flag": "bool", "count": "int", "at": "timestamp"}

    first, second = data.draw(conjunctions(kinds)), data.draw(conjunctions(kinds))

    check_against_brute_force(kinds, first, second)


@pytest.mark.parametrize(
    ("low", "high", "between"),
    [
        (1, 2, False),
        (1, 3, True),
        (1.0, math.nextafter(1.0, 2.0), False),
        (1.0, 2.0, True),
        (-TINY, 0.0, False),
        ("a", "a\0", False),
        ("a", "aa", True),  # "a\0" lies between
        ("a", "b", True),
        (b"a", b"a\0", False),
        (False, True, False),
        (START, START + timedelta(microseconds=1), False),
        (START, START + timedelta(microseconds=2), True),
    ],
)
def test_there_is_something_strictly_between_two_values_only_where_the_kind_has_a_value_there(
    low: Any, high: Any, between: bool
) -> None:
    assert where(("x", ">", low)).overlaps(where(("x", "<", high))) == between
    assert where(("x", ">", low), ("x", "<", high)).satisfiable == between


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (where(("x", ">", 10)), where(("x", ">=", 11))),
        (where(("x", "in", [3, 1, 2])), where(("x", "range", (1, 3)))),
        (where(("x", "!=", True)), where(("x", "=", False))),
        (where(("x", "prefix", "ab")), where(("x", ">=", "ab"), ("x", "<", "ac"))),
        (where(("x", "prefix", "a"), ("x", "prefix", "ab")), where(("x", "prefix", "ab"))),
        (where(("x", "=", 1), ("y", "=", 2)), where(("y", "=", 2), ("x", "=", 1))),
        (where(("x", "exists", None), ("x", "=", 1)), where(("x", "=", 1))),
        (where(("x", "=", -0.0)), where(("x", "=", 0.0))),
        (where(("x", ">", 2**63 - 1)), Filter.nothing()),
        (where(("x", "!=", True), ("x", "!=", False)), where(("y", "<", ""))),
        (where(("x", "=", START.astimezone(timezone(timedelta(hours=5))))), where(("x", "=", START))),
    ],
)
def test_filters_of_the_same_meaning_are_equal_and_encode_to_the_same_bytes(one: Filter, other: Filter) -> None:
    assert one == other
    assert hash(one) == hash(other)
    assert msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)


@given(data=st.data())
def test_a_filter_survives_the_wire(data: st.DataObject) -> None:
    kinds = {kind: kind for kind in OPERANDS}
    sent = build(data.draw(conjunctions(kinds)))

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Filter) == sent


@pytest.mark.parametrize(
    "raw",
    [
        [[["x", ["int", [[1, 1]]]]], True],  # empty interval
        [[["x", ["int", [[1, 3], [3, 5]]]]], True],  # touching
        [[["x", ["int", [[5, 6], [1, 2]]]]], True],  # out of order
        [[["x", ["int", [[1, None], [5, 6]]]]], True],  # after the end
        [[["x", ["int", [["a", "b"]]]]], True],  # wrong kind
        [[["x", ["int", [[[], None]]]]], True],  # unhashable
        [[["x", ["int", []]]], True],  # nothing allowed, yet satisfiable
        [[["x", ["float", [[math.nan, None]]]]], True],
        [[["x", ["structure", [[1, 2]]]]], True],
        [[["x", None], ["x", None]], True],
        [[["y", None], ["x", None]], True],
        [[["x", None]], False],
        [[["", None]], True],
    ],
)
def test_a_filter_that_is_not_canonical_is_a_decoding_error(raw: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=Filter)


@pytest.mark.parametrize(
    ("operator", "operand", "problem"),
    [
        ("=", None, "NoneType"),
        ("=", [1], "can't compare with a list"),
        ("=", math.nan, "NaN"),
        ("<", 2**63, "64 bits"),
        ("=", "\ud800", "surrogate"),
        ("=", datetime(2024, 1, 1), "without a time zone"),
        ("<", datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), "outside the years"),
        ("in", [1, 1.0], "one kind"),
        ("in", [1, True], "one kind"),
        ("in", [], "at least one"),
        ("in", "abc", "list, tuple or set"),
        ("range", (2, 1), "above the high end"),
        ("range", (1, 2.0), "one kind"),
        ("range", 1, "pair"),
        ("prefix", 1, "str or bytes"),
        ("exists", 1, "no operand"),
        ("~", "a.*", "no such operator"),
    ],
)
def test_a_predicate_that_makes_no_sense_is_refused_by_the_name_of_its_attribute(
    operator: Any, operand: object, problem: str
) -> None:
    with pytest.raises(InvalidFilter, match=problem) as rejection:
        Filter.where("total", operator, operand)

    assert "'total'" in str(rejection.value)


def test_operands_of_two_kinds_on_one_attribute_are_refused() -> None:
    with pytest.raises(InvalidFilter, match="'total' compares it with int and float"):
        Filter.where("total", ">", 1).where("total", "<", 2.0)


def test_a_value_of_another_kind_never_matches() -> None:
    assert not Filter.where("total", ">", 1).matches({"total": 2.0})
    assert not Filter.where("total", "<", 2.0).matches({"total": math.nan})
    assert not Filter.where("at", "<", START).matches({"at": datetime(2000, 1, 1)})
    assert not Filter.where("flag", "=", 1).matches({"flag": True})


def test_a_filter_must_fit_the_type_it_is_placed_on() -> None:
    orders = EventType("orders", {"total": int, "rows": list})

    Filter.where("total", ">", 1).where("rows", "exists").check_against(orders)
    with pytest.raises(InvalidFilter, match="'totl' is unknown; the type has 'total', 'rows'"):
        Filter.where("totl", ">", 1).check_against(orders)
    with pytest.raises(InvalidFilter, match="'total' is int, but compared with str"):
        Filter.where("total", "=", "1").check_against(orders)
    with pytest.raises(InvalidFilter, match="'rows' is a structure"):
        Filter.where("rows", "=", "x").check_against(orders)


def test_a_filter_reads_as_a_condition() -> None:
    narrowed = Filter.where("total", ">=", 10).where("name", "!=", "x").where("id", "in", [1, 5]).where("z", "exists")

    assert str(narrowed) == "(id = 1 or id = 5) and name != 'x' and total >= 10 and z exists"
    assert str(Filter.everything()) == "everything"
    assert str(Filter.nothing()) == "nothing"
