"""Replication on top of transactional publish/subscribe: replica sets, their policies, reads and the agents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replication.config import ReplicaSetConfig
    from replication.replica_set import ReplicaSet, connect

__all__ = ["ReplicaSet", "ReplicaSetConfig", "connect"]

# Looked up when used: a Spark worker that reads rows does not load a client.
_HOMES = {"ReplicaSet": "replica_set", "ReplicaSetConfig": "config", "connect": "replica_set"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"replication.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'replication' has no attribute {name!r}")
