"""Runs of the simulator: one seed with its trace, many seeds, and the shortest failing prefix of a bad one."""

import gc
import os
import signal
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import msgspec

from tops.sim.checkers import violations
from tops.sim.faults import Faults
from tops.sim.travel_checkers import TRAVEL
from tops.sim.workers import in_order
from tops.sim.world import World

RUNS_PER_JOB = 8


class Result(msgspec.Struct):
    """One run."""

    seed: int
    violations: list[str]
    digest: str
    steps: int
    transactions: int
    crashes: int
    simulated_s: float


class RunSeed(Protocol):
    """How one seed of a layer is run."""

    def __call__(
        self, seed: int, faults: Faults | None = None, *, keep_trace: bool = False
    ) -> tuple["Result", World]: ...


def run_seed(seed: int, faults: Faults | None = None, *, keep_trace: bool = False) -> tuple[Result, World]:
    """One whole run, checked for safety and liveness."""
    world = World(seed, faults, keep_trace=keep_trace)
    world.run()
    result = Result(
        seed,
        found_in(world),
        world.trace.digest(),
        world.clock.steps,
        len(world.history.transactions),
        world.crashes,
        world.clock.now,
    )
    return result, world


def found_in(world: World) -> list[str]:
    """The violations in a finished run, of the guarantees that hold under its faults."""
    if world.faults.travels:
        return [f"{c.__name__}: {v}" for c in TRAVEL for v in c(world)]
    return violations(world, live=True)


class Totals(msgspec.Struct):
    """Many runs, added up."""

    runs: int = 0
    transactions: int = 0
    crashes: int = 0
    simulated_s: float = 0.0
    bad: list[Result] = msgspec.field(default_factory=list)

    def add(self, result: Result) -> None:
        self.runs += 1
        self.transactions += result.transactions
        self.crashes += result.crashes
        self.simulated_s += result.simulated_s
        if result.violations:
            self.bad.append(result)


def run_seeds(
    seeds: Sequence[int],
    faults: Faults | None = None,
    processes: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    run: RunSeed = run_seed,
) -> Generator[Result, None, None]:
    """Many runs, by default on all cores; results come in the order of the seeds. `run` is a function of a module:
    workers find it by its name.


    To stop early, close the iterator or let `stopped` return True: unfinished runs are dropped then.
    """
    chunks = [(run, seeds[i : i + RUNS_PER_JOB], faults) for i in range(0, len(seeds), RUNS_PER_JOB)]
    for results in in_order(_run_chunk, chunks, processes or os.cpu_count() or 1, begin_work, stopped):
        yield from results


def begin_work() -> None:
    """A worker ignores interruptions, which its parent handles, and collects garbage only between jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()
    gc.disable()


def _run_chunk(job: tuple[RunSeed, Sequence[int], Faults | None]) -> list[Result]:
    run, seeds, faults = job
    results = [run(seed, faults)[0] for seed in seeds]
    gc.collect()
    return results


def shortest_failing_prefix(seed: int, faults: Faults | None = None) -> tuple[World, list[str]]:
    """The run of a bad seed, cut off at the first step after which a safety checker fails.

    A run that only fails to end is returned whole.
    """
    result, whole = run_seed(seed, faults, keep_trace=True)
    low, high = 0, result.steps
    if not violations(whole, live=False):
        return whole, result.violations
    while low < high:
        middle = (low + high) // 2
        world = World(seed, faults)
        world.run(steps_max=middle)
        if violations(world, live=False):
            high = middle
        else:
            low = middle + 1
    world = World(seed, faults, keep_trace=True)
    world.run(steps_max=low)
    return world, violations(world, live=False)
