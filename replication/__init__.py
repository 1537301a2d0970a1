"""Replication on top of transactional publish/subscribe: replica sets, their policies, reads and the agents."""

from typing import TYPE_CHECKING

from tops.deferred import deferred

if TYPE_CHECKING:
    from replication.config import ReplicaSetConfig
    from replication.replica_set import ReplicaSet, connect

__all__ = ["ReplicaSet", "ReplicaSetConfig", "connect"]

__getattr__ = deferred(
    __name__,
    {
        "ReplicaSet": "replication.replica_set",
        "ReplicaSetConfig": "replication.config",
        "connect": "replication.replica_set",
    },
)
