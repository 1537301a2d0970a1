"""Small clusters in the test's own process: one real server with a database per replica; quick to start and to stop."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import asyncpg

from adapters import EmbeddedPostgres, Logins
from adapters.embedded.free_ports import free_port
from replication import ReplicaSet, connect
from replication.client.direct import DirectConnections
from replication.model.config import Cluster, login_keys
from replication.replica.agent import Agent
from tests.integration.replication.clusters import SCHEMA
from tests.support.logins import logins_in
from tests.support.polling import eventually
from tops.server.broker import Broker

Provisioner = Callable[[EmbeddedPostgres, str], Awaitable[Logins]]


class SmallCluster:
    """Brokers and agents as tasks; an agent is stopped and started by name."""

    connects_directly = True  # where a client does not say
    awaits_direct = False  # whether a client begins with its direct connections open

    def __init__(
        self,
        cluster: Cluster,
        server: EmbeddedPostgres,
        databases: dict[str, str],
        set_up: Callable[[str], Awaitable[Logins]],
    ) -> None:
        self.cluster, self.server, self.databases, self._set_up = cluster, server, databases, set_up
        self.agents: dict[str, Agent] = {}
        self._stacks: dict[str, AsyncExitStack] = {}
        self._brokers: dict[str, AsyncExitStack] = {}

    async def start_broker(self, name: str) -> None:
        stack = AsyncExitStack()
        await stack.enter_async_context(Broker.run(self.cluster.config, name))
        self._brokers[name] = stack

    async def stop_broker(self, name: str) -> None:
        await self._brokers.pop(name).aclose()

    async def start(self, *replicas: str, joined: bool = True) -> None:
        """With `joined`, returns when they take part in their set; a new set needs all of its replicas for that."""

        async def one(replica: str) -> None:
            async with AsyncExitStack() as stack:
                agent = await stack.enter_async_context(Agent.open(self.cluster, "shop", replica))
                self.agents[replica] = agent
                if joined:
                    await _joined(agent)
                self._stacks[replica] = stack.pop_all()

        await asyncio.gather(*map(one, replicas))

    async def stop(self, *replicas: str) -> None:
        for replica in replicas:
            self.agents.pop(replica, None)
        await asyncio.gather(*(self._stacks.pop(replica).aclose() for replica in replicas if replica in self._stacks))

    async def close(self) -> None:
        await self.stop(*list(self._stacks))
        for name in list(self._brokers):
            await self.stop_broker(name)

    async def sql(self, replica: str, sql: str) -> list[asyncpg.Record]:
        """Straight to a replica's database, past everything."""
        connection = await asyncpg.connect(self.server.dsn_for(self.databases[replica]))
        try:
            return await connection.fetch(sql)
        finally:
            await connection.close()

    async def script(self, replica: str, sql: str) -> None:
        """As `sql`, several statements."""
        connection = await asyncpg.connect(self.server.dsn_for(self.databases[replica]))
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    async def lose_database(self, replica: str) -> None:
        """An empty database in place of a stopped replica's, with what it had promised gone as well."""
        name = self.databases[replica]
        await _forget_promises(self.server, name)
        connection = await asyncpg.connect(self.server.dsn)
        try:
            await connection.execute(f'drop database "{name}" with (force)')
            await connection.execute(f'create database "{name}"')
        finally:
            await connection.close()
        await self._set_up(name)

    @asynccontextmanager
    async def connect(
        self, prefer: str | None = None, timeout_s: float = 15.0, direct: bool | None = None
    ) -> AsyncIterator[ReplicaSet]:
        direct = self.connects_directly if direct is None else direct
        async with connect(self.cluster.urls(), "shop", prefer=prefer, timeout_s=timeout_s, direct=direct) as shop:
            if self.awaits_direct and (connections := shop.direct) is not None:
                for replica in [r.replica.name for r in self.agents.values() if r.replica.read_listen != "off"]:
                    await eventually(partial(_is_open, connections, replica), what=f"a connection to {replica}")
            yield shop


async def _is_open(connections: DirectConnections, replica: str) -> bool:
    return connections.to(replica) is not None


async def _joined(agent: Agent) -> None:
    """Bounded, so that an agent that does not join fails its test with the reason."""
    try:
        async with asyncio.timeout(JOIN_S):
            await agent.wait_joined()
    except TimeoutError:
        raise AssertionError(f"{agent.replica.name} did not join within {JOIN_S:g} s: {agent.not_started}") from None


JOIN_S = 120.0
_made = 0
VOTE_S = 5.0  # a busy machine is no silent replica
LIMITS = f"heartbeat_s = 5\nsite_grace_s = 0.5\nvote_s = {VOTE_S}\nfinish_s = {VOTE_S}"
_free: dict[str, list[str]] = {}  # by server, databases of clusters that have ended: emptying one is cheap


async def _database(server: EmbeddedPostgres) -> str:
    """An empty database."""
    if free := _free.get(server.dsn):
        return free.pop()
    global _made
    _made += 1
    connection = await asyncpg.connect(server.dsn)
    try:
        await connection.execute(f'create database "db{_made}"')
    finally:
        await connection.close()
    return f"db{_made}"


async def _set_up(server: EmbeddedPostgres, schema: str, provisioner: Provisioner, database: str) -> Logins:
    """What a DBA does before an agent comes: tables and logins."""
    connection = await asyncpg.connect(server.dsn_for(database))
    try:
        await connection.execute(schema)
    finally:
        await connection.close()
    return await provisioner(server, database)


async def _forget_promises(server: EmbeddedPostgres, database: str) -> None:
    """Agents that stopped together may have prepared what nobody told them the end of, in a session that the server
    has not quite ended yet; a database can't be dropped with that."""
    connection = await asyncpg.connect(server.dsn_for(database))
    try:
        await connection.execute(
            "select pg_terminate_backend(pid, 30000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        for left in await connection.fetch("select gid from pg_prepared_xacts where database = current_database()"):
            await connection.execute(f"rollback prepared '{left['gid']}'")
    finally:
        await connection.close()


async def _give_back(server: EmbeddedPostgres, database: str) -> None:
    await _forget_promises(server, database)
    connection = await asyncpg.connect(server.dsn_for(database))
    try:
        # Every schema of a test, not only `public`: the next set would not start with unequal databases.
        for left in await connection.fetch(
            "select quote_ident(nspname) as name from pg_namespace"
            " where nspname !~ '^pg_' and nspname <> 'information_schema'"
        ):
            await connection.execute(f"drop schema {left['name']} cascade")
        await connection.execute("create schema public")
    finally:
        await connection.close()
    _free.setdefault(server.dsn, []).append(database)


@asynccontextmanager
async def small_cluster(
    server: EmbeddedPostgres,
    folder: Path,
    keys: str,
    *,
    replicas: int = 3,
    brokers: int = 1,
    schema: str = SCHEMA,
    limits: str = LIMITS,
    running: bool = True,
    provisioner: Provisioner = logins_in,
    replica_keys: str = "",
) -> AsyncIterator[SmallCluster]:
    """A set named `shop` whose replicas are in sync; its databases are new. Without `running` no agent is started.

    Tests change databases behind the set's back, which is allowed unless `keys` say otherwise."""
    if "direct_writes" not in keys:
        keys += '\ndirect_writes = "allow"'
    set_up = partial(_set_up, server, schema, provisioner)
    names = [f"r{number}" for number in range(1, replicas + 1)]
    databases = {name: await _database(server) for name in names}
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "schema.sql").write_text(schema)
    lines = ['[cluster]\nname = "test"']
    for number in range(1, brokers + 1):
        data = place / f"b{number}"
        lines.append(f'[[broker]]\nname = "b{number}"\nlisten = "127.0.0.1:{free_port()}"\ndata = "{data}"')
        lines.append('hosts = ["127.0.0.1"]')  # tests put wires in front of it, at ports of their own
        lines.append(f"[broker.limits]\n{limits}")
    lines.append(f'[[replica_set]]\nname = "shop"\nschema = "schema.sql"\n{keys}')
    for index, name in enumerate(names):
        logins = await set_up(databases[name])
        lines.append(f'[[replica_set.replica]]\nname = "{name}"\nbroker = "b{index % brokers + 1}"')
        lines.append(f"{login_keys(logins)}\n{replica_keys}")
    path = place / "tops.toml"
    path.write_text("\n".join(lines))
    small = SmallCluster(Cluster.load(path), server, databases, set_up)
    try:
        for broker in small.cluster.config.broker:
            await small.start_broker(broker.name)
        if running:
            await small.start(*names)
            async with small.connect() as shop:
                await shop.wait_in_sync()
        yield small
    finally:
        await small.close()
        for database in databases.values():
            await _give_back(server, database)
