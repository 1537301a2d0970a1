"""Serializable without two-phase commit: write sets in one total order, read locks at the writer's replica."""

from dataclasses import dataclass

from replication.config import ReplicaSetConfig
from replication.policies.base import Route, TxPlan
from tops.transactions import Access, Scope, ScopeLimit, TxType


@dataclass(frozen=True, slots=True)
class Serializable:
    """One-copy serializable: reads lock at one replica, write sets are committed in log order at all of them.

    A transaction that has read what an earlier write set changes is aborted with an error that is safe to retry."""

    config: ReplicaSetConfig
    route = Route.REPLICA
    local_first = False

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PUBLIC, ScopeLimit.LOCAL)

    def scope_of(self, replica: str) -> Scope:
        return Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current"})
