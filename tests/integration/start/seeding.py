"""Sets of embedded servers whose first replica holds data before the set is started."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import asyncpg

from adapters import EmbeddedPostgres
from adapters.embedded.free_ports import free_port
from replication.model.config import Cluster
from replication.replica.agent import Agent
from tests.integration.replication.clusters import give_databases
from tops.server.broker import Broker

LINES = """
[cluster]
name = "test"
[[broker]]
name = "b1"
listen = "127.0.0.1:{port}"
data = "./data/b1"
[[replica_set]]
name = "shop"
{keys}
"""


class SeededSet:
    """Agents in this process, each with an embedded server."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.agents: dict[str, Agent] = {}
        self._stacks: dict[str, AsyncExitStack] = {}

    async def before(self, replica: str, script: str) -> None:
        """Run a script on a replica's server while no agent runs it."""
        config = self.cluster.replica_set("shop")
        data = self.cluster.data_of(config, config.replica_named(replica)) / "postgres"
        async with EmbeddedPostgres(data) as server:
            await _run(server.dsn, script)

    async def start(self, *replicas: str, overwrite: bool = False) -> None:
        for replica in replicas:
            stack = AsyncExitStack()
            opened = Agent.open(self.cluster, "shop", replica, overwrite=overwrite)
            self.agents[replica] = await stack.enter_async_context(opened)
            self._stacks[replica] = stack

    async def joined(self) -> None:
        for agent in self.agents.values():
            await agent.wait_joined()

    async def stop(self, *replicas: str) -> None:
        for replica in replicas:
            del self.agents[replica]
            await self._stacks.pop(replica).aclose()

    async def fetch(self, replica: str, sql: str) -> list[asyncpg.Record]:
        return await _run(self.agents[replica].database.admin_dsn, sql)

    async def close(self) -> None:
        await self.stop(*list(self.agents))


async def _run(dsn: str, sql: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(dsn)
    try:
        if ";" in sql:
            await connection.execute(sql)
            return []
        return await connection.fetch(sql)
    finally:
        await connection.close()


def listed(replicas: int) -> str:
    return "\n".join(f'[[replica_set.replica]]\nname = "r{number}"\nbroker = "b1"' for number in range(1, replicas + 1))


@asynccontextmanager
async def seeded_set(folder: Path, keys: str, replicas: int = 3) -> AsyncIterator[SeededSet]:
    """A set of which nothing runs but its broker."""
    path = folder / "tops.toml"
    path.write_text(LINES.format(port=free_port(), keys=keys) + listed(replicas))
    cluster = Cluster.load(path)
    await give_databases(cluster)
    seeded = SeededSet(cluster)
    async with Broker.run(cluster.config, "b1"):
        try:
            yield seeded
        finally:
            await seeded.close()
