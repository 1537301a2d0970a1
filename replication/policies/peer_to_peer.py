"""Asynchronous, every replica writes."""

from dataclasses import dataclass

from replication.policies.base import EntryKind, LocalFirst, LogFirst, OnApplyFailure, Route


@dataclass(frozen=True, slots=True)
class PeerToPeer(LocalFirst):
    """Any replica commits by itself and publishes then; concurrent changes of a row end the same way everywhere.

    Never waits for another site. What it gives up: an acknowledged change may lose against a concurrent one, which
    the conflict log then shows."""

    route = Route.REPLICA
    entry_kind = EntryKind.VERSIONED

    @property
    def merges_rows(self) -> bool:
        """Columns of several writers, or what a function of the user's returns."""
        return self.config.resolver == "per-column" or ":" in self.config.resolver

    def consistencies(self) -> frozenset[str]:
        return frozenset({"any"})

    def on_apply_failure(self) -> OnApplyFailure:
        return OnApplyFailure.QUARANTINE  # the replica goes on, and is marked as divergent


@dataclass(frozen=True, slots=True)
class Ordered(LogFirst):
    """Nothing is applied before it comes back from the log, and all replicas apply one order: no conflicts.

    A write is acknowledged when it is logged and applied at its site; what one replica refuses is refused by all."""
