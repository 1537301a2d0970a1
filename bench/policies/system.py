"""A TOPS policy as a system under test, on embedded servers with the settings of the peers'.

The servers are programs of their own in any case. `ProcessCluster` runs every broker and every replica's agent in its
own process, as `tops up` does; `OneProcess` runs them all in the harness's own, beside the clients.

Clients are coroutines of the harness's process, as the clients of the peers are. They share one connection to a
broker, which the API allows and an application would do; a peer's client has a connection of its own, because a
connection to PostgreSQL carries one transaction at a time. With `own_links` every client of ours has its own as well.
"""

import asyncio
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

from adapters import EmbeddedPostgres, Logins
from adapters.embedded.free_ports import free_port
from bench.peers.postgres import POLL_S, SETTINGS, fetch_int, fetch_text, load_accounts, node_totals
from bench.policies.catalog import PolicyCase
from bench.policies.client import TopsClient
from bench.policies.observation import BrokerFigures, broker_figures
from bench.policies.tracing import VARIABLE, TraceReader
from bench.systems import Client, System, Traffic
from bench.workloads import Dataset, Totals
from replication import ReplicaSet, connect
from replication.model.config import Cluster, login_keys
from replication.operations.processes import Processes, wait_ready
from replication.replica.agent import Agent
from tops.server.broker import Broker

SET = "bench"
TABLES = '["accounts", "transfers", "entries"]'
CONNECT_S = 30.0


class PolicySystem(System):
    """What both ways of running share: servers, data, clients, and how to look at the replicas."""

    def __init__(self, case: PolicyCase, name: str, runs: str, replicas: int, *, own_links: bool = False) -> None:
        self.name, self.promise = name, case.promise
        links = "a link per client" if own_links else "clients share a link"
        self.description = f"TOPS {case.name} on {replicas} PostgreSQL, {runs}, {links}"
        self.case, self.replicas, self._own_links = case, replicas, own_links
        self.servers: dict[str, EmbeddedPostgres] = {}
        self.cluster: Cluster
        self._folder: Path | None = None
        self._stack = AsyncExitStack()
        self._sets: list[ReplicaSet] = []  # one per replica that clients write to
        self._turns = count()

    async def start(self) -> None:
        servers = await EmbeddedPostgres.start_many(self.replicas, settings=SETTINGS)
        self.servers.update({f"r{number}": server for number, server in enumerate(servers, start=1)})

    async def load(self, dataset: Dataset) -> None:
        """Every server gets the data before its agent starts: a new set begins with what is there."""
        await self.load_rows(dataset)
        self._folder = Path(tempfile.mkdtemp(prefix="tops-bench-"))
        logins = {name: await server.provision(SET, "*") for name, server in self.servers.items()}
        self.cluster = Cluster.load(self._written(self._folder, logins))
        await self.launch(self._folder, self._stack)
        writers = list(self.servers)[: self.case.writers]
        for name in writers:
            prefer = name if self.case.writers > 1 else None
            linked = connect(self.cluster.urls(), SET, prefer=prefer, timeout_s=CONNECT_S)
            self._sets.append(await self._stack.enter_async_context(linked))
        await self._sets[0].wait_in_sync()

    async def load_rows(self, dataset: Dataset) -> None:
        await asyncio.gather(*(load_accounts(server.dsn, dataset) for server in self.servers.values()))

    @abstractmethod
    async def launch(self, folder: Path, stack: AsyncExitStack) -> None:
        """Bring brokers and agents up; `stack` ends them."""

    def _written(self, folder: Path, logins: Mapping[str, Logins]) -> Path:
        sync = str(list(self.servers)[:-1]).replace("'", '"')
        lines = [
            '[cluster]\nname = "bench"',
            f'[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./b1"',
            f'[[replica_set]]\nname = "{SET}"\ntables = {TABLES}\n{self.case.keys.format(sync=sync)}',
        ]
        for name, of_replica in logins.items():
            lines.append(f'[[replica_set.replica]]\nname = "{name}"\nbroker = "b1"\n{login_keys(of_replica)}')
        path = folder / "tops.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    async def client(self) -> Client:
        turn = next(self._turns)
        if self._own_links:
            return await OwnLinkClient.connect(self.cluster.urls())
        return TopsClient(self._sets[turn % len(self._sets)])

    async def settle(self) -> None:
        """Every replica has applied the log to its end, and holds nothing that is not logged yet."""
        while not await self._is_settled():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(POLL_S)

    async def _is_settled(self) -> bool:
        status = await self._sets[0].status()
        head = status["coordinator"].get("head")
        return head is not None and all(
            not r.get("unreachable") and r["position"] >= head and not r["unpublished"] for r in status["replicas"]
        )

    async def totals(self) -> Mapping[str, Totals]:
        return {name: await node_totals(server.dsn) for name, server in self.servers.items()}

    async def stop(self) -> None:
        self._sets.clear()
        await self._stack.aclose()
        await asyncio.gather(*(server.stop() for server in self.servers.values()))
        self.servers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def processes(self) -> Mapping[str, int]:
        return {f"database {name}": server.pid for name, server in self.servers.items()}

    async def fsyncs(self) -> int | None:
        """Of the servers' logs and of the broker's journal."""
        servers = [await fetch_int(s.dsn, "select wal_sync from pg_stat_wal") for s in self.servers.values()]
        return sum(servers) + (await self._broker()).fsyncs

    async def traffic(self) -> Traffic | None:
        """What passed the broker, in and out: every message of the protocol does."""
        broker = await self._broker()
        return Traffic(broker.messages, broker.bytes)

    async def _broker(self) -> BrokerFigures:
        return await broker_figures(self.cluster.urls()[0])

    async def versions(self) -> Mapping[str, str]:
        return {"postgresql": await fetch_text(self.servers["r1"].dsn, "show server_version")}


class ProcessCluster(PolicySystem):
    """A broker process and an agent process per replica."""

    def __init__(
        self,
        case: PolicyCase,
        replicas: int = 3,
        *,
        name: str | None = None,
        own_links: bool = False,
        profile: bool = False,
    ) -> None:
        runs = f"1 broker process, {replicas} agent processes"
        super().__init__(case, name or case.name, runs, replicas, own_links=own_links)
        self._profile = profile
        self._reader: TraceReader | None = None
        self._processes: Processes | None = None

    async def launch(self, folder: Path, stack: AsyncExitStack) -> None:
        if self._profile:
            traces = folder / "traces"
            traces.mkdir()
            self._reader = TraceReader(traces, self.replicas, self.case)
            processes = Processes(
                self.cluster,
                folder / "logs",
                "warning",
                module="bench.policies.traced",
                environment={VARIABLE: str(traces)},
            )
        else:
            processes = Processes(self.cluster, folder / "logs", "warning")
        stack.push_async_callback(processes.stop_all)
        self._processes = processes
        await processes.start_all()
        await wait_ready(self.cluster, [SET], processes)

    def processes(self) -> Mapping[str, int]:
        assert self._processes is not None, "the cluster was not loaded"
        parts = {part: self._processes.pid(part) for part in self._processes.parts}
        named = {"broker" if part == "broker/b1" else part.replace(f"{SET}/", "agent "): p for part, p in parts.items()}
        return {**named, **super().processes()}

    def phases(self, operations: int) -> Mapping[str, float]:
        """With `profile`; `waiting` is what the parts' own time leaves of a client's latency."""
        return self._reader.phases(operations) if self._reader is not None else {}


class OneProcess(PolicySystem):
    """Broker and agents in the process of the clients, still speaking over their links."""

    def __init__(self, case: PolicyCase, replicas: int = 3) -> None:
        super().__init__(case, f"{case.name}_in_process", "broker and agents in the clients' process", replicas)

    async def launch(self, folder: Path, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(Broker.run(self.cluster.config, "b1"))
        # One after the other on the stack, since a stack is not for several tasks; the set starts when all are there.
        agents = [await stack.enter_async_context(Agent.open(self.cluster, SET, name)) for name in self.servers]
        for agent in agents:
            await agent.wait_joined()


class OwnLinkClient(TopsClient):
    """A client with a connection of its own."""

    def __init__(self, replica_set: ReplicaSet, stack: AsyncExitStack) -> None:
        super().__init__(replica_set)
        self._stack = stack

    @classmethod
    async def connect(cls, urls: list[str]) -> "OwnLinkClient":
        async with AsyncExitStack() as stack:
            replica_set = await stack.enter_async_context(connect(urls, SET, timeout_s=CONNECT_S))
            return cls(replica_set, stack.pop_all())

    async def close(self) -> None:
        await self._stack.aclose()
