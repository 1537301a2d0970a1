"""Typed events: what an event type declares, whether an event fits it, and which types descend from which.

Owns the kinds of values an event may carry and the registry of types. Which events a subscriber wants is the business
of `tops.model.filters`; who may publish a type and where it is routed is decided elsewhere.
"""

import unicodedata
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tops.model.errors import InvalidEvent, InvalidEventType
from tops.model.routing import RENDEZVOUS, ROUTINGS, TREE

NAME_LENGTH_MAX: Final = 200
NESTING_MAX: Final = 64
INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
SETS_ROOT: Final = "rs"
REQUESTS: Final = "request"
RESPONSES: Final = "response"


class AttributeKind(Enum):
    """The kinds of values that cross a msgpack wire and arrive as exactly what was sent, without a schema.

    Decimals and UUIDs arrive as text, so they are no kinds: send a decimal as `str` or as an `int` of its smallest
    unit, a UUID as `bytes` or `str`. A kind takes the named Python type itself, no subclass: a `bool` is no `int`, an
    `int` is no `float`, and an enum member is not the `str` it derives from.
    """

    BOOL = "bool"
    INT = "int"  # signed, 64 bits
    FLOAT = "float"  # 64 bits; infinities are values, NaN is not
    STR = "str"  # Unicode without lone surrogates; ordered by code point
    BYTES = "bytes"
    TIMESTAMP = "timestamp"  # a `datetime` in UTC, to the microsecond
    STRUCTURE = "structure"  # `list`s and `dict`s with `str` keys of the others and None; can't be filtered by value


BYTES: Final = AttributeKind.BYTES  # read with every event; access through its class is slow
INT: Final = AttributeKind.INT

PYTHON_TYPES: Final[Mapping[AttributeKind, type[Any]]] = {
    AttributeKind.BOOL: bool,
    AttributeKind.INT: int,
    AttributeKind.FLOAT: float,
    AttributeKind.STR: str,
    AttributeKind.BYTES: bytes,
    AttributeKind.TIMESTAMP: datetime,
}
KINDS: Final[Mapping[type[Any], AttributeKind]] = {
    **{python_type: kind for kind, python_type in PYTHON_TYPES.items()},
    dict: AttributeKind.STRUCTURE,
    list: AttributeKind.STRUCTURE,
}

# On the wire and in memory a kind is an AttributeKind; only the constructor also takes the Python type.
if TYPE_CHECKING:
    type_or_kind = AttributeKind | type[Any]
else:
    type_or_kind = AttributeKind


def problem_with_name(name: object) -> str | None:
    """Why `name` can't name an event type or an attribute; None if it can."""
    if type(name) is not str:
        return f"is a {type(name).__name__}, not a str"
    if not 1 <= len(name) <= NAME_LENGTH_MAX:
        return f"has {len(name)} characters; 1 to {NAME_LENGTH_MAX} are allowed"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return "contains a control character or a lone surrogate"
    return None


def problem_with_value(value: object, kind: AttributeKind) -> str | None:
    """Why `value` is not of `kind`; None if it is. Reads as the end of a sentence that starts with the attribute."""
    if KINDS.get(type(value)) is not kind:
        wanted = "list or a dict" if kind is AttributeKind.STRUCTURE else PYTHON_TYPES[kind].__name__
        return f"is a {type(value).__name__}, not a {wanted}"
    match value:
        case bytes():
            return None
        case int():
            return None if INT_MIN <= value <= INT_MAX else "is an int that does not fit into 64 bits"
        case str():
            return None if value.isascii() or _is_unicode(value) else "contains a lone surrogate"
        case float():
            return "is NaN, which equals nothing and can't be ordered" if value != value else None
        case datetime() if value.tzinfo != UTC:
            return "is a datetime that is not in UTC: use .astimezone(datetime.UTC)"
        case list() | dict():
            return _problem_with_structure(value, NESTING_MAX)
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _problem_with_structure(value: object, levels_left: int) -> str | None:
    if value is None:
        return None
    if type(value) not in (list, dict):
        kind = KINDS.get(type(value))
        if kind is None:
            return f"contains a {type(value).__name__}, which can't be sent"
        problem = problem_with_value(value, kind)
        return problem and f"contains a value that {problem}"
    if levels_left == 0:
        return f"is nested deeper than {NESTING_MAX} levels"
    members: list[object] = []
    if isinstance(value, dict):
        if any(type(key) is not str or not _is_unicode(key) for key in value):
            return "contains a dict with a key that is not a sendable str"
        members.extend(value.values())
    elif isinstance(value, list):
        members = value
    return next((problem for member in members if (problem := _problem_with_structure(member, levels_left - 1))), None)


class SetPart(Enum):
    """The part of a type in a replica set. Names below `rs.` belong to replica sets; the name alone decides, so that no
    definition can contradict it."""

    NONE = "none"
    LOG = "log"  # rs.SET: only the set's replicas vote in it and publish single events to it
    REQUESTS = "requests"  # rs.SET.request…: from clients to replicas
    RESPONSES = "responses"  # rs.SET.response…: from replicas to clients


def set_part(name: str) -> SetPart:
    root, _, rest = name.partition(".")
    if root != SETS_ROOT or not rest:
        return SetPart.NONE
    _, inner, part = rest.partition(".")
    if not inner:
        return SetPart.LOG
    if part.startswith(REQUESTS):
        return SetPart.REQUESTS
    return SetPart.RESPONSES if part.startswith(RESPONSES) else SetPart.NONE


@lru_cache(maxsize=4096)
def set_of_log(family: str) -> str:
    """The replica set whose log a family of event types is, or nothing."""
    return family.partition(".")[2] if set_part(family) is SetPart.LOG else ""


class EventType(msgspec.Struct, frozen=True, eq=True, array_like=True):
    """The structure of the events of one name.

    `attributes` takes Python types or kinds, `EventType("orders", {"id": int, "total": int})`, and holds kinds. An
    attribute that is listed in `optional` may be absent; None is never a value. With a `parent`, the attributes here
    are those that the child adds: `EventTypes` puts both together. Events of a `durable` type are kept in a log.

    With `discloses_sender` events name their publisher to subscribers; otherwise publishers are anonymous to them.
    """

    name: str
    attributes: Mapping[str, type_or_kind] = {}
    parent: str | None = None
    durable: bool = False
    optional: Collection[str] = ()
    discloses_sender: bool = False
    routing: str = RENDEZVOUS  # or TREE: along advertisements, and with transactions over subscriptions

    def __post_init__(self) -> None:
        if problem := problem_with_name(self.name):
            raise InvalidEventType(f"event type {self.name!r}: the name {problem}")
        if self.parent is not None and (problem := problem_with_name(self.parent)):
            raise InvalidEventType(f"event type {self.name!r}: the parent's name {problem}")
        self._check_routing()
        kinds = {attribute: self._kind(attribute, given) for attribute, given in self.attributes.items()}
        msgspec.structs.force_setattr(self, "attributes", kinds)
        for attribute in self.optional:
            if attribute not in kinds:
                raise InvalidEventType(f"event type {self.name!r}: optional {attribute!r} is not among the attributes")
        # Sorted: equal types are equal values, and the same bytes on the wire in every process.
        msgspec.structs.force_setattr(self, "optional", tuple(sorted(set(self.optional))))

    def _check_routing(self) -> None:
        if self.routing not in ROUTINGS:
            raise InvalidEventType(f"event type {self.name!r}: routing is {self.routing!r}; use one of {ROUTINGS}")
        if self.routing == TREE and (self.parent is not None or self.durable or self.discloses_sender):
            raise InvalidEventType(
                f"event type {self.name!r}: a type with routing {TREE!r} has no parent, is not durable and does not "
                "disclose senders"
            )
        if self.routing == TREE and set_part(self.name) is not SetPart.NONE:
            raise InvalidEventType(f"event type {self.name!r}: types of replica sets are not routed along the tree")

    def _kind(self, attribute: str, given: type_or_kind) -> AttributeKind:
        if problem := problem_with_name(attribute):
            raise InvalidEventType(f"event type {self.name!r}: the name of attribute {attribute!r} {problem}")
        if isinstance(given, AttributeKind):
            return given
        kind = KINDS.get(given) if isinstance(given, type) else None
        if kind is None:
            allowed = ", ".join(python_type.__name__ for python_type in KINDS)
            raise InvalidEventType(
                f"event type {self.name!r}: attribute {attribute!r} is declared as {given!r}; use one of {allowed}"
            )
        return kind

    def __hash__(self) -> int:
        own = (self.name, frozenset(self.attributes.items()), self.parent, self.durable, self.routing)
        return hash((*own, *self.optional))

    def kind_of(self, attribute: str) -> AttributeKind | None:
        """The kind of an attribute, None if the type has no such attribute."""
        kind = self.attributes.get(attribute)
        return kind if isinstance(kind, AttributeKind) else None

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise InvalidEvent for a body that does not fit; the error names the attribute and its problem."""
        kinds = self.attributes
        for attribute, value in body.items():
            kind = kinds.get(attribute)
            # The values of replicated writes, without a call for each.
            if kind is BYTES and type(value) is bytes:
                continue
            if kind is INT and type(value) is int and INT_MIN <= value <= INT_MAX:
                continue
            if not isinstance(kind, AttributeKind):
                raise InvalidEvent(self.name, attribute, f"is unknown; the type has {self._attribute_list()}")
            if problem := problem_with_value(value, kind):
                raise InvalidEvent(self.name, attribute, problem)
        if len(body) < len(kinds):
            for attribute in kinds:
                if attribute not in body and attribute not in self.optional:
                    raise InvalidEvent(self.name, attribute, "is missing and not optional")

    def _attribute_list(self) -> str:
        return ", ".join(map(repr, self.attributes)) or "no attributes"


class EventTypes:
    """The event types that one node knows, each with what it inherits.

    The first definition of a name is final: events that are sent and filters that are in use rely on it.
    """

    def __init__(self) -> None:
        self._defined: dict[str, EventType] = {}
        self._whole: dict[str, EventType] = {}
        self._lineages: dict[str, tuple[str, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._defined

    def define(self, event_type: EventType) -> EventType:
        """Add a definition; returns the type with its ancestors' attributes. To define the same again is no error."""
        known = self._defined.get(event_type.name)
        if known is None:
            self._whole[event_type.name] = self._with_inherited(event_type)
            self._defined[event_type.name] = event_type
        elif known != event_type:
            raise InvalidEventType(
                f"event type {event_type.name!r} is already defined differently ({_difference(known, event_type)}); "
                "use another name"
            )
        return self._whole[event_type.name]

    def whole(self, name: str) -> EventType:
        """The type with all that it inherits: what events are checked against."""
        try:
            return self._whole[name]
        except KeyError:
            raise InvalidEventType(f"event type {name!r} is not defined here: define or advertise it first") from None

    def whole_if_known(self, name: str) -> EventType | None:
        return self._whole.get(name)

    def definitions(self, name: str) -> tuple[EventType, ...]:
        """What another node needs to define the type: its ancestors' definitions, the oldest first, then its own."""
        return tuple(self._defined[ancestor] for ancestor in reversed(self.lineage(name)))

    def define_all(self, definitions: tuple[EventType, ...]) -> EventType:
        """Define a type and its ancestors, as `definitions` returned them."""
        for definition in definitions:
            self.define(definition)
        return self._whole[definitions[-1].name]

    def family(self, name: str) -> str:
        """The oldest ancestor's name: a family shares one rendezvous and, if it is durable, one log."""
        return self.lineage(name)[-1]

    def lineage(self, name: str) -> tuple[str, ...]:
        """The type's own name, its parent's, and so on up: the types whose subscribers receive its events."""
        known = self._lineages.get(name)
        if known is None:
            parent = self.whole(name).parent
            known = self._lineages[name] = (name,) if parent is None else (name, *self.lineage(parent))
        return known

    def lineage_as_known(self, name: str) -> tuple[str, ...]:
        """The lineage as far as this node knows it: for an unknown type, its name alone."""
        return self._lineages.get(name) or (self.lineage(name) if name in self._defined else (name,))

    def _with_inherited(self, child: EventType) -> EventType:
        if child.parent is None:
            return child
        # A parent must be defined before its child and no definition changes, so this is the only cycle there can be.
        if child.parent == child.name:
            raise InvalidEventType(f"event type {child.name!r} is its own parent")
        parent = self._whole.get(child.parent)
        if parent is None:
            raise InvalidEventType(f"event type {child.name!r}: parent {child.parent!r} is unknown; define it first")
        if parent.routing == TREE:
            raise InvalidEventType(f"event type {child.name!r}: parent {child.parent!r} is routed along the tree")
        for attribute in child.attributes.keys() & parent.attributes.keys():
            if child.attributes[attribute] is not parent.attributes[attribute]:
                raise InvalidEventType(
                    f"event type {child.name!r}: attribute {attribute!r} has another kind than in {parent.name!r}"
                )
            if attribute in child.optional and attribute not in parent.optional:
                raise InvalidEventType(
                    f"event type {child.name!r}: attribute {attribute!r} is required in {parent.name!r}, not optional"
                )
        return EventType(
            child.name,
            {**parent.attributes, **child.attributes},
            parent=child.parent,
            # A durable subscription to the parent must not miss the child's events.
            durable=child.durable or parent.durable,
            optional=[*(name for name in parent.optional if name not in child.attributes), *child.optional],
            discloses_sender=child.discloses_sender or parent.discloses_sender,
        )


def _difference(known: EventType, other: EventType) -> str:
    fields = [field for field in known.__struct_fields__ if getattr(known, field) != getattr(other, field)]
    return "differing: " + ", ".join(fields)
