"""Requests that were committed before, recognised by the idempotency keys that applications chose."""

from collections.abc import Sequence
from typing import NamedTuple

from adapters.changes import Member, own_key
from adapters.resource import Resource
from tops.model.event_types import set_of_log

_HELD = "select key, content, tx, number from tops.idempotency_keys where replica_set = $1 and key = any($2::text[])"


class First(NamedTuple):
    """The transaction that a key was committed by, and its log index where that is known."""

    tx: str
    number: int


class Repeats:
    """Looks keys up in the database of one replica."""

    def __init__(self, resource: Resource, log_type: str) -> None:
        self._resource, self._replica_set = resource, set_of_log(log_type)

    async def of(self, members: Sequence[Member]) -> dict[str, First]:
        """By key, what those of the members that have a chosen key and the same content repeat."""
        chosen = {m.idempotency_key: m for m in members if m.idempotency_key not in ("", own_key(m.tx))}
        if not chosen:
            return {}
        rows = (await self._resource.read_own(_HELD, (self._replica_set, list(chosen)))).rows
        return {
            row["key"]: First(row["tx"], row["number"]) for row in rows if row["content"] == chosen[row["key"]].content
        }
