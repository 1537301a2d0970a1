"""Drives systems in a closed loop, alternates them, and refuses results whose data is wrong.

Owns time: warm-up, window, who runs when. What an operation is belongs to `bench.workloads`, what a system is to
`bench.systems`, how sides are compared to `bench.statistics`.
"""

import asyncio
import random
import sys
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from bench.machine import CpuMeter, load_average
from bench.statistics import percentile
from bench.systems import (
    BenchmarkFailed,
    Client,
    OperationAborted,
    OperationUnknown,
    System,
    SystemUnavailable,
    Traffic,
)
from bench.workloads import Dataset, Operation, Totals, Workload
from tops.model.errors import TopsError

ERRORS_IN_A_ROW_MAX = 10  # of one client: after that the system is down, and its figures mean nothing
SETTLE_TIMEOUT_S = 120.0
QUICK_BUDGET_S = 150.0  # of the three minutes that a quick benchmark may take; the rest is for stopping and drawing


@dataclass(frozen=True, slots=True)
class Load:
    """How hard and how long: `clients` at once, each starting its next operation when the last has ended."""

    clients: int
    warmup_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One system under one load, its data found right afterwards. Rates and latencies are of the window alone."""

    system: str
    workload: str
    clients: int
    tps: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    committed: int
    aborted: int  # refused cleanly
    errors: int  # outcome unknown to the client
    settle_s: float  # from the last answer until every node had applied everything
    applied_tps: float  # operations per second until every node had applied them, warm-up included
    cpu_cores: dict[str, float]  # by role, averaged over the run: 1.0 is one core kept busy
    others_cores: float  # the same of everything else on the machine: near 0, or the run was disturbed
    fsyncs_per_tx: float | None
    messages_per_tx: float | None
    bytes_per_tx: float | None
    phases: dict[str, float]  # seconds per transaction
    load_average: float  # of the machine when the run began


@dataclass(slots=True)
class Tally:
    """What the clients of one run have seen; shared by them, all in one thread."""

    window_begins: float
    window_ends: float
    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
    committed: int = 0
    aborted: int = 0
    errors: int = 0


@dataclass(slots=True)
class Ledger:
    """Sums of what operations add to a node; plain integers, since it is written to once per operation."""

    balance: int = 0
    transfers: int = 0
    entries: int = 0

    def add(self, effect: Totals) -> None:
        self.balance += effect.balance
        self.transfers += effect.transfers
        self.entries += effect.entries


class Budget:
    """Time that may be spent in all; `None` is no limit. What no longer fits is left out, and said so."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self.left_out: list[str] = []

    def fits(self, seconds: float, what: str) -> bool:
        if self._ends is None or time.monotonic() + seconds <= self._ends:
            return True
        self.left_out.append(what)
        return False


class Contender:
    """A started and loaded system, with a ledger of what its clients were told: committed, or perhaps committed."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._committed = Ledger()
        self._possible = Ledger()

    @classmethod
    @asynccontextmanager
    async def started(cls, system: System, dataset: Dataset) -> AsyncIterator["Contender"]:
        """Up and loaded inside the block, gone after it, whatever happens."""
        try:
            await system.start()
            await system.load(dataset)
            yield cls(system)
        finally:
            await system.stop()

    async def measure(self, workload: Workload, load: Load, seed: int) -> Run:
        """One run: connect, warm up, measure, let it settle, check the data. `BenchmarkFailed`: the data is wrong."""
        system = self.system
        async with AsyncExitStack() as stack:
            clients = [await self._client(stack) for _ in range(load.clients)]
            load_before = load_average()
            fsyncs_before = await system.fsyncs()
            traffic_before = await system.traffic()
            system.phases(0)  # what happened before this run is not part of it
            cpu = CpuMeter(system.processes())
            began = time.perf_counter()
            tally = Tally(began + load.warmup_s, began + load.warmup_s + load.duration_s)
            await self._drive_all(clients, workload, tally, seed)
            loaded_s = time.perf_counter() - began
            cpu_s, others_cpu_s, phases = cpu.used(), cpu.used_by_others(), dict(system.phases(tally.committed))
            settle_began = time.perf_counter()
            await self._settle()
            settle_s = time.perf_counter() - settle_began
            traffic_after = await system.traffic()
        await self.verify()
        fsyncs_after = await system.fsyncs()
        if not tally.latencies_s:
            raise BenchmarkFailed(f"{system.name}: no operation was committed in {load.duration_s} s")
        ordered = sorted(tally.latencies_s)
        messages_per_tx, bytes_per_tx = _traffic_per(traffic_before, traffic_after, tally.committed)
        return Run(
            system=system.name,
            workload=workload.name,
            clients=load.clients,
            tps=len(ordered) / load.duration_s,
            p50_ms=percentile(ordered, 50) * 1e3,
            p95_ms=percentile(ordered, 95) * 1e3,
            p99_ms=percentile(ordered, 99) * 1e3,
            committed=tally.committed,
            aborted=tally.aborted,
            errors=tally.errors,
            settle_s=settle_s,
            applied_tps=tally.committed / (loaded_s + settle_s),
            cpu_cores={role: spent / loaded_s for role, spent in cpu_s.items()},
            others_cores=others_cpu_s / loaded_s,
            fsyncs_per_tx=_per(fsyncs_before, fsyncs_after, tally.committed),
            messages_per_tx=messages_per_tx,
            bytes_per_tx=bytes_per_tx,
            phases=_with_waiting(phases, sum(ordered) / len(ordered)),
            load_average=load_before,
        )

    def credit(self, effect: Totals) -> None:
        """Account for committed work that did not come through a client."""
        self._committed.add(effect)

    async def verify(self) -> None:
        """Every node holds what its clients were told, and all nodes hold the same."""
        nodes = await self.system.totals()
        problems = [
            f"{node} has {quantity} = {found}, its clients were told {low}" + (f" to {high}" if high > low else "")
            for node, totals in nodes.items()
            for quantity, low, found, high in self._bounds(totals)
            if not low <= found <= high
        ]
        if len({totals.digest for totals in nodes.values()}) > 1:
            problems.append("the nodes hold different rows: " + ", ".join(f"{n} {t.digest}" for n, t in nodes.items()))
        if problems:
            raise BenchmarkFailed(f"{self.system.name}: the data is wrong after the run: " + "; ".join(problems))

    def _bounds(self, found: Totals) -> Iterator[tuple[str, int, int, int]]:
        told, perhaps = self._committed, self._possible
        yield "balance", told.balance, found.balance, told.balance + perhaps.balance
        yield "transfers", told.transfers, found.transfers, told.transfers + perhaps.transfers
        yield "entries", told.entries, found.entries, told.entries + perhaps.entries

    async def _client(self, stack: AsyncExitStack) -> Client:
        client = await self.system.client()
        stack.push_async_callback(client.close)
        return client

    async def _drive_all(self, clients: Sequence[Client], workload: Workload, tally: Tally, seed: int) -> None:
        streams = [workload.operations(random.Random(f"{seed}/{number}")) for number in range(len(clients))]
        try:
            async with asyncio.TaskGroup() as group:
                for client, operations in zip(clients, streams, strict=True):
                    group.create_task(self._drive(client, operations, tally))
        except* TopsError as failures:
            # The clients of a broken system fail together, for one reason.
            raise failures.exceptions[0] from failures

    async def _drive(self, client: Client, operations: Iterator[Operation], tally: Tally) -> None:
        errors_in_a_row = 0
        for operation in operations:
            began = time.perf_counter()
            if began >= tally.window_ends:
                return
            try:
                await client.execute(operation)
            except OperationAborted:
                tally.aborted += 1
                continue
            except OperationUnknown as error:
                tally.errors += 1
                self._possible.add(operation.effect)
                errors_in_a_row += 1
                if errors_in_a_row == ERRORS_IN_A_ROW_MAX:
                    raise BenchmarkFailed(f"{self.system.name} broke down under load: {error}") from error
                continue
            ended = time.perf_counter()
            errors_in_a_row = 0
            tally.committed += 1
            self._committed.add(operation.effect)
            if tally.window_begins <= ended < tally.window_ends:
                tally.latencies_s.append(ended - began)

    async def _settle(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self.system.settle()
        except TimeoutError as error:
            raise BenchmarkFailed(
                f"{self.system.name}: not every node had applied everything {SETTLE_TIMEOUT_S:.0f} s after the load"
            ) from error


async def start_all(
    stack: AsyncExitStack, systems: Sequence[System], dataset: Dataset
) -> tuple[list[Contender], dict[str, str]]:
    """Those that run here, started and loaded, to be stopped with `stack`; and why each of the others does not."""
    contenders: list[Contender] = []
    missing: dict[str, str] = {}
    for system in systems:
        say(f"starting {system.name}")
        try:
            contenders.append(await stack.enter_async_context(Contender.started(system, dataset)))
        except SystemUnavailable as error:
            missing[system.name] = str(error)
            say(f"  left out: {error}")
    return contenders, missing


async def alternate(
    contenders: Sequence[Contender], workload: Workload, loads: Sequence[Load], rounds: int, budget: Budget
) -> list[Run]:
    """`rounds` times every load on every contender, in turn; each other round goes backwards.

    The n-th runs of two contenders under one load are a pair: they ran within seconds of each other. The order is
    reversed because a machine that grows slower would otherwise always punish the same side.
    """
    runs: list[Run] = []
    for number in range(rounds):
        order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for load in loads:
            for contender in order:
                what = f"round {number + 1}/{rounds}, {workload.name}, c={load.clients}, {contender.system.name}"
                if not budget.fits(load.warmup_s + load.duration_s, what):
                    continue
                run = await contender.measure(workload, load, seed=number)
                runs.append(run)
                say(f"{what}: {run.tps:,.0f} tps, p50 {run.p50_ms:.2f} ms, p95 {run.p95_ms:.2f} ms")
    return runs


def say(line: str) -> None:
    """Progress goes to standard error: standard output belongs to the result."""
    print(line, file=sys.stderr, flush=True)


def _with_waiting(phases: dict[str, float], latency_s: float) -> dict[str, float]:
    """What the parts' own time leaves of a client's latency: links, queues, a processor that others hold."""
    waiting_s = latency_s - sum(phases.values())
    return {**phases, "waiting": waiting_s} if phases and waiting_s > 0 else phases


def _traffic_per(before: Traffic | None, after: Traffic | None, committed: int) -> tuple[float | None, float | None]:
    if before is None or after is None:
        return None, None
    return _per(before.messages, after.messages, committed), _per(before.bytes, after.bytes, committed)


def _per(before: int | None, after: int | None, committed: int) -> float | None:
    if before is None or after is None or committed == 0:
        return None
    return (after - before) / committed
