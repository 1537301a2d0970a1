"""The policies: each a small value that maps to transaction properties."""

from replication.model.config import ReplicaSetConfig
from replication.policies.base import EntryKind, OnApplyFailure, Policy, Route, TxPlan, client_plans, write_spec
from replication.policies.combined import Combined
from replication.policies.peer_to_peer import Ordered, PeerToPeer
from replication.policies.primary_site import PrimarySite
from replication.policies.quorum import Quorum
from replication.policies.serializable import Serializable
from replication.policies.write_all import WriteAll

__all__ = ["EntryKind", "OnApplyFailure", "Policy", "Route", "TxPlan", "client_plans", "policy_of", "write_spec"]


def policy_of(config: ReplicaSetConfig) -> Policy:
    """The policy that a configuration asks for."""
    match config.policy:
        case "write-all":
            return WriteAll(config)
        case "quorum":
            return Quorum(config)
        case "combined":
            return Combined(config)
        case "primary-site":
            return PrimarySite(config)
        case "peer-to-peer":
            return PeerToPeer(config) if config.order == "local-first" else Ordered(config)
        case "serializable":
            return Serializable(config)
