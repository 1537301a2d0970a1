"""Synchronous write-all, read-any."""

from dataclasses import dataclass

from replication.config import ReplicaSetConfig
from replication.policies.base import Route, TxPlan, together
from tops.transactions import Scope


@dataclass(frozen=True, slots=True)
class WriteAll:
    """A write is at every replica when it is acknowledged, so any of them answers for all.

    With one of them down, writes are refused; or, with `on_failure = "degrade"`, go on with those in sync."""

    config: ReplicaSetConfig
    route = Route.COORDINATOR
    local_first = False

    def plan(self) -> TxPlan:
        return together(self.config, self.config.writes_needed, self.config.names)

    def scope_of(self, replica: str) -> Scope:
        return Scope.DISTRIBUTED

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current", "quorum"})
