"""Publish and deliver through a broker, beside NATS; and what one broker holds: sites, filters, memory.

Both sides of a figure are measured in the same run, alternating: one publisher, three subscribers in processes of
their own, events of 100 bytes. Ours are on disk when they are confirmed; JetStream's are not.
"""

import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

from adapters.embedded.free_ports import free_port
from bench.harness import say
from bench.machine import describe_machine, package_versions
from bench.overlay_site import CLUSTER, ITEM, PAYLOAD
from bench.peers.nats import (
    BATCH,
    PAYLOAD_BYTES,
    SUBSCRIBERS,
    Delivery,
    NatsServer,
    core_delivery,
    jetstream_delivery,
)
from bench.results import Result, spread
from bench.statistics import Better, Figure, percentile
from bench.systems import BenchmarkFailed, SystemUnavailable
from tops import EventType, Filter, Site
from tops.core.overlay.filter_index import FilterIndex

RECEIVE_TIMEOUT_S = 120.0
START_TIMEOUT_S = 30.0
FILTERS = (100, 300, 1000, 3000, 10_000)
PRICES = 100_000
CLIENTS = {"publish": BATCH, "f256": 256, "f1": 1}  # events that are on their way at once, by figure


class OurBroker:
    """A broker process with an empty journal in a temporary directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        port = free_port()
        self.url = f"ws://127.0.0.1:{port}"
        (directory / "tops.toml").write_text(
            f'[cluster]\nname = "{CLUSTER}"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{port}"\ndata = "data"\n'
            "[broker.limits]\nconnections_per_s = 100000\nwaiting_per_address = 10000\nheartbeat_s = 60\n"
        )
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        with (self.directory / "broker.log").open("wb") as log:
            command = ["-m", "tops", "broker", "run", "-c", str(self.directory / "tops.toml"), "--name", "b1"]
            self.process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        host, _, port = self.url.removeprefix("ws://").partition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return
            except OSError:
                if time.monotonic() > deadline or self.process.returncode is not None:
                    raise BenchmarkFailed(f"the broker does not start: see {self.directory}/broker.log") from None
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@asynccontextmanager
async def our_broker() -> AsyncIterator[OurBroker]:
    with tempfile.TemporaryDirectory(prefix="tops-bench-") as directory:
        broker = OurBroker(Path(directory))
        try:
            await broker.start()
            yield broker
        finally:
            await broker.stop()


class Helpers:
    """Processes that say `ready`, and later a line more."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self.processes = processes

    async def line(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                line = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            raise BenchmarkFailed(f"a site lacks events after {RECEIVE_TIMEOUT_S:.0f} s") from None
        if not line:
            raise BenchmarkFailed("a site ended before it had all events")
        return line

    async def lines(self) -> list[str]:
        return list(await asyncio.gather(*(self.line(process) for process in self.processes)))


@asynccontextmanager
async def helpers(role: str, url: str, type_name: str, number: int, count: int) -> AsyncIterator[Helpers]:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "bench.overlay_site", role, url, type_name, str(number)]
    started = Helpers(
        [
            await asyncio.create_subprocess_exec(*command, f"{role}{i}-{secrets.token_hex(3)}", stdin=pipe, stdout=pipe)
            for i in range(count)
        ]
    )
    try:
        await started.lines()
        yield started
    finally:
        for process in started.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def our_delivery(broker: OurBroker, events: int) -> Delivery:
    """Not durable: publish, and wait for the broker after every `BATCH` events."""
    event_type = EventType(f"bench-{secrets.token_hex(4)}", PAYLOAD)
    body = {"payload": b"x" * PAYLOAD_BYTES}
    waits_s: list[float] = []
    async with Site.connect(broker.url, name="publisher", cluster=CLUSTER) as site:
        await site.advertise(event_type)
        async with helpers("subscriber", broker.url, event_type.name, events, SUBSCRIBERS) as subscribers:
            began = time.monotonic()
            for first in range(0, events, BATCH):
                batch_began = time.monotonic()
                for _ in range(min(BATCH, events - first)):
                    await site.publish(event_type, body)
                await site.flush()
                waits_s.append(time.monotonic() - batch_began)
            published = time.monotonic()
            received = max(map(float, await subscribers.lines()))
    return _delivery(events, began, published, received, waits_s)


async def our_durable_delivery(broker: OurBroker, events: int, in_flight: int) -> Delivery:
    """Durable and confirmed: at most `in_flight` events wait to be on disk at any time."""
    event_type = EventType(f"bench-{secrets.token_hex(4)}", PAYLOAD, durable=True)
    waits_s: list[float] = []
    async with Site.connect(broker.url, name="publisher", cluster=CLUSTER) as site:
        await site.advertise(event_type)
        async with helpers("log-subscriber", broker.url, event_type.name, events, SUBSCRIBERS) as subscribers:
            remaining = iter(range(events))
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(in_flight):
                    group.create_task(_publish_confirmed(site, event_type, remaining, waits_s))
            published = time.monotonic()
            received = max(map(float, await subscribers.lines()))
    return _delivery(events, began, published, received, waits_s)


async def _publish_confirmed(site: Site, event_type: EventType, remaining: Iterator[int], waits_s: list[float]) -> None:
    body = {"payload": b"x" * PAYLOAD_BYTES}
    for _ in remaining:
        began = time.monotonic()
        await site.publish(event_type, body)
        waits_s.append(time.monotonic() - began)


def _delivery(events: int, began: float, published: float, received: float, waits_s: list[float]) -> Delivery:
    ordered = sorted(waits_s)
    return Delivery(
        events=events,
        published_per_s=events / (published - began),
        received_per_s=events / (received - began),
        p50_ms=percentile(ordered, 50) * 1e3,
        p95_ms=percentile(ordered, 95) * 1e3,
    )


def _low(i: int) -> int:
    return i * 7 % PRICES


# The i-th filter of each workload. In the last one the value alone turns few events away: one in eight filters has it.
WORKLOADS: dict[str, Callable[[int], Filter]] = {
    "selective_equality": lambda i: Filter.where("kind", "=", f"k{i}"),
    "ranges": lambda i: Filter.where("price", "range", (_low(i), _low(i) + 10)),
    "few_values_and_range": lambda i: Filter.where("colour", "=", f"c{i % 8}").where(
        "price", "range", (_low(i), _low(i) + 10)
    ),
}


def matching_curve() -> dict[str, dict[str, float]]:
    """What one event costs to match, in microseconds of processor time, against ever more filters."""
    rng = random.Random(7)
    bodies = [
        {"price": rng.randrange(PRICES), "kind": f"k{rng.randrange(FILTERS[-1])}", "colour": f"c{rng.randrange(8)}"}
        for _ in range(500)
    ]
    return {
        f"match_us.{workload}.{number}": spread(_matching_us(filter_of, number, bodies))
        for workload, filter_of in WORKLOADS.items()
        for number in FILTERS
    }


def _matching_us(filter_of: Callable[[int], Filter], number: int, bodies: list[dict[str, Any]]) -> list[float]:
    index: FilterIndex[int] = FilterIndex()
    for i in range(number):
        index.add(i, filter_of(i))
    index.match(bodies[0])  # what was added is put in order by the first search
    found = []
    for _ in range(3):
        began = time.process_time()
        for body in bodies:
            index.match(body)
        found.append((time.process_time() - began) / len(bodies) * 1e6)
    return found


async def capacity(sites: int) -> dict[str, dict[str, float]]:
    """Memory of one broker per idle site with five filtered subscriptions, and whether it still delivers."""
    async with our_broker() as broker, Site.connect(broker.url, name="publisher", cluster=CLUSTER) as site:
        item = EventType("items", ITEM)
        await site.advertise(item)
        before = broker.resident_bytes()
        async with helpers("crowd", broker.url, "items", sites // 4, 4):
            grown = broker.resident_bytes() - before
            began = time.monotonic()
            for i in range(1000):
                await site.publish(item, {"id": i, "price": i * 97 % 100_000, "kind": f"k{i % 50}"})
            await site.flush()
            taken_us = (time.monotonic() - began) * 1e3
        return {
            "sites": spread([float(sites)]),
            "subscriptions": spread([float(sites * 5)]),
            "bytes_per_idle_site": spread([grown / sites]),
            "us_per_event_with_all_subscriptions": spread([taken_us]),
        }


def _row(system: str, clients: int, deliveries: list[Delivery], received: bool) -> dict[str, Any]:
    rates = [d.received_per_s if received else d.published_per_s for d in deliveries]
    measured = spread(rates)
    return {
        "system": system,
        "workload": "publish" if received else "durable",
        "clients": clients,
        "tps": round(measured["median"], 1),
        "tps_low": round(measured["low"], 1),
        "tps_high": round(measured["high"], 1),
        "p50_ms": spread([d.p50_ms for d in deliveries])["median"],
        "p95_ms": spread([d.p95_ms for d in deliveries])["median"],
        "runs": len(deliveries),
    }


class Sides:
    """What both sides did, by figure; theirs stays empty where there is no NATS."""

    def __init__(self) -> None:
        self.ours: dict[str, list[Delivery]] = {name: [] for name in CLIENTS}
        self.theirs: dict[str, list[Delivery]] = {name: [] for name in CLIENTS}

    async def pair(self, broker: OurBroker, server: NatsServer | None, events: dict[str, int]) -> None:
        """One run of each, ours and theirs in turn."""
        self.ours["publish"].append(await our_delivery(broker, events["publish"]))
        if server is not None:
            self.theirs["publish"].append(await core_delivery(server, events["publish"]))
        for name in ("f256", "f1"):
            self.ours[name].append(await our_durable_delivery(broker, events[name], CLIENTS[name]))
            if server is not None:
                self.theirs[name].append(await jetstream_delivery(server, events[name], in_flight=CLIENTS[name]))

    def rows(self) -> list[dict[str, Any]]:
        return [
            _row(f"{system}_{name}", CLIENTS[name], deliveries[name], received=name == "publish")
            for name in CLIENTS
            for system, deliveries in (("tops", self.ours), ("nats", self.theirs))
            if deliveries[name]
        ]

    def figures(self) -> dict[str, dict[str, Any]]:
        compared = {
            "publish.vs_nats_core": ("publish", "received_per_s", Better.HIGHER, 1.0),
            "durable.f256.vs_jetstream": ("f256", "published_per_s", Better.HIGHER, 1.0),
            "durable.f1.latency_vs_jetstream": ("f1", "p50_ms", Better.LOWER, 0.5),
        }
        found: dict[str, dict[str, Any]] = {}
        for figure, (name, quantity, better, least) in compared.items():
            if self.theirs[name]:
                pairs = zip(self.ours[name], self.theirs[name], strict=True)
                values = [(getattr(ours, quantity), getattr(theirs, quantity)) for ours, theirs in pairs]
                found[figure] = {**Figure.of_pairs(values, better).record(), "least": least}
        return found


@asynccontextmanager
async def nats_server(versions: dict[str, str], missing: dict[str, str]) -> AsyncIterator[NatsServer | None]:
    """The peer; where it is not installed that is said at once, and ours is measured all the same."""
    server = NatsServer()
    try:
        await server.__aenter__()
    except SystemUnavailable as error:
        missing["nats"] = str(error)
        say(f"NATS is not measured, and there are no figures beside it: {error}")
        yield None
        return
    try:
        versions["nats-server"] = await server.version()
        yield server
    finally:
        await server.__aexit__()


async def measure(quick: bool) -> Result:
    pairs = 3 if quick else 5
    events = (
        {"publish": 40_000, "f256": 8_000, "f1": 300} if quick else {"publish": 300_000, "f256": 60_000, "f1": 2000}
    )
    sides, missing, versions = Sides(), dict[str, str](), package_versions()
    async with our_broker() as broker, nats_server(versions, missing) as server:
        for number in range(pairs):
            say(f"pair {number + 1} of {pairs}")
            await sides.pair(broker, server, events)
    say("sites and filters of one broker")
    sites = 400 if quick else 2000
    measures = await capacity(sites)
    return {
        "name": "overlay",
        "machine": describe_machine(),
        "versions": versions,
        "systems": {
            "tops": {"description": "one broker process, sites over WebSocket", "promise": "confirmed: on disk"},
            "nats": {"description": "nats-server with nats-py", "promise": "JetStream: acknowledged, not yet on disk"},
        },
        "rows": sides.rows(),
        "figures": sides.figures(),
        "measures": {**measures, **matching_curve()},
        "missing": missing,
        "left_out": [f"{sites} of 2,000 sites, {pairs} of 5 pairs"] if quick else [],
    }


def run(quick: bool) -> Result:
    return uvloop.run(measure(quick))
