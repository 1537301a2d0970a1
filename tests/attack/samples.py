"""A message of every kind, built from its declared fields, that names what a test wants it to name."""

import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from adapters.changes import Member
from replication.model.events import write_body
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId, Pseudonym, TxId
from tops.model.routing import RouteKey, client_id, route_key
from tops.model.transactions import ScopeLimit, TxType
from tops.protocol.messages import Address, Definitions, EpochId, Event, Origin, TxSpec
from tops.protocol.set_types import set_definition

SCALARS: dict[Any, Any] = {int: 1, float: 1.0, bool: False, bytes: b"x"}


@dataclass(frozen=True)
class Named:
    """What the message is about: a set's log, a transaction, and under whose name."""

    log: str
    node: str  # who votes, follows or begins, as the message says
    incarnation: int
    broker: str

    @property
    def tx(self) -> TxId:
        return TxId(f"{self.node}.{self.incarnation}.1")


def sample(kind: type[msgspec.Struct], named: Named) -> Any:
    """A message (or a value inside one) of this kind."""
    hints = typing.get_type_hints(kind)
    given = {f.name: value(hints[f.name], f.name, named) for f in msgspec.structs.fields(kind) if f.required}
    return kind(**given)


def value(hint: Any, field: str, named: Named) -> Any:
    fixed: dict[Any, Any] = {
        TxId: named.tx,
        NodeId: NodeId(named.broker),
        Pseudonym: Pseudonym("p"),
        RouteKey: route_key(client_id(NodeId(named.node), named.incarnation), 1),
        Definitions: (set_definition(named.log),),
        EventType: set_definition(named.log),
        TxSpec: TxSpec(named.log, TxType.LOCAL, limit=ScopeLimit.LOCAL, census=None),
        Event: Event(named.log, write_body(Member(TxId(""), ()))),
        Address: Address(NodeId(named.broker)),
        Filter: Filter(),
        Origin: Origin(named.log, 1),
        EpochId: EpochId(named.log, 1, 1, NodeId(named.broker), 1),
        msgspec.Raw: msgspec.Raw(msgspec.msgpack.encode(write_body(Member(TxId(""), ())))),
        **SCALARS,
    }
    if hint in fixed:
        return fixed[hint]
    if hint is str:
        return {"event_type": named.log, "voter": named.node, "name": named.node, "start": "now"}.get(field, "x")
    return _composed(hint, field, named)


def _composed(hint: Any, field: str, named: Named) -> Any:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # A filter that is left out ends a subscription, which needs no right.
        return (
            value(Filter, field, named)
            if Filter in parts
            else None
            if type(None) in parts
            else value(parts[0], field, named)
        )
    if origin is tuple:
        return tuple(value(part, field, named) for part in parts if part is not Ellipsis)
    if origin in (dict, frozenset):
        return origin()
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    return sample(hint, named)
