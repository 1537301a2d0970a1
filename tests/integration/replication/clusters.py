"""Whole clusters of real processes for tests: brokers, agents and embedded PostgreSQL servers under one folder."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from adapters.embedded import programs
from adapters.embedded.free_ports import free_port
from replication import ReplicaSet, connect
from replication.model.config import Cluster
from replication.operations.processes import Processes, wait_ready

SCHEMA = """
create table accounts (
    id int primary key, owner text not null default '', balance bigint not null check (balance >= 0));
create table transfers (id text primary key, source int not null, target int not null, amount bigint not null);
create table lists (key int primary key, items text not null default '');
"""


def toml(folder: Path, sets: Mapping[str, str], brokers: int, replicas: int, schema: str = SCHEMA) -> Path:
    """A file with these sets (name -> their own keys); replica i is at broker i, round and round."""
    (folder / "schema.sql").write_text(schema)
    lines = ['[cluster]\nname = "test"']
    for number in range(1, brokers + 1):
        lines.append(f'[[broker]]\nname = "b{number}"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./data/b{number}"')
        lines.append("[broker.limits]\nheartbeat_s = 1\nsite_grace_s = 1")
    for name, keys in sets.items():
        lines.append(f'[[replica_set]]\nname = "{name}"\nschema = "schema.sql"\n{keys}')
        for number in range(1, replicas + 1):
            lines.append(f'[[replica_set.replica]]\nname = "r{number}"\nbroker = "b{(number - 1) % brokers + 1}"')
    path = folder / "tops.toml"
    path.write_text("\n".join(lines))
    return path


class RunningCluster:
    def __init__(self, cluster: Cluster, processes: Processes) -> None:
        self.cluster, self.processes = cluster, processes

    @asynccontextmanager
    async def connect(
        self, name: str = "shop", prefer: str | None = None, **options: float
    ) -> AsyncIterator[ReplicaSet]:
        broker = self.cluster.replica_set(name).replica_named(prefer).broker if prefer else None
        async with connect(self.cluster.urls(broker), name, prefer=prefer, **options) as replica_set:  # type: ignore[arg-type]
            yield replica_set


@asynccontextmanager
async def running(
    folder: Path,
    sets: Mapping[str, str],
    *,
    brokers: int = 2,
    replicas: int = 3,
    schema: str = SCHEMA,
    before: Callable[["RunningCluster"], None] | None = None,
) -> AsyncIterator[RunningCluster]:
    """A cluster whose replicas are all in sync; everything ends with the block. `before` is called before it starts."""
    cluster = Cluster.load(toml(folder, sets, brokers, replicas, schema))
    processes = Processes(cluster, folder / "logs")
    whole = RunningCluster(cluster, processes)
    if before is not None:
        before(whole)
    await give_databases(cluster)
    try:
        await processes.start_all()
        await wait_ready(cluster, list(sets), processes, timeout_s=120.0)
        yield whole
    finally:
        await processes.stop_all()


async def give_databases(cluster: Cluster) -> None:
    """Empty databases for all embedded servers, copied: making one takes seconds, and others show that it works."""

    def give(data: Path) -> None:
        programs.own_directory(data)
        programs.run("/bin/cp", "-a", f"{programs.template()}/.", str(data))

    places = [cluster.data_of(s, r) / "postgres" for s in cluster.replica_sets for r in s.replica if r.dsn is None]
    programs.template()  # made once, before all of them want it
    await asyncio.gather(*(asyncio.to_thread(give, place) for place in places))


async def rows_everywhere(shop: ReplicaSet, sql: str) -> dict[str, list[tuple[Any, ...]]]:
    """The same query at every replica."""
    found = {}
    for name in shop.config.names:
        rows = await shop.fetch(sql, replica=name, after=shop.token if "@" not in shop.token else "")
        found[name] = [tuple(row.values()) for row in rows]
    return found
