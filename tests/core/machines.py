"""What tests of single machines share: small makers of inputs, and looks at lists of effects."""

from collections.abc import Iterable
from typing import Any, TypeVar

from tops.core.commit.ballot import ReadyTx
from tops.core.commit.census import Member
from tops.model.constraints import AnyConstraint
from tops.model.ids import NodeId, Pseudonym, TxId, hashed, voter_key
from tops.model.transactions import TxType
from tops.protocol.effects import Disseminate, Effect, Persist, SendTo
from tops.protocol.messages import Address, CensusPolicy, Event, Sender, TxSpec

T = TypeVar("T")

BROKER = NodeId("b1")
PUBLISHER = Address(BROKER, "P", 1)


def address(handle: str) -> Address:
    return Address(BROKER, handle, 1)


def sender(identity: str, incarnation: int = 1) -> Sender:
    return Sender(identity, "writer", incarnation=incarnation)


def voter(name: str) -> str:
    """What a coordinator knows the voter `name` of the site `name` by."""
    return voter_key(name, name)


def shown(names: Iterable[str]) -> frozenset[str]:
    """These voters as a decision names them."""
    return frozenset(map(hashed, names))


def member(key: str, *, identity: str | None = None, counts: bool = True) -> Member:
    return Member(key, Pseudonym(key), identity or key, address(key), 1, counts=counts)


def members(keys: Iterable[str]) -> dict[str, Member]:
    return {key: member(key) for key in keys}


def spec(*constraints: AnyConstraint, event_type: str = "plain", **properties: Any) -> TxSpec:
    properties.setdefault("census", CensusPolicy(timeout_s=1.0))
    return TxSpec(event_type, TxType.DISTRIBUTED, constraints=constraints, **properties)


def event(mark: str = "m") -> Event:
    return Event("plain", {"mark": mark, "key": "a"})


def ready(tx: str, voters: Iterable[str] | None = None, *constraints: AnyConstraint) -> ReadyTx:
    """A transaction whose commit was asked for: interactive with these voters, or a one-shot."""
    joined = None if voters is None else members(voters)
    events = None if voters is not None else (event(tx),)
    return ReadyTx(TxId(tx), spec(*constraints), PUBLISHER, 1, events, (event(tx),), joined)


def sent_messages(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    """Letters of this kind that are to be posted."""
    return [e.message for e in effects if isinstance(e, SendTo) and isinstance(e.message, kind)]


def disseminated(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    return [e.publication for e in effects if isinstance(e, Disseminate) and isinstance(e.publication, kind)]


def persisted(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    return [e.record for e in effects if isinstance(e, Persist) and isinstance(e.record, kind)]


def of(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    return [e for e in effects if isinstance(e, kind)]
