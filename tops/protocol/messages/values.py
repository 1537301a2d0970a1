"""The parts of messages: the base of every message, and the values that several of them carry."""

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
    """Something that one node sends to another."""


Definitions = tuple[EventType, ...]  # a type's ancestors, the oldest first, then the type itself


class Principal(Wire, frozen=True, cache_hash=True):
    """The identity for which a service acts, and which the service itself has authenticated."""

    identity: str  # the canonical name
    role: str


class Sender(Wire, frozen=True, cache_hash=True):
    """The sender of a message: the stamp of the broker to which the sender is connected, from its handshake.

    Rights and quotas depend on `identity`, sessions on `instance`: an application of many processes has one
    certificate. A broker replaces a stamp that comes from a site, and trusts one that comes from another broker. A
    session of a service that acts for another identity has only the rights that both have; quotas and audit depend on
    that other identity.
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
        """The identity for quotas and audit."""
        return self.identity if self.on_behalf_of is None else self.on_behalf_of.identity

    @property
    def replica_set(self) -> str:
        """The set that this sender is a replica of; empty for others."""
        return self.identity.partition("/")[0] if "/" in self.identity else ""


class Address(Wire, frozen=True, cache_hash=True):
    """A broker, or a site that is connected to it and has this `handle`: a pseudonym made by the broker, not a name.

    It names the incarnation of the site: a message for an earlier incarnation never reaches a later one.
    """

    broker: NodeId
    handle: str = ""
    incarnation: int = 0


class Event(Wire, frozen=True):
    type: str
    body: dict[str, Any]


class Origin(Wire, frozen=True):
    """Identifies a publication to the type's family, so that a repeated one is recognised.

    The site assigns the number; its broker fills in `publisher`, a pseudonym of the site, and its incarnation.
    """

    family: str
    number: int
    publisher: str = ""
    incarnation: int = 0


class CensusPolicy(Wire, frozen=True):
    """When the census closes: after `timeout_s` at the latest, earlier with that many `replies` or as soon as the
    constraints are met."""

    timeout_s: float = 1.0
    replies: int | None = None
    when_met: bool = False


class TxSpec(Wire, frozen=True):
    """The initiator's specification at `begin`.

    `census` is None when only standing registrations count. `attributes` are matched against subscriptions, once.
    `decide_when_met`: on a durable type, decide as soon as the votes meet the constraints; slower replicas follow.
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
        """Raise InvalidTransaction if the specification contradicts itself."""
        self.check_times()
        check_limit(self.tx_type, self.limit, self.local_outcome)
        check_consistent(self.constraints, self.tx_type)
        if self.decide_when_met:
            check_prompt(self.constraints)

    def check_times(self) -> None:
        """Raise InvalidTransaction for a time to which no timer can be set: not a number, negative or infinite."""
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
    """One attempt at one number; a vote or decision for another attempt or incarnation does not apply to this one."""

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
    """The entry at one index of a durable type's log. No transactions and no event: a no-op entry."""

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
