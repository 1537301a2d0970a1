"""Two replica sets of real processes with keys and TLS, and keys of every role to attack them with."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import asyncpg

from adapters import EmbeddedPostgres
from adapters.embedded.free_ports import free_port
from replication import ReplicaSet, connect
from replication.model.config import Cluster, login_keys
from replication.operations.processes import Processes, wait_ready
from tests.integration.overlay.secured import issue
from tests.integration.replication.clusters import SCHEMA
from tests.support.logins import logins_in
from tops import Site
from tops.security import Authority, Kind, utc_now

SETS = {"shop": 'policy = "write-all"', "stock": 'policy = "peer-to-peer"'}
REPLICAS = ("r1", "r2")
# The audit log takes few denials per identity and minute: `audited` is kept for a test that reads it.
SITES = {
    "reader": "reader",
    "writer": "writer",
    "audited": "writer",
    "victim": "writer",
    "operator": "admin",
    "participant": "participant",
    "guest": "no-such-role",
    "inserter": "inserter",
    **{f"http-{broker}": "service" for broker in ("b1", "b2")},
}
# May write and not even read the description of a set.
INSERTER = '[[role]]\nname = "inserter"\nallow = ["write rs.**"]'
LIMITS = "[broker.limits]\nconnections_per_s = 10000\nwaiting_per_address = 1000\nsite_grace_s = 0.5"


class SecuredSets:
    """The running cluster: `shop` needs the votes of both replicas, in `stock` replicas commit first."""

    def __init__(
        self, processes: Processes, logs: Path, authority: Authority, keys: dict[str, Path], dsns: dict[str, str]
    ) -> None:
        self.cluster, self.processes, self.logs = processes.cluster, processes, logs
        self.authority, self._keys, self._dsns = authority, keys, dsns

    def keys(self, name: str) -> Path:
        return self._keys[name]

    def connect(self, name: str, replica_set: str = "shop") -> AbstractAsyncContextManager[ReplicaSet]:
        return connect(self.cluster.urls("b2"), replica_set, keys=self.keys(name), timeout_s=15.0)

    def site(self, name: str, instance: str = "attack") -> AbstractAsyncContextManager[Site]:
        instance = "" if "/" in name else instance  # a replica has one session
        return Site.connect(self.cluster.urls("b1"), keys=self.keys(name), instance=instance, timeout_s=15.0)

    def audit(self, node: str) -> str:
        """The audit log of a broker (`b1`) or of a replica's agent (`shop/r1`)."""
        if "/" in node:
            replica_set, _, replica = node.partition("/")
            config = self.cluster.replica_set(replica_set)
            path = self.cluster.data_of(config, config.replica_named(replica)) / "audit.log"
        else:
            path = self.cluster.config.broker_named(node).data / "audit.log"
        return path.read_text() if path.exists() else ""

    async def rows(self, replica: str, sql: str) -> list[tuple[object, ...]]:
        """Straight from a replica's database, past everything."""
        connection = await asyncpg.connect(self._dsns[replica])
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()


@asynccontextmanager
async def secured_sets(server: EmbeddedPostgres) -> AsyncIterator[SecuredSets]:
    with tempfile.TemporaryDirectory(prefix="tops-attack-") as name:
        folder = Path(name)
        authority = Authority.init(folder / "keys", "test", utc_now(), 30)
        keys = {site: issue(authority, site, role) for site, role in SITES.items()}
        await _make_databases(server)
        cluster = Cluster.load(await _file(folder, authority, keys, server))
        dsns = {f"{s}/{r}": server.dsn_for(f"{s}_{r}") for s in SETS for r in REPLICAS}
        processes = Processes(cluster, folder / "logs")
        try:
            await processes.start_all()
            await wait_ready(cluster, list(SETS), processes, timeout_s=120.0, keys=keys["operator"])
            yield SecuredSets(processes, folder / "logs", authority, keys, dsns)
        finally:
            await processes.stop_all()


async def _make_databases(server: EmbeddedPostgres) -> None:
    names = [f"{replica_set}_{replica}" for replica_set in SETS for replica in REPLICAS]
    for name in names:
        await _run(server.dsn, f'create database "{name}"')
        await _run(server.dsn_for(name), SCHEMA)


async def _run(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def _file(folder: Path, authority: Authority, keys: dict[str, Path], server: EmbeddedPostgres) -> Path:
    lines = ['[cluster]\nname = "test"']
    for broker in ("b1", "b2"):
        own = issue(authority, broker, kind=Kind.BROKER)
        lines.append(f'[[broker]]\nname = "{broker}"\nlisten = "127.0.0.1:{free_port()}"\ndata = "data/{broker}"')
        lines.append(f'keys = "{own}"\n{LIMITS}')
    for replica_set, policy in SETS.items():
        lines.append(f'[[replica_set]]\nname = "{replica_set}"\n{policy}\nhttp_keys = "keys/nodes/http-{{broker}}"')
        for replica, broker in zip(REPLICAS, ("b1", "b2"), strict=True):
            name = f"{replica_set}/{replica}"
            keys[name] = issue(authority, name, "replica", kind=Kind.REPLICA)
            logins = await logins_in(server, f"{replica_set}_{replica}", replica_set)
            lines.append(f'[[replica_set.replica]]\nname = "{replica}"\nbroker = "{broker}"\n{login_keys(logins)}')
            lines.append(f'keys = "{keys[name]}"')
        # Certified, and not in the file: what a key that was not withdrawn can still do.
        keys[f"{replica_set}/r9"] = issue(authority, f"{replica_set}/r9", "replica", kind=Kind.REPLICA)
    lines.append(INSERTER)
    for name in ("delta/r9", "beta/r9", "gamma/r9"):  # of sets that nobody serves
        keys[name] = issue(authority, name)
    path = folder / "tops.toml"
    path.write_text("\n".join(lines))
    return path
