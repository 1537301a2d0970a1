"""How ids are made and printed.

Ids are plain strings on the wire and in journals, so that an operator can search for them. Only this module makes them.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NewType

NodeId = NewType("NodeId", str)  # a broker's name, or that of a site's session: IDENTITY or IDENTITY:INSTANCE
TxId = NewType("TxId", str)  # origin.incarnation.counter
Pseudonym = NewType("Pseudonym", str)  # a participant's name within one transaction


def tx_id(origin: NodeId, incarnation: int, counter: int) -> TxId:
    """The id of the `counter`-th transaction of one incarnation of `origin`: unique, since incarnations only grow."""
    return TxId(f"{origin}.{incarnation}.{counter}")


_KEYED, _AT = "~", "@"  # before the idempotency key, and before the replica
# Of ids without a key: the series in front, the number, the replica. Databases understand the pattern as well.
COUNTED = re.compile(r"(.+\.)([0-9a-f]{10})(@[^@]*)", re.DOTALL)
_NUMBERS = re.compile(r"(?:[0-9a-f]{10})+")


def counted_id(origin: str, incarnation: str, number: int, key: str, replica: str) -> TxId:
    """The id of the `number`-th write of one incarnation of `origin` that goes to a replica first.

    It contains the replica, and the write's idempotency key if it has one: a request for its outcome needs both."""
    key_part = f"{_KEYED}{base64.urlsafe_b64encode(key.encode()).decode()}" if key else ""
    return TxId(f"{origin}.{incarnation}.{number:010x}{key_part}{_AT}{replica}")


def parts_of_counted(tx: str) -> tuple[str, str]:
    """The idempotency key and the replica that a counted id contains; empty for other ids. ValueError: it is no id."""
    before, at, replica = tx.rpartition(_AT)
    _, keyed, key = before.partition(_KEYED)
    return base64.urlsafe_b64decode(key).decode() if at and keyed else "", replica if at else ""


def counted(tx: str) -> tuple[str, int] | None:
    """The series of a counted id without a key, and its number there: no two ids have both in common."""
    parts = COUNTED.fullmatch(tx)
    return (parts[1] + parts[3], int(parts[2], 16)) if parts is not None else None


def counted_all(ids: Sequence[str]) -> list[tuple[str, int]] | None:
    """The same for many; None if one of them is not counted."""
    first = COUNTED.fullmatch(ids[0])
    if first is None:
        return None
    begin, end = first.span(2)
    if {tx[:begin] for tx in ids} == {first[1]} and {tx[end:] for tx in ids} == {first[3]}:  # most often: one writer's
        numbers, series = [tx[begin:end] for tx in ids], first[1] + first[3]
        return [(series, int(number, 16)) for number in numbers] if _NUMBERS.fullmatch("".join(numbers)) else None
    found = [parts for parts in map(counted, ids) if parts is not None]
    return found if len(found) == len(ids) else None


def identity_in(tx: str) -> str:
    """The identity that began a transaction: ids begin with the name of a session."""
    return tx.partition(".")[0].partition(":")[0]


def standing_pseudonym(secret: bytes, tx: TxId) -> Pseudonym:
    """The pseudonym of a standing registration in a transaction: without the secret no two of them can be linked."""
    return Pseudonym(hmac.digest(secret, tx.encode(), "sha256")[:16].hex())


def node_id(identity: str, instance: str) -> NodeId:
    """The name of one session: neither names of identities nor of instances contain a colon or a dot."""
    return NodeId(f"{identity}:{instance}" if instance else identity)


def voter_key(identity: str, voter: str) -> str:
    """A coordinator's name for a voter: the voter's own name, bound to the identity in the stamp of the message."""
    return f"{identity}#{voter}"


def voter_of(key: str) -> str:
    """The voter's own name."""
    return key.rpartition("#")[2]


@lru_cache(maxsize=8192)
def hashed_voter(key: str) -> str:
    """The voter in the form of a published committing set."""
    return hashed(voter_of(key))


@lru_cache(maxsize=8192)
def hashed(pseudonym: str) -> str:
    """A one-way hash: a member finds its own entry in a published membership list, which reveals nothing else."""
    return hashlib.sha256(pseudonym.encode()).hexdigest()[:32]
