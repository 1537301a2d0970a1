"""Dispatching of work among agents by routing transactions, beside the same without transactions and with a wait.

    tops bench dispatch [--quick] [--format json]

The scenario of Jergler, Zhang and Jacobsen: E invokes an instance (op1, to D), D assigns it to an agent (op2, to A), A
subscribes to its updates (op3), D unsubscribes (op4), and E publishes an update (op5) that only A may receive. As a
static transaction (`s_tx`), as a dynamic one without isolation (`d_tx_ni`) and with it (`d_tx`), and as regular
operations with a wait between op1 and op5 (`bl_wait`). The wait is calibrated as the authors did it: in steps of 50 ms,
the smallest with which every run is right.

A transaction takes until the update is at the agent and, with transactions, the commit is known to E. Brokers and
clients share one process; a link between brokers delays what arrives by the time that the workload names.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from adapters.embedded.free_ports import free_port
from bench.harness import say
from bench.machine import describe_machine, load_average, package_versions
from bench.results import Result
from bench.statistics import Better, Figure, percentile
from tops import EventType, Filter, Participant, Received, Site, StaticPlan
from tops.model.errors import InvariantBroken, TransactionAborted
from tops.runtime.broker_node import BrokerNode
from tops.runtime.config import parse_config
from tops.runtime.links.link import Link
from tops.server.broker import Broker

INVOKE = EventType("invoke", {"process": int, "instance": int, "agent": str}, routing="tree")
ASSIGN = EventType("assign", {"process": int, "instance": int, "agent": str}, routing="tree")
UPDATE = EventType("update", {"process": int, "instance": int}, routing="tree")
OVERLAYS: dict[int, dict[str, list[str]]] = {
    1: {"b1": []},
    3: {"b1": ["b2"], "b2": ["b3"], "b3": []},
    5: {"b1": ["b2", "b3"], "b2": ["b4"], "b3": ["b5"], "b4": [], "b5": []},
    9: {
        "b1": ["b2", "b3", "b4"],
        "b2": ["b5", "b6"],
        "b3": ["b7", "b8"],
        "b4": ["b9"],
        **{f"b{n}": [] for n in range(5, 10)},
    },
}
SYSTEMS = ("bl_wait", "s_tx", "d_tx_ni", "d_tx")
DELTA_S = 0.05
ARRIVES_S = 2.0
ATTEMPTS = 10


class Worker(Participant):
    """D or an agent: what it has, and which updates it got."""

    def __init__(self) -> None:
        super().__init__()
        self.site: Site
        self.has: dict[tuple[int, int], Any] = {}
        self.got: dict[tuple[int, int], asyncio.Event] = {}
        self.regular = 0

    def on_notify(self, event: Received) -> Awaitable[None] | None:
        key = (event.body["process"], event.body["instance"])
        if event.type == UPDATE.name:
            self.regular += 1
            self.got.setdefault(key, asyncio.Event()).set()
            return None
        return self.act(event, key) if event.tx is None else None

    async def act(self, event: Received, key: tuple[int, int]) -> None:
        """Without a transaction."""


def of(key: tuple[int, int]) -> Filter:
    """The updates of one instance."""
    return Filter.where("process", "=", key[0]).where("instance", "=", key[1])


class Agent(Worker):
    """Takes the instances that it is assigned."""

    async def on_tcm(self, tx: Any, event: Received) -> None:
        key = (event.body["process"], event.body["instance"])
        self.has[key] = await tx.subscribe(UPDATE, of(key), participant=self)

    async def act(self, event: Received, key: tuple[int, int]) -> None:
        self.has[key] = await self.site.subscribe_tree(UPDATE, of(key), participant=self)


class Dispatcher(Worker):
    """Gives instances away."""

    async def on_tcm(self, tx: Any, event: Received) -> None:
        await tx.send_tcm(ASSIGN, event.body)
        await tx.unsubscribe(self.has[event.body["process"], event.body["instance"]])

    async def act(self, event: Received, key: tuple[int, int]) -> None:
        await self.site.publish(ASSIGN, event.body)
        await self.has[key].unsubscribe()


class Scene:
    """One instantiation of the scenario: E, D and two agents, at brokers in turn."""

    def __init__(self, process: int, sites: Sequence[Site]) -> None:
        self.process, self.environment = process, sites[0]
        self.dispatcher, self.agents = Dispatcher(), (Agent(), Agent())
        for worker, site in zip((self.dispatcher, *self.agents), sites[1:], strict=True):
            worker.site = site
        self._instances = 0
        self._ready: list[int] = []

    async def set(self) -> None:
        """What everybody advertises and subscribes to beforehand."""
        mine = Filter.where("process", "=", self.process)
        for event_type in (INVOKE, UPDATE):
            await self.environment.advertise(event_type, where=mine)
        await self.dispatcher.site.advertise(ASSIGN, where=mine)
        await self.dispatcher.site.subscribe_tree(INVOKE, mine, participant=self.dispatcher)
        self.dispatcher.site.accept_plans(self.dispatcher)
        for agent in self.agents:
            wanted = mine.where("agent", "=", agent.site.name)
            await agent.site.subscribe_tree(ASSIGN, wanted, participant=agent)
            agent.site.accept_plans(agent)

    async def prepare(self, count: int) -> None:
        """So many instances that D has, known to all brokers."""
        for _ in range(count):
            self._instances += 1
            key = (self.process, self._instances)
            self.dispatcher.has[key] = await self.dispatcher.site.subscribe_tree(
                UPDATE, of(key), participant=self.dispatcher
            )
            self._ready.append(self._instances)
        last = (self.process, self._instances)
        while last not in self.dispatcher.got:  # an update of the last one arrives: all are in place
            await self.environment.publish(UPDATE, {"process": last[0], "instance": last[1]})
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        self.dispatcher.got.clear()

    def next(self) -> tuple[tuple[int, int], Agent]:
        """An instance, and the agent whose turn it is."""
        instance = self._ready.pop(0)
        return (self.process, instance), self.agents[instance % 2]

    async def dispatch(self, system: str, wait_s: float) -> tuple[float, bool]:
        """One transaction: how long it took, and whether the update reached the agent alone."""
        key, agent = self.next()
        body = {"process": key[0], "instance": key[1], "agent": agent.site.name}
        update = {"process": key[0], "instance": key[1]}
        arrived = agent.got.setdefault(key, asyncio.Event())
        began = time.perf_counter()
        if system == "bl_wait":
            await self.environment.publish(INVOKE, body)
            await asyncio.sleep(wait_s)
            await self.environment.publish(UPDATE, update)
        elif system == "s_tx":
            await self.environment.execute_plan(self._plan(key, agent, body, update))
        else:
            await self._dynamic(system == "d_tx", body, update)
        try:
            async with asyncio.timeout(ARRIVES_S):
                await arrived.wait()
        except TimeoutError:
            return time.perf_counter() - began, False
        return time.perf_counter() - began, key not in self.dispatcher.got

    async def _dynamic(self, isolated: bool, body: dict[str, Any], update: dict[str, Any]) -> None:
        for attempt in range(ATTEMPTS):
            try:
                async with self.environment.routing_transaction(isolated=isolated, attempt=attempt) as tx:
                    await tx.send_tcm(INVOKE, body)
                    await tx.publish(UPDATE, update)
                return
            except TransactionAborted as aborted:
                problem = aborted
        raise InvariantBroken(f"{ATTEMPTS} attempts failed: {problem}")

    def _plan(self, key: tuple[int, int], agent: Agent, body: dict[str, Any], update: dict[str, Any]) -> StaticPlan:
        plan, dispatcher = StaticPlan(), self.dispatcher.site.name
        invoke = plan.tcm(self.environment.name, INVOKE.name, body)
        assign = plan.tcm(dispatcher, ASSIGN.name, body, after=invoke)
        taken = plan.subscribe(agent.site.name, UPDATE.name, of(key), after=assign)
        plan.unsubscribe(dispatcher, UPDATE.name, self.dispatcher.has[key].key, after=taken)
        plan.publish(self.environment.name, UPDATE.name, update)
        return plan


@contextmanager
def delayed(delay_s: float) -> Iterator[None]:
    """What brokers send to each other is taken so much later, in order."""
    original = BrokerNode.take

    def later(self: BrokerNode, link: Link, messages: Any, size: int) -> float:
        if link.name in self.guards:
            return original(self, link, messages, size)
        asyncio.get_running_loop().call_later(delay_s, original, self, link, messages, size)
        return 0.0

    if delay_s:
        BrokerNode.take = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        BrokerNode.take = original  # type: ignore[method-assign]


@asynccontextmanager
async def overlay(brokers: int, delay_ms: int, scenes: int) -> AsyncIterator[list[Scene]]:
    """Brokers and the clients of so many scenes."""
    folder = Path(tempfile.mkdtemp(prefix="tops-dispatch-"))
    links = OVERLAYS[brokers]
    ports = {name: free_port() for name in links}
    tables = [
        f'[[broker]]\nname = "{name}"\nlisten = "127.0.0.1:{ports[name]}"\ndata = "{name}"\nlinks = {links[name]}'
        for name in links
    ]
    config = parse_config("\n".join(['[cluster]\nname = "bench"', *tables]), folder / "tops.toml")
    try:
        with delayed(delay_ms / 1000):
            async with AsyncExitStack() as stack:
                for name in links:
                    await stack.enter_async_context(Broker.run(config, name))
                made = []
                urls = [f"ws://127.0.0.1:{port}" for port in ports.values()]
                for process in range(scenes):
                    sites = []
                    for place, role in enumerate(("e", "d", "a1", "a2")):
                        url = urls[(process + place) % len(urls)]
                        site = Site.connect(url, name=f"{role}-{process}", cluster="bench")
                        sites.append(await stack.enter_async_context(site))
                    made.append(Scene(process, sites))
                    await made[-1].set()
                yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def measured(
    scenes: Sequence[Scene], system: str, wait_s: float, count: int, concurrent: int
) -> tuple[list[float], float, int]:
    """Latencies, transactions per second and how many went wrong; each scene runs so many at a time."""
    for scene in scenes:
        await scene.prepare(count)
    left = dict.fromkeys(scenes, count)
    taken: list[float] = []
    wrong = 0

    async def work(scene: Scene) -> None:
        nonlocal wrong
        while left[scene]:
            left[scene] -= 1
            seconds, right = await scene.dispatch(system, wait_s)
            taken.append(seconds)
            wrong += not right

    began = time.perf_counter()
    await asyncio.gather(*(work(scene) for scene in scenes for _ in range(concurrent)))
    return taken, len(taken) / (time.perf_counter() - began), wrong


async def calibrated(scenes: Sequence[Scene], count: int, highest_s: float) -> float:
    """The smallest wait, in steps, with which every run is right."""
    safe_s = highest_s
    while safe_s > 0:
        candidate_s = max(round(safe_s - DELTA_S, 3), 0.0)
        _, _, wrong = await measured(scenes, "bl_wait", candidate_s, count, 1)
        if wrong:
            return safe_s
        safe_s = candidate_s
    return safe_s


def run(quick: bool) -> Result:
    """All rows and figures as the harness's results object."""
    return uvloop.run(_run(quick))


async def _run(quick: bool) -> Result:
    count = 40 if quick else 1000
    rows: list[dict[str, Any]] = []
    pairs: dict[str, list[tuple[float, float]]] = {}
    for brokers in (3,) if quick else (1, 3, 5, 9):
        for delay_ms in (2,) if quick else (0, 2):
            async with overlay(brokers, delay_ms, 1) as scenes:
                await _base(rows, pairs, scenes, f"{brokers} brokers, {delay_ms} ms links", count, brokers == 3)
    for concurrent in (5,) if quick else (2, 5, 10):
        async with overlay(3, 2, 1) as scenes:
            await _sweep(rows, scenes, f"3 brokers, {concurrent} at a time", count, concurrent)
    for many in (2,) if quick else (2, 5, 10):
        async with overlay(3, 2, many) as scenes:
            await _sweep(rows, scenes, f"3 brokers, {4 * many} clients", count, 1)
    async with overlay(3, 2, 1) as scenes:
        await _beside_regular_traffic(pairs, scenes[0], 1.0 if quick else 5.0)
    figures: dict[str, Any] = {}
    for name, measured_pairs in pairs.items():
        better = Better.LOWER if "latency" in name else Better.HIGHER
        figures[name] = Figure.of_pairs(measured_pairs, better).record()
    return {
        "name": "dispatch",
        "machine": describe_machine(),
        "versions": package_versions(),
        "quick": quick,
        "left_out": ["overlays of 1, 5 and 9 brokers", "0 ms links", f"{count} of 1,000 runs"] if quick else [],
        "rows": rows,
        "figures": figures,
    }


async def _base(
    rows: list[dict[str, Any]],
    pairs: dict[str, list[tuple[float, float]]],
    scenes: Sequence[Scene],
    workload: str,
    count: int,
    compare: bool,
) -> None:
    """One transaction at a time, beside the smallest safe wait."""
    wait_s = await calibrated(scenes, count, 0.4)
    medians: dict[str, float] = {}
    for system in SYSTEMS:
        latencies, rate, wrong = await measured(scenes, system, wait_s, count, 1)
        medians[system] = median(latencies)
        rows.append(_row(system, workload, 1, latencies, rate, wrong, wait_s if system == "bl_wait" else None))
    if compare and "2 ms" in workload:
        for system in SYSTEMS[1:]:
            pairs.setdefault(f"{system}.c1.latency_vs_bl_wait", []).append((medians[system], medians["bl_wait"]))


async def _sweep(
    rows: list[dict[str, Any]], scenes: Sequence[Scene], workload: str, count: int, concurrent: int
) -> None:
    for system in SYSTEMS[1:]:
        latencies, rate, wrong = await measured(scenes, system, 0.0, count, concurrent)
        rows.append(_row(system, workload, concurrent * len(scenes), latencies, rate, wrong, None))


async def _beside_regular_traffic(pairs: dict[str, list[tuple[float, float]]], scene: Scene, seconds: float) -> None:
    """How many regular updates reach the dispatcher per second, with transactions beside and without."""
    await scene.prepare(1)
    key, _ = scene.next()
    for system in SYSTEMS[1:]:
        alone = await _regular(scene, key, seconds, None)
        beside = await _regular(scene, key, seconds, system)
        pairs.setdefault(f"{system}.regular_vs_none", []).append((beside, alone))


async def _regular(scene: Scene, key: tuple[int, int], seconds: float, system: str | None) -> float:
    """Updates per second that arrive, four transactions per second beside them."""
    await scene.prepare(8 * round(seconds + 1))
    before, began = scene.dispatcher.regular, time.perf_counter()
    beside = asyncio.create_task(_now_and_then(scene, system)) if system is not None else None
    while time.perf_counter() - began < seconds:
        for _ in range(20):
            await scene.environment.publish(UPDATE, {"process": key[0], "instance": key[1]})
        await asyncio.sleep(0.001)
    rate = (scene.dispatcher.regular - before) / (time.perf_counter() - began)
    if beside is not None:
        beside.cancel()
        await asyncio.wait([beside])
    return rate


async def _now_and_then(scene: Scene, system: str) -> None:
    while True:
        await scene.dispatch(system, 0.0)
        await asyncio.sleep(0.25)


def _row(
    system: str,
    workload: str,
    clients: int,
    latencies: Sequence[float],
    rate: float,
    wrong: int,
    wait_s: float | None,
) -> dict[str, Any]:
    ordered = sorted(seconds * 1000 for seconds in latencies)
    row = {
        "system": system,
        "workload": workload,
        "clients": clients,
        "tps": round(rate, 1),
        "p50_ms": round(percentile(ordered, 50), 2),
        "p95_ms": round(percentile(ordered, 95), 2),
        "p99_ms": round(percentile(ordered, 99), 2),
        "runs": len(ordered),
        "astray": wrong,
        "wait_ms": None if wait_s is None else round(wait_s * 1000),
        "load_average": load_average(),
    }
    waited = "" if wait_s is None else f", waits {wait_s * 1000:.0f} ms"
    say(f"  {workload}: {system} {row['p50_ms']} ms, {row['tps']}/s, {wrong} astray{waited}")
    return row
