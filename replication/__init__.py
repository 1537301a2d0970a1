"""Replication on top of transactional publish/subscribe: replica sets, their policies, reads and the agents."""

from typing import TYPE_CHECKING

from tops.runtime.deferred import deferred

if TYPE_CHECKING:
    from replication.client.replica_set import ReplicaSet, connect
    from replication.model.config import ReplicaSetConfig

__all__ = ["ReplicaSet", "ReplicaSetConfig", "connect"]

__getattr__ = deferred(
    __name__,
    {
        "ReplicaSet": "replication.client.replica_set",
        "ReplicaSetConfig": "replication.model.config",
        "connect": "replication.client.replica_set",
    },
)
