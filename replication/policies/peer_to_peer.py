"""Asynchronous, every replica writes."""

from dataclasses import dataclass

from replication.config import ReplicaSetConfig
from replication.policies.base import ANY, Route, TxPlan
from tops.transactions import Access, Scope, ScopeLimit, TxType


@dataclass(frozen=True, slots=True)
class PeerToPeer:
    """Any replica commits by itself and publishes then; concurrent changes of a row end the same way everywhere.

    Never waits for another site. What it gives up: an acknowledged change may lose against a concurrent one, which
    the conflict log then shows."""

    config: ReplicaSetConfig
    route = Route.REPLICA
    local_first = True

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PRIVATE, ScopeLimit.LOCAL)

    def scope_of(self, replica: str) -> Scope:
        return Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return ANY


@dataclass(frozen=True, slots=True)
class Ordered:
    """Nothing is applied before it comes back from the log, and all replicas apply one order: no conflicts.

    A write is acknowledged when it is logged; what a replica then refuses is refused by all of them."""

    config: ReplicaSetConfig
    route = Route.COORDINATOR
    local_first = False

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PUBLIC, ScopeLimit.LOCAL)

    def scope_of(self, replica: str) -> Scope:
        return Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current"})
