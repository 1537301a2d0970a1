"""The event types of replica sets. Every name below `rs.` has one definition, which follows from the name alone.

So no site can define a set's log or its requests before the set's replicas do, or add a child type whose events would
get into the set's log. What each part is, by its name, is `tops.model.event_types.SetPart`.
"""

from collections.abc import Mapping
from functools import lru_cache

from tops.model.errors import InvalidEventType
from tops.model.event_types import SETS_ROOT, EventType, SetPart, set_part
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.protocol.messages import Definitions

AT = "at"  # attribute of a log's event: the writer's clock in ms since 1970; brokers keep it near their own

# Attributes of a log's event that a client may not set.
BATCH = "batch"  # transactions that a replica has committed before it published them
ORIGIN = "origin"  # the replica that has executed the write and captured its rows
CONTROL = "control"  # a barrier, a repair or housekeeping
MARKS = frozenset([BATCH, ORIGIN, CONTROL])
_PLAIN = int, bytes, bytes


@lru_cache(maxsize=1024)
def set_definition(name: str) -> EventType:
    """The definition of a replica set's event type; InvalidEventType if no type of a set has this name."""
    match set_part(name):
        case SetPart.LOG:
            attributes = {AT: int, "write": bytes, "reads": bytes, BATCH: bytes, ORIGIN: str, CONTROL: bytes}
            return EventType(name, attributes, durable=True, optional=[BATCH, ORIGIN, CONTROL])
        case SetPart.REQUESTS | SetPart.RESPONSES:
            return EventType(name, {"to": str, "body": bytes}, discloses_sender=True)
    raise InvalidEventType(f"{name!r} is no event type of a replica set; other names must not begin with {SETS_ROOT!r}")


def is_plain_write(body: Mapping[str, object]) -> bool:
    """Whether the body fits a set's log and has no attribute that needs a right: a fast test for the common case. The
    clock may still be any number."""
    kinds = type(body.get(AT)), type(body.get("write")), type(body.get("reads"))
    return len(body) == len(_PLAIN) and kinds == _PLAIN


def check_definitions(definitions: Definitions) -> None:
    """Raise InvalidEventType if these define a name below `rs.` in another way, or relate it to another type."""
    for definition in definitions:
        if definition.name.partition(".")[0] != SETS_ROOT:
            continue
        if definition != set_definition(definition.name):
            raise InvalidEventType(f"event type {definition.name!r} of a replica set has another definition")
        if len(definitions) > 1:
            raise InvalidEventType(f"event type {definition.name!r} of a replica set has neither parents nor children")


def requests_filter(node: NodeId) -> Filter:
    """Which requests a replica receives: those to itself, and those to all replicas."""
    return Filter.where("to", "in", [node, "*"])


def responses_filter(node: NodeId) -> Filter:
    """Which responses a client receives: its own."""
    return Filter.where("to", "=", node)
