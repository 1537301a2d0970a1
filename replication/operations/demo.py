"""The demo: real PostgreSQL servers, every policy in turn, a server killed under load, and a look at what is left.

Everything is real but small: brokers and agents run in this process, the servers are programs of their own.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import msgspec

from adapters import EmbeddedPostgres, Logins, provision
from adapters.embedded.free_ports import free_port
from adapters.postgres.copy.scripts import run_script
from replication.client.replica_set import ReplicaSet, connect
from replication.model.config import Cluster, login_keys
from replication.replica.agent import Agent
from replication.replica.databases import QUICK_RECOVERY
from replication.rpc.rejections import WriteRejected
from tops.model.errors import NotReachable, OutcomeUnknown
from tops.server.broker import Broker

ACCOUNTS, BALANCE = 20, 1_000
WRITERS = 6
HEALTHY_S, DOWN_S, AFTER_S = 0.8, 2.5, 0.6  # longer than an epoch waits for one that has promised
POLICIES = ("write-all", "quorum", "combined", "primary-site", "peer-to-peer", "serializable")
TABLES = ("accounts", "transfers")
SCHEMA = """
create table accounts (id int primary key, balance bigint not null);
create table transfers (id text primary key, source int not null, target int not null, amount bigint not null);
"""
Say = Callable[[str], None]


class Report(msgspec.Struct, frozen=True):
    """What one policy did."""

    policy: str
    acknowledged: int
    while_down: int  # acknowledged while a server was dead
    rejected: int
    unknown: int
    per_second: float
    caught_up_s: float
    lost: int
    balance_kept: bool
    equal: bool


async def run_demo(folder: Path, policies: tuple[str, ...], replicas: int, say: Say) -> list[Report]:
    """Run the policies one after the other; raises TopsError if a part can't start."""
    began = time.monotonic()
    servers = await EmbeddedPostgres.start_many(replicas, settings=QUICK_RECOVERY)
    try:
        say(f"{replicas} PostgreSQL servers run ({time.monotonic() - began:.1f} s)")
        for server in servers:
            await _databases(server, policies)
        logins = {policy: [await _logins(server, policy) for server in servers] for policy in policies}
        cluster = Cluster.load(_write_config(folder, logins))
        reports = []
        async with AsyncExitStack() as stack:
            for broker in cluster.config.broker:
                await stack.enter_async_context(Broker.run(cluster.config, broker.name))
            say(f"{len(cluster.config.broker)} brokers run at {', '.join(cluster.urls())}")
            for policy in policies:
                reports.append(await _run_policy(cluster, policy, servers, say))
        return reports
    finally:
        await asyncio.gather(*(_end(server) for server in servers))


async def _end(server: EmbeddedPostgres) -> None:
    if server.running:
        await server.crash("kill")  # its data is thrown away: nothing is worth an orderly end
    await server.stop()


async def _databases(server: EmbeddedPostgres, policies: tuple[str, ...]) -> None:
    connection = await asyncpg.connect(server.dsn)
    try:
        for policy in policies:
            await connection.execute(f'create database "{_name(policy)}"')
    finally:
        await connection.close()


async def _logins(server: EmbeddedPostgres, policy: str) -> Logins:
    """A database's tables, and the logins that agents and clients use instead of the server's superuser."""
    dsn = server.dsn_for(_name(policy))
    await run_script(dsn, SCHEMA)
    return await provision(dsn, _name(policy), TABLES)


def _name(policy: str) -> str:
    return policy.replace("-", "_")


def _write_config(folder: Path, logins: Mapping[str, Sequence[Logins]]) -> Path:
    lines = ['[cluster]\nname = "demo"']
    for number in (1, 2):
        lines.append(f'[[broker]]\nname = "b{number}"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./b{number}"')
    for policy, of_replicas in logins.items():
        lines.append(f'[[replica_set]]\nname = "{_name(policy)}"\npolicy = "{policy}"')
        lines.append(f"tables = {list(TABLES)}")
        lines += {"combined": ['sync = ["r1", "r2"]'], "primary-site": ['primary = "r1"']}.get(policy, [])
        for number, of_replica in enumerate(of_replicas, start=1):
            lines.append(f'[[replica_set.replica]]\nname = "r{number}"\nbroker = "b{(number - 1) % 2 + 1}"')
            lines.append(login_keys(of_replica))
    path = folder / "tops.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


class _Tally:
    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.rejected = self.unknown = self.while_down = 0
        self.down = False
        self.stop = asyncio.Event()


@asynccontextmanager
async def _agents(cluster: Cluster, name: str) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        config = cluster.replica_set(name)
        await asyncio.gather(
            *(stack.enter_async_context(Agent.run(cluster, name, replica)) for replica in config.names)
        )
        yield


async def _run_policy(cluster: Cluster, policy: str, servers: list[EmbeddedPostgres], say: Say) -> Report:
    name = _name(policy)
    async with _agents(cluster, name), connect(cluster.urls(), name, timeout_s=5.0) as bank:
        await bank.wait_in_sync()
        async with bank.transaction() as tx:
            for account in range(ACCOUNTS):
                await tx.insert("accounts", {"id": account, "balance": BALANCE})
        await bank.wait_in_sync()
        say(f"{policy}: {ACCOUNTS} accounts at {len(servers)} replicas; {WRITERS} writers begin")
        tally, began = _Tally(), time.monotonic()
        writers = [asyncio.ensure_future(_write(bank, tally, number)) for number in range(WRITERS)]
        await asyncio.sleep(HEALTHY_S)
        await servers[-1].crash("kill")
        tally.down = True
        say(f"{policy}: the server of r{len(servers)} is killed (kill -9)")
        await asyncio.sleep(DOWN_S)
        await servers[-1].start()
        tally.down, back = False, time.monotonic()
        await asyncio.sleep(AFTER_S)
        tally.stop.set()
        await asyncio.gather(*writers)
        wrote_s = time.monotonic() - began
        await bank.wait_in_sync(30.0)
        caught_up_s = time.monotonic() - back
        report = await _report(bank, policy, tally, wrote_s, caught_up_s)
        state = "equal, row for row" if report.equal else "DIFFERENT"
        say(f"{policy}: r{len(servers)} caught up {caught_up_s:.1f} s after its return; replicas are {state}")
        return report


async def _write(bank: ReplicaSet, tally: _Tally, writer: int) -> None:
    step, pick = 0, random.Random(writer)
    while not tally.stop.is_set():
        step += 1
        source, target = pick.sample(range(ACCOUNTS), 2)
        ident, down = f"{writer}-{step}", tally.down
        try:
            async with bank.transaction() as tx:
                await tx.insert("transfers", {"id": ident, "source": source, "target": target, "amount": 1})
                await tx.update("accounts", key={"id": source}, add={"balance": -1})
                await tx.update("accounts", key={"id": target}, add={"balance": 1})
        except OutcomeUnknown:
            tally.unknown += 1
        except (WriteRejected, NotReachable):
            tally.rejected += 1
            await asyncio.sleep(0.05)
        else:
            tally.acknowledged.append(ident)
            tally.while_down += down and tally.down
        await asyncio.sleep(0)


async def _report(bank: ReplicaSet, policy: str, tally: _Tally, wrote_s: float, caught_up_s: float) -> Report:
    copies = []
    for replica in bank.config.names:
        accounts = await bank.fetch("select id, balance from accounts order by id", replica=replica)
        transfers = await bank.fetch("select * from transfers order by id", replica=replica)
        copies.append((accounts, transfers))
    accounts, transfers = copies[0]
    there = {row["id"] for row in transfers}
    return Report(
        policy=policy,
        acknowledged=len(tally.acknowledged),
        while_down=tally.while_down,
        rejected=tally.rejected,
        unknown=tally.unknown,
        per_second=len(tally.acknowledged) / wrote_s,
        caught_up_s=caught_up_s,
        lost=len(set(tally.acknowledged) - there),
        balance_kept=sum(row["balance"] for row in accounts) == ACCOUNTS * BALANCE,
        equal=all(copy == copies[0] for copy in copies),
    )


def quiet() -> None:
    """The demo tells its own story; what a crash does to connections is expected here."""
    logging.getLogger("tops").setLevel(logging.CRITICAL)
    with suppress(AttributeError):
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
