"""Some replicas synchronous, the others following."""

from dataclasses import dataclass

from replication.config import ReplicaSetConfig
from replication.policies.base import Route, TxPlan, together
from tops.transactions import Scope


@dataclass(frozen=True, slots=True)
class Combined:
    """The replicas under `sync` commit together; the others get the log, and never hold up a write."""

    config: ReplicaSetConfig
    route = Route.COORDINATOR
    local_first = False

    def plan(self) -> TxPlan:
        return together(self.config, self.config.writes_needed, self.config.sync)

    def scope_of(self, replica: str) -> Scope:
        return Scope.DISTRIBUTED if replica in self.config.sync else Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "current", "quorum"})
