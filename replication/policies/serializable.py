"""Serializable without two-phase commit: write sets in one total order, each with what its writer has read."""

from dataclasses import dataclass

from replication.config import ReplicaSetConfig
from replication.policies.base import Route, TxPlan
from tops.transactions import Access, Scope, ScopeLimit, TxType


@dataclass(frozen=True, slots=True)
class Serializable:
    """One-copy serializable: reads are local, write sets are committed in log order at every replica.

    A transaction whose reads an earlier write set has changed is aborted with an error that is safe to retry; every
    replica comes to that verdict by itself, since the entry tells what was read."""

    config: ReplicaSetConfig
    route = Route.COORDINATOR
    local_first = False

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PUBLIC, ScopeLimit.LOCAL)

    def scope_of(self, replica: str) -> Scope:
        return Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current"})
