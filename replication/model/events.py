"""The event types of one replica set, and a write as an event.

`rs.NAME` is the set's log: durable, one entry per epoch or published batch; an event there is a write, or a `batch` of
writes that were committed at one replica before. Questions to replicas and their answers
travel as ordinary events of two more types, whose names are chosen so that the same broker is the rendezvous of all
three: a set depends on one broker and not on three.
"""

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from adapters.changes import (
    Change,
    Control,
    Member,
    Statement,
    decode_member,
    encode_member,
    pack_members,
    unpack_members,
)
from tops.core.overlay.topology import rendezvous_of
from tops.model.event_types import REQUESTS, RESPONSES, SETS_ROOT, EventType
from tops.model.ids import NodeId, TxId
from tops.protocol.messages import Event
from tops.protocol.set_types import BATCH, CONTROL, ORIGIN, set_definition

UNREADABLE = Statement("")  # stands for a write that is none
# What decoding raises. Every replica reads the same bytes and must come to the same end, so nothing here may escape.
UNREADABLE_ERRORS = (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError)
AT_MAX = 1 << 53  # milliseconds; sums with it stay far from the end of a bigint
_controls = msgspec.msgpack.Decoder(Control)


def log_type(replica_set: str) -> EventType:
    return set_definition(f"{SETS_ROOT}.{replica_set}")


@lru_cache(maxsize=256)
def _beside(name: str, suffix: str, brokers: tuple[str, ...]) -> str:
    members = tuple(NodeId(broker) for broker in brokers)
    home, number = rendezvous_of(members, name), 0
    while rendezvous_of(members, f"{name}.{suffix}{number}") != home:
        number += 1
    return f"{name}.{suffix}{number}"


def request_type(replica_set: str, brokers: Sequence[str]) -> EventType:
    """For the replica named in `to`."""
    return set_definition(_beside(f"{SETS_ROOT}.{replica_set}", REQUESTS, tuple(brokers)))


def response_type(replica_set: str, brokers: Sequence[str]) -> EventType:
    """For the client named in `to`."""
    return set_definition(_beside(f"{SETS_ROOT}.{replica_set}", RESPONSES, tuple(brokers)))


def write_body(member: Member, reads: bytes = b"") -> dict[str, object]:
    """One transaction's changes as the body of an event, stamped with the writer's clock: what all replicas measure
    the life of an idempotency key by. `reads`: what a serializable transaction has read."""
    body: dict[str, object] = {"at": now_ms(), "write": encode_member(member), "reads": reads}
    if member.origin:
        body[ORIGIN] = member.origin
    if member.control is not None:
        body[CONTROL] = msgspec.msgpack.encode(member.control)
    return body


def batch_body(members: Sequence[bytes]) -> dict[str, Any]:
    """Transactions that a replica has committed, encoded one by one, as the body of one event."""
    return {"at": now_ms(), "write": b"", "reads": b"", BATCH: pack_members(members)}


def member_in(event: Event) -> Member:
    """The write that an event carries. What its writer claims to be, or asks to be taken for, counts only as far as
    brokers have checked it: by the event's own attributes."""
    body = event.body
    try:
        member = decode_member(body["write"])
        control = _controls.decode(body[CONTROL]) if CONTROL in body else None
    except UNREADABLE_ERRORS:
        return Member(TxId(""), (UNREADABLE,))
    origin = body.get(ORIGIN, "")
    if member.origin != origin or member.control is not control:
        member = replace(member, origin=origin, control=control)
    return member


def member_of(tx: TxId, events: Sequence[Event]) -> Member:
    """The transaction that these events carry; several events of one transaction are its changes in order."""
    if len(events) == 1:
        return replace(member_in(events[0]), tx=tx)
    parts = [member_in(event) for event in events]
    changes: tuple[Change, ...] = tuple(change for part in parts for change in part.changes)
    first = parts[0] if parts else Member(tx, ())
    return Member(tx, changes, first.idempotency_key, first.key_ttl_s)


def logged_members(tx: TxId, events: Sequence[Event]) -> list[Member]:
    """The transactions of one local transaction that its writer gave to the log directly: they go by the log's id.
    Only agents' own, which are named in their databases as well, bring an id along."""
    members = [member_in(event) for event in events]
    return [member if member.control is not None and member.tx else replace(member, tx=tx) for member in members]


def batch_in(events: Sequence[Event]) -> list[Member]:
    """The transactions that a replica had committed before it published them, under the ids they have there; none if
    these events are writes, or if a batch can't be read: every replica then takes the events for writes alike, instead
    of stopping in front of the entry."""
    batches = [event.body[BATCH] for event in events if BATCH in event.body]
    try:
        return [member for batch in batches for member in map(decode_member, unpack_members(batch))]
    except UNREADABLE_ERRORS:
        return []


def at_ms(events: Sequence[Event]) -> int:
    """The latest of the writers' clocks, which their brokers keep near their own; what is no time does not count."""
    clocks = [event.body.get("at") for event in events]
    return max([at for at in clocks if type(at) is int and 0 <= at < AT_MAX], default=0)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
