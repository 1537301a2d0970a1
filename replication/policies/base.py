"""What a policy decides: the properties of the transaction that carries a write, and where a write goes first."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from replication.config import ReplicaSetConfig
from tops.constraints import AnyConstraint, AtLeast, OnlyFrom
from tops.transactions import Access, LocalOutcome, Scope, ScopeLimit, TxType


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

    @property
    def local_outcome(self) -> LocalOutcome:
        return LocalOutcome.FOLLOWS if self.tx_type is TxType.DISTRIBUTED else LocalOutcome.INDEPENDENT


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


ANY = frozenset({"any"})


def together(config: ReplicaSetConfig, least: int, replicas: list[str]) -> TxPlan:
    """A distributed transaction of at least `least` of these replicas, which the others follow from the log."""
    listed = config.sites(replicas)
    constraints: tuple[AnyConstraint, ...] = (AtLeast(least, listed), OnlyFrom(config.sites()))
    return TxPlan(TxType.DISTRIBUTED, Access.PRIVATE, ScopeLimit.LOCAL, constraints)
