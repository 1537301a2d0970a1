"""Asynchronous, one writer."""

from dataclasses import dataclass

from replication.config import ReplicaSetConfig
from replication.policies.base import Route, TxPlan
from tops.transactions import Access, Scope, ScopeLimit, TxType


@dataclass(frozen=True, slots=True)
class PrimarySite:
    """Writes go to the primary, which commits and publishes them; the others follow in its order.

    With `ack = "logged"` an acknowledged write is in the log as well; with `"local"` it is at the primary alone."""

    config: ReplicaSetConfig
    route = Route.PRIMARY
    local_first = True

    def plan(self) -> TxPlan:
        return TxPlan(TxType.LOCAL, Access.PRIVATE, ScopeLimit.LOCAL)

    def scope_of(self, replica: str) -> Scope:
        return Scope.LOCAL

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any", "primary"})
