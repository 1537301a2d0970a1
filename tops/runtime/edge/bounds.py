"""How long texts and lists in a message of a site may be.

What a broker keeps of a message, or writes to its journal, must not grow with what a site chooses freely: ids, names,
reasons, definitions, constraints. The bounds follow from the declared types of the fields, so that a new field has one.
Three kinds of fields have other bounds: the values that an application sends, which are limited by the message;
filters, which have a quota; and lists with a member per event or change.

In a frame of at most `TEXT_MAX` bytes nothing can exceed a bound, so short frames are not checked.
"""

import types
import typing
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import cache
from typing import Any, Final

import msgspec

from tops.model.errors import InvalidEvent
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.rejections import REJECTION_TEXT_MAX, Rejection
from tops.model.sizes import TEXT_MAX, encoded_bytes
from tops.protocol.messages import (
    AppliedIndexReported,
    EpochVoted,
    Event,
    EventsPublished,
    FollowLog,
    OneShot,
    PlannedStep,
    RecoverLog,
    RunOneShot,
    RunOneShots,
    SubscriptionChanged,
    TxSpec,
    TypeAdvertised,
)

MEMBERS_MAX: Final = 2048  # of a list, a set or a map
PART_BYTES_MAX: Final = 64 * 2**10  # of a part of a message that the broker keeps unchanged

# Values of an application: limited by the message.
VALUES: Final = frozenset(
    [
        (Event, "body"),
        (PlannedStep, "body"),
        (TxSpec, "attributes"),
        (EventsPublished, "bodies"),
        (EpochVoted, "results"),
        (EpochVoted, "rows"),
    ]
)
# Lists with a member per event, change or transaction of an application: limited by the message.
UNCOUNTED: Final = frozenset(
    [
        (RunOneShot, "events"),
        (OneShot, "events"),
        (RunOneShots, "transactions"),
        (AppliedIndexReported, "transactions"),
    ]
)
# Kept unchanged, for a long time: bounded as a whole.
PARTS: Final = frozenset(
    [
        (SubscriptionChanged, "definitions"),
        (FollowLog, "definitions"),
        (TypeAdvertised, "definitions"),
        (TypeAdvertised, "plans"),
        (TypeAdvertised, "members"),
        (TxSpec, "constraints"),
        (RecoverLog, "replicas"),
    ]
)
_UNBOUNDED: Final = frozenset([int, float, bool, type(None), Any, msgspec.Raw, Filter])

Check = Callable[[str, Any], None]  # raises InvalidEvent if this value of the named field exceeds its bound


def check_bounds(message: msgspec.Struct) -> None:
    """Raise InvalidEvent if a text or a list in a message of a site exceeds its bound."""
    check = check_of(type(message))
    if check is not None:
        check("", message)


@cache
def check_of(hint: Any) -> Check | None:
    """The check of the values of a declared type; None if they have no bound of their own."""
    if isinstance(hint, typing.NewType):
        return check_of(hint.__supertype__)
    if hint in _UNBOUNDED or (isinstance(hint, type) and issubclass(hint, Enum)):
        return None
    if hint is str or hint is bytes:
        return _text
    if hint is Rejection:
        return _rejection
    if hint is EventType:
        return _definition  # it has checked its names itself
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct(hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(parts)
    if origin in (tuple, frozenset):
        return _listed(check_of(parts[0]), counted=True)
    if origin is dict:
        return _mapped(check_of(parts[0]), check_of(parts[1]))
    raise TypeError(f"no bound is defined for {hint!r}: add it in tops.runtime.edge.bounds")


def _over(name: str, what: str, most: int) -> InvalidEvent:
    return InvalidEvent("a message", name, f"has {what}, over the limit of {most}: use a shorter one")


def _text(name: str, value: str | bytes) -> None:
    if len(value) > TEXT_MAX:
        raise _over(name, f"a length of {len(value)}", TEXT_MAX)


def _rejection(name: str, value: Rejection) -> None:
    if value.text_length > REJECTION_TEXT_MAX:
        raise _over(name, f"texts of {value.text_length} characters together", REJECTION_TEXT_MAX)


def _definition(name: str, value: EventType) -> None:
    if len(value.attributes) > MEMBERS_MAX:
        raise _over(name, f"{len(value.attributes)} attributes", MEMBERS_MAX)


def _count(name: str, value: Collection[object]) -> None:
    if len(value) > MEMBERS_MAX:
        raise _over(name, f"{len(value)} members", MEMBERS_MAX)


def _part(name: str, value: object) -> None:
    if value and (size := encoded_bytes(value)) > PART_BYTES_MAX:
        raise _over(name, f"{size} bytes", PART_BYTES_MAX)


def _listed(of_member: Check | None, *, counted: bool) -> Check | None:
    if of_member is None:
        return _count if counted else None

    def check(name: str, value: Collection[Any]) -> None:
        if counted:
            _count(name, value)
        for member in value:
            of_member(name, member)

    return check


def _mapped(of_key: Check | None, of_value: Check | None) -> Check:
    keys, values = _listed(of_key, counted=True), _listed(of_value, counted=False)

    def check(name: str, value: Mapping[Any, Any]) -> None:
        assert keys is not None
        keys(name, value)
        if values is not None:
            values(name, value.values())

    return check


def _union(parts: tuple[Any, ...]) -> Check | None:
    """The types of the values distinguish the members of a union."""
    checks = {_type_of(part): of_part for part in parts if (of_part := check_of(part)) is not None}
    if not checks:
        return None

    def check(name: str, value: Any) -> None:
        found = checks.get(type(value))
        if found is not None:
            found(name, value)

    return check


def _type_of(hint: Any) -> Any:
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    return typing.get_origin(hint) or hint


def _struct(kind: type[msgspec.Struct]) -> Check | None:
    hints = typing.get_type_hints(kind)
    fields = [(name, _field(kind, name, hints[name])) for name in kind.__struct_fields__]
    checks = [(name, of_field) for name, of_field in fields if of_field is not None]
    if not checks:
        return None

    def check(name: str, value: msgspec.Struct) -> None:
        for field, of_field in checks:
            of_field(field, getattr(value, field))

    return check


def _field(kind: type[msgspec.Struct], name: str, hint: Any) -> Check | None:
    field = (kind, name)
    if field in VALUES:
        return None
    if field in PARTS:
        return _part
    if field in UNCOUNTED:
        return _listed(check_of(typing.get_args(hint)[0]), counted=False)
    return check_of(hint)
