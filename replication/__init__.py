"""Replication on top of transactional publish/subscribe: replica sets, their policies, reads and the agents."""

from replication.config import ReplicaSetConfig
from replication.replica_set import ReplicaSet, connect

__all__ = ["ReplicaSet", "ReplicaSetConfig", "connect"]
