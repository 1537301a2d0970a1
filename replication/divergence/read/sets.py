"""Replica sets as the cluster's file names them: where each replica's database is, the policy, the tables."""

from dataclasses import dataclass
from pathlib import Path

from adapters.embedded.servers import kept_logins
from replication.model.config import Cluster, ReplicaConfig, ReplicaSetConfig
from replication.tables.endpoints import ReplicaEndpoint
from tops.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SetDescription:
    """What a check needs to know of a replica set, or of some databases."""

    name: str
    policy: str
    tables: tuple[str, ...]  # empty: all
    endpoints: tuple[ReplicaEndpoint, ...]
    primary: str = ""
    cluster: Cluster | None = None  # where the set runs; None for plain databases


def load_set(path: str, name: str) -> SetDescription:
    """One replica set of a `tops.toml`; names are matched whole, never by a part of them."""
    if not Path(path).exists():
        raise ConfigError(f"{path}: no such file; name it with -c, or give the databases with --dsn name=…")
    cluster = Cluster.load(Path(path))
    found = cluster.replica_set(name)
    return SetDescription(
        name,
        found.policy,
        () if found.tables == "*" else tuple(found.tables),
        tuple(_endpoint(cluster, found, replica) for replica in found.replica),
        found.primary or "",
        cluster,
    )


def endpoint_of(path: str, set_name: str, replica: str) -> ReplicaEndpoint:
    cluster = Cluster.load(Path(path))
    found = cluster.replica_set(set_name)
    return _endpoint(cluster, found, found.replica_named(replica))


def _endpoint(cluster: Cluster, replica_set: ReplicaSetConfig, replica: ReplicaConfig) -> ReplicaEndpoint:
    if replica.dsn is None:
        data = cluster.data_of(replica_set, replica) / "postgres"
        logins = kept_logins(data, replica_set.name)
        # Of a server that does not run, where its socket would be.
        return ReplicaEndpoint(replica.name, logins.check if logins else f"postgresql:///postgres?host={data}")
    if replica.dsn.startswith("sqlite://"):
        return ReplicaEndpoint(replica.name, f"sqlite:///{replica.dsn.removeprefix('sqlite://')}")
    return ReplicaEndpoint(replica.name, replica.check_dsn or replica.dsn)
