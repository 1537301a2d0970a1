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

from msgspec.structs import replace

from tops.changes import Change, Member, decode_member, encode_member, pack_members, unpack_members
from tops.core.routing import rendezvous_of
from tops.event_types import REQUESTS, RESPONSES, SETS_ROOT, EventType
from tops.ids import NodeId, TxId
from tops.messages import Event


def log_type(replica_set: str) -> EventType:
    attributes = {"at": int, "write": bytes, "reads": bytes, "batch": bytes}
    return EventType(f"{SETS_ROOT}.{replica_set}", attributes, durable=True, optional=["batch"])


@lru_cache(maxsize=256)
def _beside(name: str, suffix: str, brokers: tuple[str, ...]) -> str:
    members = tuple(NodeId(broker) for broker in brokers)
    home, number = rendezvous_of(members, name), 0
    while rendezvous_of(members, f"{name}.{suffix}{number}") != home:
        number += 1
    return f"{name}.{suffix}{number}"


def question_type(replica_set: str, brokers: Sequence[str]) -> EventType:
    """For the replica named in `to`."""
    name = _beside(f"{SETS_ROOT}.{replica_set}", REQUESTS, tuple(brokers))
    return EventType(name, {"to": str, "reply_to": str, "body": bytes}, discloses_sender=True)


def answer_type(replica_set: str, brokers: Sequence[str]) -> EventType:
    """For the client named in `to`."""
    name = _beside(f"{SETS_ROOT}.{replica_set}", RESPONSES, tuple(brokers))
    return EventType(name, {"to": str, "body": bytes}, discloses_sender=True)


def write_body(member: Member, reads: bytes = b"") -> dict[str, object]:
    """One transaction's changes as the body of an event, stamped with the writer's clock: what all replicas measure
    the life of an idempotency key by. `reads`: what a serializable transaction has read."""
    return {"at": now_ms(), "write": encode_member(member), "reads": reads}


def batch_body(members: Sequence[bytes]) -> dict[str, Any]:
    """Transactions that a replica has committed, encoded one by one, as the body of one event."""
    return {"at": now_ms(), "write": b"", "reads": b"", "batch": pack_members(members)}


def member_of(tx: TxId, events: Sequence[Event]) -> Member:
    """The transaction that these events carry; several events of one transaction are its changes in order."""
    parts = [decode_member(event.body["write"]) for event in events]
    if len(parts) == 1:
        return replace(parts[0], tx=tx)
    changes: tuple[Change, ...] = tuple(change for part in parts for change in part.changes)
    first = parts[0] if parts else Member(tx, ())
    return Member(tx, changes, first.idempotency_key, first.key_ttl_s)


def published_members(tx: TxId, events: Sequence[Event]) -> list[Member]:
    """The transactions of one local transaction: those that a replica committed before it published them, each with
    the id it has there; one that its writer gave to the log directly goes by the log's own id."""
    members = [decode_member(event.body["write"]) for event in events]
    return [member if member.tx else replace(member, tx=tx) for member in members]


def batch_in(events: Sequence[Event]) -> list[Member]:
    """The transactions that a replica had committed before it published them, under the ids they have there; none if
    these events are writes."""
    batches = [event.body["batch"] for event in events if "batch" in event.body]
    return [member for batch in batches for member in map(decode_member, unpack_members(batch))]


def at_ms(events: Sequence[Event]) -> int:
    return max([int(event.body["at"]) for event in events], default=0)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
