"""Event types: what fits, what is refused and by which name, and inheritance."""

import math
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from typing import Any

import msgspec
import pytest

from tops.model.errors import InvalidEvent, InvalidEventType
from tops.model.event_types import AttributeKind, EventType, EventTypes


class Colour(StrEnum):
    RED = "red"


EVERY_KIND = EventType(
    "everything",
    {
        "flag": bool,
        "count": int,
        "ratio": float,
        "text": str,
        "blob": bytes,
        "at": datetime,
        "rows": list,
        "row": AttributeKind.STRUCTURE,
    },
)
GOOD: dict[str, Any] = {
    "flag": True,
    "count": -(2**63),
    "ratio": math.inf,
    "text": "grün\0",
    "blob": b"\xff\0",
    "at": datetime(2024, 2, 29, 23, 59, 59, 999999, tzinfo=UTC),
    "rows": [{"id": 1, "price": 2.5, "note": None}, [b"x", datetime(1, 1, 1, tzinfo=UTC)]],
    "row": {},
}


def test_a_body_of_every_kind_fits_and_survives_an_untyped_wire_unchanged() -> None:
    EVERY_KIND.check(GOOD)

    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD))

    EVERY_KIND.check(arrived)
    assert arrived == GOOD
    assert {name: type(value) for name, value in arrived.items()} == {n: type(v) for n, v in GOOD.items()}


@pytest.mark.parametrize(
    ("attribute", "value", "problem"),
    [
        ("flag", 1, "is a int, not a bool"),
        ("count", True, "is a bool, not a int"),
        ("count", 1.0, "is a float"),
        ("count", 2**63, "64 bits"),
        ("count", -(2**63) - 1, "64 bits"),
        ("count", None, "is a NoneType"),
        ("ratio", 1, "is a int, not a float"),
        ("ratio", math.nan, "is NaN"),
        ("text", b"x", "is a bytes"),
        ("text", "\ud800", "surrogate"),
        ("text", Colour.RED, "is a Colour"),
        ("blob", "x", "is a str"),
        ("blob", bytearray(b"x"), "is a bytearray"),
        ("at", datetime(2024, 1, 1), "not in UTC"),
        ("at", datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1))), "not in UTC"),
        ("rows", (1, 2), "is a tuple"),
        ("rows", [Decimal(1)], "contains a Decimal"),
        ("rows", [[math.nan]], "is NaN"),
        ("rows", [2**64], "64 bits"),
        ("row", {1: 2}, "key"),
        ("row", {"\udfff": 2}, "key"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_the_name_of_its_attribute(
    attribute: str, value: object, problem: str
) -> None:
    with pytest.raises(InvalidEvent, match=problem) as rejection:
        EVERY_KIND.check({**GOOD, attribute: value})

    assert (rejection.value.event_type, rejection.value.attribute) == ("everything", attribute)


def test_a_structure_that_contains_itself_is_refused_instead_of_followed_for_ever() -> None:
    circle: list[object] = []
    circle.append(circle)

    with pytest.raises(InvalidEvent, match="nested deeper"):
        EVERY_KIND.check({**GOOD, "rows": circle})


def test_an_unknown_attribute_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(InvalidEvent, match="'totl' is unknown; the type has 'id', 'total'"):
        EventType("orders", {"id": int, "total": int}).check({"id": 1, "totl": 2})


def test_only_an_optional_attribute_may_be_absent() -> None:
    orders = EventType("orders", {"id": int, "note": str}, optional=["note"])

    orders.check({"id": 1})
    with pytest.raises(InvalidEvent, match="'id' is missing"):
        orders.check({"note": "x"})


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\0", "\x7f", "\x85", "\ud800", 7, None])
def test_a_name_that_could_confuse_a_log_or_a_wire_is_refused(name: Any) -> None:
    with pytest.raises(InvalidEventType):
        EventType(name)
    with pytest.raises(InvalidEventType):
        EventType("orders", {name: int})


@pytest.mark.parametrize("name", ["x", "x" * 200, "aufträge.neu", "orders 2024", "命令"])
def test_a_printable_name_of_up_to_200_characters_is_taken(name: str) -> None:
    assert EventType(name, {name: int}).name == name


@pytest.mark.parametrize("declared", [Decimal, object, "int", 3, None])
def test_a_type_that_the_wire_would_change_can_not_be_declared(declared: Any) -> None:
    with pytest.raises(InvalidEventType, match="'total' is declared as"):
        EventType("orders", {"total": declared})


def test_an_optional_attribute_must_be_an_attribute() -> None:
    with pytest.raises(InvalidEventType, match="'note'"):
        EventType("orders", {"id": int}, optional=("note",))


def test_a_definition_is_equal_to_itself_after_the_wire_and_has_the_same_hash() -> None:
    orders = EventType("orders", {"id": int, "a": str, "b": str}, parent="base", durable=True, optional={"b", "a"})

    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(orders), type=EventType)

    assert arrived == orders
    assert hash(arrived) == hash(orders)
    assert arrived.kind_of("id") is AttributeKind.INT


def test_later_changes_to_the_mapping_given_do_not_reach_the_type() -> None:
    attributes = {"id": int}
    orders = EventType("orders", attributes)

    attributes["total"] = int

    assert orders == EventType("orders", {"id": int})


def test_defining_the_same_again_changes_nothing_and_differing_is_refused_without_a_trace() -> None:
    types = EventTypes()
    first = types.define(EventType("orders", {"id": int}))

    assert types.define(EventType("orders", {"id": int})) == first
    with pytest.raises(InvalidEventType, match="already defined differently"):
        types.define(EventType("orders", {"id": str}))
    assert types.whole("orders") == first


def test_a_child_has_its_ancestors_attributes_and_its_lineage_goes_up_to_the_root() -> None:
    types = EventTypes()
    types.define(EventType("base", {"id": int, "note": str}, optional=["note"], durable=True))
    types.define(EventType("orders", {"total": int}, parent="base"))

    large = types.define(EventType("large-orders", {"limit": int, "note": str}, parent="orders"))

    assert large.attributes.keys() == {"id", "note", "total", "limit"}
    assert large.optional == ()  # the child made the note required
    assert large.durable
    assert types.lineage("large-orders") == ("large-orders", "orders", "base")
    assert types.lineage("base") == ("base",)
    large.check({"id": 1, "note": "", "total": 2, "limit": 3})
    with pytest.raises(InvalidEvent, match="'id' is missing"):
        large.check({"note": "", "total": 2, "limit": 3})


@pytest.mark.parametrize(
    ("child", "problem"),
    [
        (EventType("child", {"id": str}, parent="base"), "'id' has another kind"),
        (EventType("child", {"id": int}, parent="base", optional=["id"]), "'id' is required in 'base'"),
        (EventType("child", parent="nobody"), "parent 'nobody' is unknown"),
        (EventType("child", parent="child"), "its own parent"),
    ],
)
def test_a_child_that_contradicts_its_lineage_is_refused_and_stays_unknown(child: EventType, problem: str) -> None:
    types = EventTypes()
    types.define(EventType("base", {"id": int}))

    with pytest.raises(InvalidEventType, match=problem):
        types.define(child)

    assert "child" not in types
    with pytest.raises(InvalidEventType, match="not defined here"):
        types.lineage("child")
