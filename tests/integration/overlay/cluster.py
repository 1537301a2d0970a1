"""Real broker processes in any topology, to be killed, paused and started again."""

import asyncio
import itertools
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from adapters.embedded.free_ports import free_port
from tests.support.polling import eventually
from tops import EventType, Participant, Received, Scope, Site
from tops.core.participant.participation import SiteOptions
from tops.http.client import get_json
from tops.model.errors import NotReachable
from tops.model.ids import TxId
from tops.protocol.messages import TxSpec

ROOT = Path(__file__).parents[3]
START_S = 180.0
QUICK = SiteOptions(renew_s=0.3, quiet_s=1.0, doubt_s=0.3, retry_s=0.3, give_up_s=60.0)

Links = Mapping[str, Sequence[str]]
TOPOLOGIES: dict[str, Links] = {
    "single": {"b1": []},
    "chain": {"b1": ["b2"], "b2": ["b3"], "b3": ["b4"], "b4": ["b5"], "b5": []},
    "star": {"b1": ["b2", "b3", "b4", "b5"], "b2": [], "b3": [], "b4": [], "b5": []},
    "mesh": {
        "b1": ["b2", "b3", "b4", "b5"],
        "b2": ["b3", "b4", "b5"],
        "b3": ["b4", "b5"],
        "b4": ["b5"],
        "b5": [],
    },
}


class Cluster:
    """Broker processes of one configuration file."""

    def __init__(
        self,
        directory: Path,
        links: Links,
        extra: str = "",
        cluster_extra: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory, self.names = directory, list(links)
        self.environment = {**os.environ, **(environment or {})}
        self.ports = {name: free_port() for name in links}
        self.file = directory / "tops.toml"
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        tables = [f'[cluster]\nname = "test"\n{cluster_extra}\n']
        for name, others in links.items():
            tables.append(
                f'[[broker]]\nname = "{name}"\nlisten = "127.0.0.1:{self.ports[name]}"\n'
                f'data = "data/{name}"\nlinks = {list(others)!r}\n{extra}\n'
            )
        self.file.write_text("\n".join(tables))

    def url(self, name: str) -> str:
        return f"ws://127.0.0.1:{self.ports[name]}"

    @property
    def urls(self) -> list[str]:
        return [self.url(name) for name in self.names]

    async def start(self, *names: str) -> None:
        for name in names or self.names:
            with (self.directory / f"{name}.log").open("ab") as log:
                self.processes[name] = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tops",
                    "broker",
                    "run",
                    "-c",
                    str(self.file),
                    "--name",
                    name,
                    cwd=ROOT,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                )
        await asyncio.gather(*(self.ready(name) for name in names or self.names))

    async def ready(self, name: str) -> None:
        """The broker serves, and its links to other brokers that run are up."""

        async def linked() -> bool:
            process = self.processes[name]
            assert process.returncode is None, (self.directory / f"{name}.log").read_text()[-2000:]
            topology = await self.get(name, "/v1/topology")
            if topology is None:
                return False
            neighbours = next(b["links"] for b in topology["brokers"] if b["name"] == name)
            up = {link["peer"] for link in topology["links"] if link["connected"]}
            return all(n in up for n in neighbours if n in self.running())

        await eventually(linked, START_S)

    def running(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.returncode is None]

    async def get(self, name: str, path: str) -> Any:
        """A view of one broker; None if it does not answer."""
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
                _, content = await get_json(session, self.url(name), path)
                return content
        except NotReachable:
            return None

    async def kill(self, name: str) -> None:
        process = self.processes[name]
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)

    async def stop(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes.values():
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    @asynccontextmanager
    async def site(self, name: str, broker: int | str = 0, **options: Any) -> AsyncIterator[Site]:
        """A site at one broker; brokers are counted round and round."""
        home = broker if isinstance(broker, str) else self.names[broker % len(self.names)]
        urls = [self.url(home), *(url for url in self.urls if url != self.url(home))]
        async with Site.connect(
            urls,
            name=name,
            cluster="test",
            **{"options": QUICK, "timeout_s": 30.0, "heartbeat_s": 2.0, **options},
        ) as site:
            yield site


_count = itertools.count()


def event_type(name: str = "orders", *, durable: bool = False) -> EventType:
    """A type that no other test uses."""
    unique = f"{name}-{os.getpid()}-{next(_count)}-{secrets.token_hex(3)}"
    return EventType(unique, {"id": int, "total": int}, optional=["total"], durable=durable)


class Recorder(Participant):
    """Writes down what happens to it."""

    def __init__(self, scope: Scope = Scope.DISTRIBUTED, *, reject: str = "") -> None:
        super().__init__()
        self.scope, self.reject = scope, reject
        self.ordinary: list[Received] = []
        self.events: dict[TxId, list[int]] = {}
        self.prepared: list[TxId] = []
        self.committed: list[TxId] = []
        self.aborted: dict[TxId, str] = {}
        self.compensated: list[int] = []
        self.joined: dict[TxId, TxSpec] = {}

    def on_join(self, tx: TxId, spec: TxSpec) -> Scope:
        self.joined[tx] = spec
        return self.scope

    def on_notify(self, event: Received) -> None:
        self.ordinary.append(event)

    def on_notify_tx(self, event: Received) -> None:
        assert event.tx is not None
        self.events.setdefault(event.tx, []).append(event.body["id"])
        if self.reject == "notify":
            raise ValueError("I can't take this")

    async def on_prepare(self, tx: TxId) -> None:
        if self.reject == "prepare":
            raise ValueError("I do not promise")
        self.prepared.append(tx)

    async def on_commit(self, tx: TxId) -> None:
        self.committed.append(tx)

    async def on_abort(self, tx: TxId, reason: str) -> None:
        self.aborted[tx] = reason

    def on_compensate(self, event: Received) -> None:
        self.compensated.append(event.body["id"])

    def ids(self) -> list[int]:
        return [event.body["id"] for event in self.ordinary]
