"""What messages are made of: the base of every message, and the values that several of them carry."""

from typing import Any

import msgspec

from tops.model.constraints import AnyConstraint, check_consistent, check_prompt
from tops.model.errors import InvalidTransaction
from tops.model.event_types import EventType
from tops.model.ids import NodeId, TxId, node_id
from tops.model.transactions import Access, LocalOutcome, ScopeLimit, TxType, check_limit

PROTOCOL = 3
TIMEOUT_MAX_S = 30 * 24 * 3600


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value inside messages."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True, gc=False):
    """Something one node says to another."""


Definitions = tuple[EventType, ...]  # a type's ancestors, the oldest first, then the type itself


class Principal(Wire, frozen=True, cache_hash=True):
    """Whom a service acts for: an identity that the service has authenticated by itself."""

    identity: str  # the canonical name
    role: str


class Sender(Wire, frozen=True, cache_hash=True):
    """Who sent a message: the stamp of the broker that the sender is connected to, from what it knows by the handshake.

    Rights and quotas go by `identity`, sessions by `instance`: an application of many processes has one certificate.
    A broker that receives a stamp from a site replaces it; from another broker it is trusted. A session of a service
    that acts for another identity has only the rights that both have; quotas and audit go by that other identity.
    """

    identity: str  # the canonical name: NAME of a site or broker, SET/REPLICA of a replica
    role: str
    instance: str = ""
    incarnation: int = 0
    on_behalf_of: Principal | None = None  # accepted only from identities that may represent others

    @property
    def node(self) -> NodeId:
        """The name of this session in the overlay."""
        return node_id(self.identity, self.instance)

    @property
    def accountable(self) -> str:
        """The identity that quotas and audit go by."""
        return self.identity if self.on_behalf_of is None else self.on_behalf_of.identity

    @property
    def replica_set(self) -> str:
        """The set that this sender is a replica of; empty for others."""
        return self.identity.partition("/")[0] if "/" in self.identity else ""


class Address(Wire, frozen=True, cache_hash=True):
    """A broker, or the site that this broker knows by `handle`: a pseudonym that the broker made, never a name.

    With the incarnation of the site: what is meant for an earlier life never reaches a later one.
    """

    broker: NodeId
    handle: str = ""
    incarnation: int = 0


class Event(Wire, frozen=True):
    type: str
    body: dict[str, Any]


class Origin(Wire, frozen=True):
    """Which publication to the type's family, by which incarnation of which publisher; makes a repeated one
    recognisable.

    A site gives the number. `publisher` is a pseudonym of the site that its broker fills in, with the incarnation.
    """

    family: str
    number: int
    publisher: str = ""
    incarnation: int = 0


class CensusPolicy(Wire, frozen=True):
    """When the census closes: after `timeout_s` at the latest, earlier with `replies` answers or as soon as
    the constraints are met."""

    timeout_s: float = 1.0
    replies: int | None = None
    when_met: bool = False


class TxSpec(Wire, frozen=True):
    """What the initiator asked for at `begin`.

    `census` is None when only standing answers count. `attributes` are what subscriptions are matched against, once.
    `decide_when_met`: on a durable type, as soon as those who have voted meet the constraints; the slower ones follow.
    `operator`: not bound by the plans of a replica set's log; the initiator's broker has checked its right to operate.
    """

    event_type: str
    tx_type: TxType
    access: Access = Access.PRIVATE
    limit: ScopeLimit = ScopeLimit.NONE
    constraints: tuple[AnyConstraint, ...] = ()
    attributes: dict[str, Any] = {}
    local_outcome: LocalOutcome = LocalOutcome.INDEPENDENT
    census: CensusPolicy | None = CensusPolicy()
    vote_timeout_s: float = 5.0
    decide_within_s: float = 60.0
    decide_when_met: bool = False
    operator: bool = False

    def check(self) -> None:
        """Refuse with InvalidTransaction what contradicts itself, wherever it is asked for."""
        self.check_times()
        check_limit(self.tx_type, self.limit, self.local_outcome)
        check_consistent(self.constraints, self.tx_type)
        if self.decide_when_met:
            check_prompt(self.constraints)

    def check_times(self) -> None:
        """Refuse with InvalidTransaction times that no timer can be set to: not a number, negative or endless."""
        census = self.census
        if (
            0 <= self.vote_timeout_s <= TIMEOUT_MAX_S
            and 0 <= self.decide_within_s <= TIMEOUT_MAX_S
            and (census is None or 0 <= census.timeout_s <= TIMEOUT_MAX_S)
        ):
            return
        times = {"vote_timeout_s": self.vote_timeout_s, "decide_within_s": self.decide_within_s}
        times |= {} if census is None else {"census.timeout_s": census.timeout_s}
        wrong = ", ".join(f"{name} is {value}" for name, value in times.items() if not 0 <= value <= TIMEOUT_MAX_S)
        raise InvalidTransaction(f"{wrong}: give a number of seconds from 0 to {TIMEOUT_MAX_S}")


class EpochId(Wire, frozen=True, cache_hash=True):
    """One attempt at one number; a vote or decision for another attempt or incarnation says nothing about this one."""

    event_type: str
    number: int
    attempt: int
    coordinator: NodeId
    incarnation: int

    def __str__(self) -> str:
        return f"{self.event_type}#{self.number}.{self.attempt}@{self.coordinator}.{self.incarnation}"

    def newer_than(self, other: "EpochId") -> bool:
        """Whether the coordinator sent this one out after the other."""
        return (self.incarnation, self.number, self.attempt) > (other.incarnation, other.number, other.attempt)


class EpochMember(Wire, frozen=True):
    """One transaction of an epoch. `events` is None where the participants have received them already."""

    tx: TxId
    last_sequence: int
    events: tuple[Event, ...] | None


class LogEntry(Wire, frozen=True):
    """What stands under one number of a durable type's log. No transactions and no event: the number is void."""

    number: int
    transactions: tuple["LoggedTx", ...] = ()
    event: Event | None = None
    epoch: EpochId | None = None
    committing: frozenset[str] = frozenset()  # hashed names of the voters, as `EpochDecided` shows them
    timestamp: dict[int, int] = {}  # of an event of an ordering domain


class LoggedTx(Wire, frozen=True):
    tx: TxId
    event_type: str
    events: tuple[Event, ...]
    attributes: dict[str, Any]
    limit: ScopeLimit
    tx_type: TxType
