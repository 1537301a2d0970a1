"""What a policy decides: the properties of the transaction that carries a write, and where a write goes first."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from replication.model.config import ReplicaSetConfig
from tops.model.constraints import AnyConstraint, AtLeast, OnlyFrom
from tops.model.event_types import EventType
from tops.model.transactions import Access, LocalOutcome, Scope, ScopeLimit, TxType
from tops.protocol.messages import TxSpec


class Route(Enum):
    """Who begins the transaction."""

    COORDINATOR = "coordinator"  # the client itself, at the set's coordinator
    REPLICA = "replica"  # any replica's agent, which commits first and publishes then
    PRIMARY = "primary"  # the primary's agent, the same way


@dataclass(frozen=True, slots=True)
class TxPlan:
    """The properties of the transactions that carry a set's writes."""

    tx_type: TxType
    access: Access
    limit: ScopeLimit
    constraints: tuple[AnyConstraint, ...] = ()
    decide_when_met: bool = False  # by the first replicas that are enough, and not by all that are in sync

    @property
    def local_outcome(self) -> LocalOutcome:
        return LocalOutcome.FOLLOWS if self.tx_type is TxType.DISTRIBUTED else LocalOutcome.INDEPENDENT

    def spec(self, event_type: str) -> TxSpec:
        """The properties as a coordinator takes them."""
        return TxSpec(
            event_type,
            self.tx_type,
            limit=self.limit,
            constraints=self.constraints,
            local_outcome=self.local_outcome,
            census=None,
            decide_when_met=self.decide_when_met,
        )


class Policy(Protocol):
    """One way of replicating; a value made from the set's configuration."""

    route: Route
    local_first: bool  # a replica commits before it publishes

    def plan(self) -> TxPlan: ...

    def scope_of(self, replica: str) -> Scope:
        """How a replica takes part: with a vote, or by following the log."""
        ...

    def consistencies(self) -> frozenset[str]:
        """Which reads the set can promise."""
        ...

    def responses_needed(self) -> int:
        """How many replicas must say where they are, so that one of them surely has everything acknowledged."""
        ...


def write_spec(log_type: EventType, policy: Policy) -> TxSpec:
    """The specification of the transactions that carry a set's writes."""
    return policy.plan().spec(log_type.name)


def client_plans(log_type: EventType, policy: Policy) -> tuple[TxSpec, ...]:
    """What the set's log takes from clients: nothing where replicas commit writes first."""
    return (write_spec(log_type, policy),) if policy.route is Route.COORDINATOR else ()


@dataclass(frozen=True, slots=True)
class Voting:
    """What the synchronous policies share: replicas vote on a write, and whoever has not voted follows from the log."""

    config: ReplicaSetConfig
    route = Route.COORDINATOR
    local_first = False

    @property
    def decide_when_met(self) -> bool:
        """Whether a write is decided by the first replicas that are enough, and not by all that are in sync."""
        return False

    def voters(self) -> list[str]:
        return self.config.names

    def plan(self) -> TxPlan:
        constraints: tuple[AnyConstraint, ...] = (
            AtLeast(self.config.writes_needed, self.config.sites(self.voters())),
            OnlyFrom(self.config.sites()),
        )
        return TxPlan(TxType.DISTRIBUTED, Access.PRIVATE, ScopeLimit.LOCAL, constraints, self.decide_when_met)

    def scope_of(self, replica: str) -> Scope:
        return Scope.DISTRIBUTED if replica in self.voters() else Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current", "quorum"})

    def responses_needed(self) -> int:
        return len(self.config.replica)


@dataclass(frozen=True, slots=True)
class LocalFirst:
    """What the asynchronous policies share: a replica commits and publishes then; the others follow the log."""

    config: ReplicaSetConfig
    local_first = True

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PRIVATE, ScopeLimit.LOCAL)

    def scope_of(self, replica: str) -> Scope:
        return Scope.LOCAL

    def responses_needed(self) -> int:
        return len(self.config.replica)


@dataclass(frozen=True, slots=True)
class LogFirst:
    """What the ordered policies share: nothing is applied before it comes back from the log, in one order."""

    config: ReplicaSetConfig
    route = Route.COORDINATOR
    local_first = False

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PUBLIC, ScopeLimit.LOCAL)

    def scope_of(self, replica: str) -> Scope:
        return Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current"})

    def responses_needed(self) -> int:
        return len(self.config.replica)  # a write is answered once any one of them has it
