"""Transactions of a set's log that are no application's: barriers, and repairs of one replica.

Their idempotency keys tell them. A barrier changes nothing anywhere; it is a place in the log. A repair is carried out
by the replica that it names, and is empty for all others.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from replication.refusals import WriteRefused
from tops.changes import Member, own_key
from tops.ids import counted

_RESERVED = "tops-"
_BARRIER, _REPAIR = "tops-barrier", "tops-repair"
KEY_TTL_S = 3_600


def check_key(key: str) -> None:
    """Refuse an idempotency key that an application may not use: it is, or would be taken for, one of ours."""
    if key.startswith(_RESERVED):
        raise WriteRefused("", "invalid", f"idempotency keys that begin with {_RESERVED!r} are not for applications")
    if key.startswith(own_key("")) and counted(key.removeprefix(own_key(""))) is not None:
        raise WriteRefused("", "invalid", f"the idempotency key {key!r} is the id of a transaction: choose another")


class Repair(msgspec.Struct, frozen=True):
    """Which replica's agent a repair is for, and what it relies on: that the rows were looked at as of `position`."""

    site: str
    ident: str
    position: int
    part: int = 0

    @property
    def key(self) -> str:
        return f"{_REPAIR}|{self.site}|{self.ident}|{self.position}|{self.part}"


def barrier_key(ident: str) -> str:
    return f"{_BARRIER}|{ident}"


def marked(members: Sequence[Member]) -> list[Member]:
    """Those that may be a barrier or a repair; most often none is."""
    return [member for member in members if member.idempotency_key.startswith(_RESERVED)]


def barrier_of(member: Member) -> str | None:
    """The barrier's name, if the transaction is one."""
    kind, _, ident = member.idempotency_key.partition("|")
    return ident if kind == _BARRIER else None


def repair_of(member: Member) -> Repair | None:
    """What the transaction repairs, if it is a repair."""
    if not member.idempotency_key.startswith(_REPAIR):
        return None
    _, site, ident, position, part = member.idempotency_key.split("|")
    return Repair(site, ident, int(position), int(part))


class Visitor(Protocol):
    """Who takes part in a replica's applying on behalf of a check: sees every write, and may stop for a moment."""

    def expects(self, barrier: str) -> bool:
        """Whether somebody waits for the replica to reach this barrier."""

    async def reached(self, barrier: str, position: int) -> None:
        """The replica has applied exactly up to the barrier; it goes on when this returns."""

    def permitted(self, member: Member, repair: Repair) -> Member:
        """What of a repair of this replica may be written: not the rows that were written since they were looked at."""

    @property
    def watches(self) -> bool:
        """Whether it wants to hear of transactions at the moment."""

    def saw(self, member: Member, number: int) -> None:
        """A transaction is about to be applied."""
