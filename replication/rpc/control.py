"""Transactions of a set's log that are no application's: barriers, and repairs of one replica.

A barrier changes nothing anywhere; it is a place in the log. A repair is carried out by the replica that it names, and
is empty for all others. What a transaction is travels beside its changes, where brokers check the right to say it.
"""

from collections.abc import Sequence
from typing import Protocol

from adapters.changes import Barrier, Member, Repair, own_key
from replication.rpc.rejections import WriteRejected
from tops.model.ids import counted

_RESERVED = "tops-"
KEY_TTL_S = 3_600
KEY_LENGTH_MAX = 255  # ids of transactions tell it, in base64 of its UTF-8


def key_problem(key: str) -> str:
    """Why an application may not use this idempotency key; empty if it may."""
    if len(key) > KEY_LENGTH_MAX:
        return f"the idempotency key has {len(key)} characters; at most {KEY_LENGTH_MAX} are allowed"
    if key.startswith(_RESERVED):
        return f"idempotency keys that begin with {_RESERVED!r} are not for applications"
    if names_tx(key):
        return f"the idempotency key {key!r} is the id of a transaction: choose another"
    return ""


def names_tx(key: str) -> str:
    """The id that a key consists of; empty if it is no id of a transaction."""
    tx = key.removeprefix(own_key("")) if key.startswith(own_key("")) else ""
    return tx if tx and counted(tx) is not None else ""


def check_key(key: str) -> None:
    """Raise WriteRejected for an idempotency key that an application may not use."""
    if problem := key_problem(key):
        raise WriteRejected("", "invalid", problem)


def control_key(control: Barrier | Repair) -> str:
    """The idempotency key of a barrier or repair: one that is logged again, after a lost response, is done once."""
    if isinstance(control, Barrier):
        return f"{_RESERVED}barrier|{control.ident}"
    return f"{_RESERVED}repair|{control.site}|{control.ident}|{control.position}|{control.part}"


def has_control(members: Sequence[Member]) -> bool:
    """Whether a barrier or a repair is among them; most often none is."""
    return any(member.control is not None for member in members)


def repair_of(member: Member) -> Repair | None:
    """What the transaction repairs, if it is a repair."""
    return member.control if isinstance(member.control, Repair) else None


class Visitor(Protocol):
    """Who takes part in a replica's applying on behalf of a check: sees every write, and may stop for a moment."""

    def expects(self, barrier: str) -> bool:
        """Whether somebody waits for the replica to reach this barrier."""

    async def reached(self, barrier: str) -> None:
        """The replica has applied exactly up to the barrier; it goes on when this returns."""

    def permitted(self, member: Member, repair: Repair) -> Member:
        """What of a repair of this replica may be written: not the rows that were written since they were looked at."""

    @property
    def watches(self) -> bool:
        """Whether it wants to hear of transactions at the moment."""

    def saw(self, member: Member, number: int) -> None:
        """A transaction is about to be applied."""
