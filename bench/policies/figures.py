"""The figures: which of ours is compared with which peer, in which quantity, and how a comparison is carried out.

Both sides of a figure run in turn, pair by pair. A system is started when the first figure needs it and stopped after
the last one that does, so that as few idle processes as possible stand beside the two that are compared.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.harness import Budget, Contender, Load, Run, alternate, say
from bench.peers.galera import Galera
from bench.peers.logical import LogicalReplication
from bench.peers.single import SinglePostgres
from bench.peers.streaming import Mode, StreamingReplication
from bench.peers.two_phase import HandWrittenTwoPhaseCommit
from bench.policies.catalog import case_named
from bench.policies.statements import EXECUTED, SHIPPED, StatementCluster
from bench.policies.system import OneProcess, ProcessCluster
from bench.statistics import Better, Figure
from bench.systems import System, SystemUnavailable
from bench.workloads import AppendOnly, Dataset, HotRow, SingleRowUpdate, Workload
from tops.model.errors import ConfigError, TopsError

Quantity = Callable[[Run], float]
START_S = 12.0  # what starting and loading a system is reckoned with
LAG_MAX_S = 1.0


class FollowersLate(TopsError):
    """The condition of a figure does not hold: the followers did not keep up with their writer."""


def _throughput(run: Run) -> float:
    return run.tps


def _applied(run: Run) -> float:
    """Until every node had applied everything: what was written faster than that is waited for."""
    return run.applied_tps


def _latency(run: Run) -> float:
    return run.p50_ms


def _prompt_throughput(run: Run) -> float:
    """Throughput of a writer whose followers keep up; a figure with followers further behind is none."""
    if run.settle_s > LAG_MAX_S:
        raise FollowersLate(
            f"{run.system}: the followers needed {run.settle_s:.1f} s after the last write, more than {LAG_MAX_S:g} s"
        )
    return run.tps


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: `least` is what it must reach, `aim` what we want."""

    name: str
    ours: str
    theirs: str
    least: float
    aim: float
    clients: int = 64
    our_quantity: Quantity = _throughput
    their_quantity: Quantity = _throughput
    better: Better = Better.HIGHER
    workload: str = SingleRowUpdate.name


COMPARISONS = (
    Comparison("write_all.c64.vs_hand_2pc", "write_all", "hand_2pc", 6, 12),
    Comparison(
        "write_all.c1.latency_vs_hand_2pc", "write_all", "hand_2pc", 0.67, 1.0, 1, _latency, _latency, Better.LOWER
    ),
    Comparison("write_all.c64.vs_streaming", "write_all", "streaming_remote_apply", 1.2, 2.0),
    Comparison("serializable.c64.vs_write_all", "serializable", "write_all", 1.0, 1.5),
    Comparison("overlay.c64.vs_in_process", "write_all", "write_all_in_process", 0.67, 0.85),
    Comparison("write_all.c64.vs_galera", "write_all", "galera", 2.0, 4.0),
    Comparison("quorum2of3.c64.vs_streaming_any1", "quorum", "streaming_remote_apply_any1", 1.2, 1.8),
    Comparison("primary.c64.vs_single", "primary", "postgres_single", 0.8, 1.0, 64, _prompt_throughput),
    Comparison("primary.apply.vs_logical", "primary", "logical", 1.0, 2.0, 64, _applied, _applied),
    Comparison("p2p.converged.vs_primary", "p2p", "primary", 1.0, 1.5, 64, _applied, _applied),
    Comparison("executed_once.c64.vs_shipped", "executed_once", "shipped", 0.4, 0.7, workload=AppendOnly.name),
    Comparison("executed_once.c1.vs_shipped", "executed_once", "shipped", 0.5, 0.7, 1, workload=AppendOnly.name),
    Comparison("executed_once.hot_row", "executed_once", "shipped", 0.05, 0.2, 16, workload=HotRow.name),
)
NOT_IN_QUICK = frozenset({"write_all.c64.vs_galera"})


def chosen(names: Sequence[str]) -> list[Comparison]:
    """The comparisons with these names, in our order; `all` is every one."""
    known = [comparison.name for comparison in COMPARISONS]
    for name in names:
        if name not in known and name != "all":
            raise ConfigError(f"there is no figure {name!r}; there are all, {', '.join(known)}")
    return [comparison for comparison in COMPARISONS if "all" in names or comparison.name in names]


def _made(name: str, *, profile: bool) -> System:
    makers: dict[str, Callable[[], System]] = {
        "hand_2pc": lambda: HandWrittenTwoPhaseCommit(profile=profile),
        "streaming_remote_apply": lambda: StreamingReplication(Mode.REMOTE_APPLY_ALL),
        "streaming_remote_apply_any1": lambda: StreamingReplication(Mode.REMOTE_APPLY_ANY),
        "postgres_single": SinglePostgres,
        "logical": LogicalReplication,
        "galera": Galera,
        "write_all_in_process": lambda: OneProcess(case_named("write_all")),
        "executed_once": lambda: StatementCluster("executed_once", EXECUTED),
        "shipped": lambda: StatementCluster("shipped", SHIPPED),
    }
    maker = makers.get(name)
    return maker() if maker is not None else ProcessCluster(case_named(name), profile=profile)


@dataclass(slots=True)
class Compared:
    """What came of all comparisons."""

    runs: list[Run] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    systems: dict[str, dict[str, str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class Arena:
    """The systems that run at the moment; each lives from its first figure to its last."""

    def __init__(self, dataset: Dataset, compared: Compared, *, profile: bool) -> None:
        self._dataset, self._compared, self._profile = dataset, compared, profile
        self._running: dict[str, tuple[Contender, AsyncExitStack]] = {}

    async def contender(self, name: str) -> Contender | None:
        """None: it can't run here, and the result says why."""
        if name in self._compared.missing:
            return None
        if name not in self._running:
            stack, system = AsyncExitStack(), _made(name, profile=self._profile)
            say(f"starting {name}")
            try:
                contender = await stack.enter_async_context(Contender.started(system, self._dataset))
            except SystemUnavailable as error:
                self._compared.missing[name] = str(error)
                say(f"  left out: {error}")
                return None
            self._running[name] = contender, stack
            self._compared.systems[name] = {"description": system.description, "promise": system.promise}
            self._compared.versions.update(await system.versions())
        return self._running[name][0]

    async def keep_only(self, names: Iterable[str]) -> None:
        wanted = set(names)
        for name in [name for name in self._running if name not in wanted]:
            await self._running.pop(name)[1].aclose()


async def compare(
    comparisons: Sequence[Comparison],
    dataset: Dataset,
    pairs: int,
    warmup_s: float,
    duration_s: float,
    budget: Budget,
    *,
    profile: bool = False,
) -> Compared:
    """Carry out the comparisons one after the other; data that is wrong after any run ends all of it."""
    compared = Compared()
    workloads: list[Workload] = [SingleRowUpdate(dataset), AppendOnly(), HotRow()]
    by_name = {workload.name: workload for workload in workloads}
    arena = Arena(dataset, compared, profile=profile)
    try:
        for place, comparison in enumerate(comparisons):
            needed_s = 2 * (warmup_s + duration_s) + START_S
            if not budget.fits(needed_s, comparison.name):
                continue
            sides = [await arena.contender(name) for name in (comparison.ours, comparison.theirs)]
            contenders = [side for side in sides if side is not None]
            if len(contenders) == 2:
                load = Load(comparison.clients, warmup_s, duration_s)
                runs = await alternate(contenders, by_name[comparison.workload], [load], pairs, budget)
                compared.runs += runs
                _conclude(comparison, runs, compared)
            later = comparisons[place + 1 :]
            await arena.keep_only(name for other in later for name in (other.ours, other.theirs))
    finally:
        await arena.keep_only(())
    return compared


def _conclude(comparison: Comparison, runs: Sequence[Run], compared: Compared) -> None:
    try:
        figure = figure_of(comparison, runs)
    except FollowersLate as error:
        compared.missing[comparison.name] = str(error)
        say(f"{comparison.name}: none, {error}")
    else:
        if figure is not None:
            compared.figures[comparison.name] = figure


def figure_of(comparison: Comparison, runs: Sequence[Run]) -> dict[str, Any] | None:
    """From the runs of both sides, in the order in which they ran; None without a pair. Raises `FollowersLate`."""
    ours = [comparison.our_quantity(run) for run in runs if run.system == comparison.ours]
    theirs = [comparison.their_quantity(run) for run in runs if run.system == comparison.theirs]
    pairs = list(zip(ours, theirs, strict=False))  # cut short by a budget, one side may have one run more
    if not pairs:
        return None
    figure = Figure.of_pairs(pairs, comparison.better)
    say(f"{comparison.name}: {figure.ratio:.2f} ({figure.low:.2f}–{figure.high:.2f}), at least {comparison.least:g}")
    sides = {"systems": [comparison.ours, comparison.theirs], "clients": comparison.clients}
    return {**figure.record(), "least": comparison.least, "aim": comparison.aim, **sides}
