"""`tops bench gateway`: reads through the API and through the gateway, beside PostgreSQL asked directly.

The API's reads are compared with asyncpg on one PostgreSQL, with a prepared statement on a connection per client; reads
through the gateway with the same pgbench script on the server behind it. Both sides alternate.
"""

import asyncio
import re
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import uvloop

from adapters import Logins
from adapters.embedded.free_ports import free_port
from bench.harness import QUICK_BUDGET_S, Budget, Contender, Load, Run, alternate, say, start_all
from bench.peers.postgres import POLL_S
from bench.peers.programs import run_to_end
from bench.peers.single import SinglePostgres
from bench.policies.catalog import case_named
from bench.policies.client import READ, TopsClient
from bench.policies.system import SET, ProcessCluster
from bench.results import Result, result
from bench.statistics import Better, Figure
from bench.systems import Client, OperationAborted
from bench.workloads import Dataset, Operation, Read, Ycsb
from replication import ReplicaSet
from replication.client.reads import Consistency
from tops.model.errors import TopsError

PAIRS, QUICK_PAIRS = 5, 1
USER, PASSWORD = "bench", "a password of the benchmark"
START_S = 60.0
_SCRIPT = "\\set key random(1, {rows})\nselect bal from accounts where id = :key;\n"
_TPS = re.compile(r"^tps = ([0-9.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ReadFigure:
    """`least` is what it must reach, `aim` what we want."""

    name: str
    consistency: Consistency
    clients: int
    better: Better
    least: float
    aim: float


FIGURES = (
    ReadFigure("read.any.c64.vs_direct", "any", 64, Better.HIGHER, 0.4, 0.7),
    ReadFigure("read.any.c1.latency_vs_direct", "any", 1, Better.LOWER, 0.4, 0.6),
    ReadFigure("read.current.c64.vs_direct", "current", 64, Better.HIGHER, 0.25, 0.5),
)
GATEWAY, GATEWAY_LEAST, GATEWAY_AIM = "gateway.read.c64.vs_direct", 0.3, 0.5


class ReadingClient(TopsClient):
    """Reads of one consistency."""

    def __init__(self, replica_set: ReplicaSet, consistency: Consistency) -> None:
        super().__init__(replica_set)
        self._consistency: Consistency = consistency

    async def execute(self, operation: Operation) -> None:
        assert isinstance(operation, Read), "this benchmark reads"
        try:
            await self.replica_set.fetchrow(READ, operation.key, consistency=self._consistency)
        except TopsError as error:
            raise OperationAborted(str(error)) from error


class ReadCluster(ProcessCluster):
    """A quorum set with a gateway, each part in a process of its own."""

    def __init__(self) -> None:
        super().__init__(case_named("quorum"), name="tops_any")
        self.consistency: Consistency = "any"
        self.gateway_port = free_port()

    def choose(self, consistency: Consistency) -> None:
        """What the clients from here on ask for; their runs are rows of their own."""
        self.consistency, self.name = consistency, f"tops_{consistency}"

    async def client(self) -> Client:
        return ReadingClient(self._sets[0], self.consistency)

    def _written(self, folder: Path, logins: Mapping[str, Logins]) -> Path:
        path = super()._written(folder, logins)
        table = (
            f'[[gateway]]\nname = "g1"\nlisten = "127.0.0.1:{self.gateway_port}"\nreplica_set = "{SET}"\npool = 80\n'
        )
        user = f'[[gateway.user]]\nname = "{USER}"\npassword = "{PASSWORD}"\n'
        path.write_text(f"{path.read_text()}{table}{user}")
        return path

    @property
    def gateway_dsn(self) -> str:
        return f"postgresql://{USER}:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{self.gateway_port}/{SET}"


def run(quick: bool) -> Result:
    """The four figures."""
    return uvloop.run(_run(quick))


async def _run(quick: bool) -> Result:
    budget, dataset = Budget(QUICK_BUDGET_S if quick else None), Dataset()
    pairs, load_s = (QUICK_PAIRS, (0.5, 1.5)) if quick else (PAIRS, (2.0, 5.0))
    left_out = [f"{PAIRS - QUICK_PAIRS} of {PAIRS} pairs"] if quick else []
    cluster, runs, figures = ReadCluster(), list[Run](), dict[str, dict[str, object]]()
    workload = Ycsb("C", dataset)
    async with AsyncExitStack() as stack:
        contenders, missing = await start_all(stack, [cluster, SinglePostgres()], dataset)
        for figure in FIGURES:
            cluster.choose(figure.consistency)
            found = await alternate(contenders, workload, [Load(figure.clients, *load_s)], pairs, budget)
            runs += found
            if pair_values := _pairs(found, contenders, figure.better):
                figures[figure.name] = _record(figure.name, pair_values, figure.better, figure.least, figure.aim)
        if shutil.which("pgbench") is None:
            missing[GATEWAY] = "pgbench is not installed (Debian: postgresql-contrib)"
        elif budget.fits(2 * pairs * (sum(load_s) + 1), GATEWAY):
            measured = await _pgbench_pairs(cluster, dataset, pairs, sum(load_s))
            figures[GATEWAY] = _record(GATEWAY, measured, Better.HIGHER, GATEWAY_LEAST, GATEWAY_AIM)
        return await result(
            "gateway", contenders, runs, figures=figures, missing=missing, left_out=[*left_out, *budget.left_out]
        )


def _pairs(runs: list[Run], contenders: list[Contender], better: Better) -> list[tuple[float, float]]:
    ours, theirs = (
        [run.tps if better is Better.HIGHER else run.p50_ms for run in runs if run.system == contender.system.name]
        for contender in contenders
    )
    return list(zip(ours, theirs, strict=False))  # cut short by a budget, one side may have one run more


def _record(name: str, pairs: list[tuple[float, float]], better: Better, least: float, aim: float) -> dict[str, object]:
    figure = Figure.of_pairs(pairs, better)
    say(f"{name}: {figure.ratio:.2f} ({figure.low:.2f}–{figure.high:.2f}), at least {least:g}")
    return {**figure.record(), "least": least, "aim": aim}


async def _pgbench_pairs(
    cluster: ReadCluster, dataset: Dataset, pairs: int, seconds: float
) -> list[tuple[float, float]]:
    """Throughput of the same script through the gateway and straight to the server behind it."""
    assert cluster._folder is not None, "the cluster was not loaded"
    script = cluster._folder / "read.sql"
    script.write_text(_SCRIPT.format(rows=dataset.rows))
    await _answers(cluster.gateway_dsn)
    found: list[tuple[float, float]] = []
    for number in range(pairs):
        sides = [("gateway", cluster.gateway_dsn), ("direct", cluster.servers["r1"].dsn)]
        told: dict[str, float] = {}
        for side, dsn in sides if number % 2 == 0 else reversed(sides):
            told[side] = await _pgbench(script, dsn, seconds)
            say(f"round {number + 1}/{pairs}, pgbench, c=64, {side}: {told[side]:,.0f} tps")
        found.append((told["gateway"], told["direct"]))
    return found


async def _pgbench(script: Path, dsn: str, seconds: float) -> float:
    options = ["-n", "-M", "simple", "-c", "64", "-j", "2", "-T", f"{max(2, round(seconds))}", "-f", str(script)]
    printed = await run_to_end(["pgbench", *options, dsn])
    match = _TPS.search(printed)
    if match is None:
        raise OperationAborted(f"pgbench told no throughput: {printed[-500:]}")
    return float(match.group(1))


async def _answers(dsn: str) -> None:
    """The gateway waits for its set before it listens."""
    async with asyncio.timeout(START_S):
        while (connection := await _connection(dsn)) is None:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(POLL_S)
    try:
        await connection.fetchval("select 1")
    finally:
        await connection.close()


async def _connection(dsn: str) -> asyncpg.Connection | None:
    try:
        return await asyncpg.connect(dsn, timeout=START_S)
    except ConnectionError:
        return None
