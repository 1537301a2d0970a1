"""Synchronous voting: m of n."""

from dataclasses import dataclass

from replication.config import ReplicaSetConfig
from replication.policies.base import Route, TxPlan, together
from tops.transactions import Scope


@dataclass(frozen=True, slots=True)
class Quorum:
    """Any m of the n replicas commit together and the others follow; a read of n−m+1 meets every write.

    Goes on while m replicas are in sync; what it gives up is that any single replica is current."""

    config: ReplicaSetConfig
    route = Route.COORDINATOR
    local_first = False

    def plan(self) -> TxPlan:
        return together(self.config, self.config.writes_needed, self.config.names)

    def scope_of(self, replica: str) -> Scope:
        return Scope.DISTRIBUTED

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current", "quorum"})
