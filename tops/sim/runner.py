"""Runs of the simulator: one seed with its trace, many seeds, and the shortest failing prefix of a bad one."""

from collections.abc import Callable, Iterable

import msgspec

from tops.sim.checkers import violations
from tops.sim.faults import Faults
from tops.sim.world import World


class Result(msgspec.Struct):
    """One run."""

    seed: int
    violations: list[str]
    digest: str
    steps: int
    transactions: int
    simulated_s: float


def run_seed(seed: int, faults: Faults | None = None, *, keep_trace: bool = False) -> tuple[Result, World]:
    """One whole run, checked for safety and liveness."""
    world = World(seed, faults, keep_trace=keep_trace)
    world.run()
    result = Result(
        seed,
        violations(world, live=True),
        world.trace.digest(),
        world.clock.steps,
        len(world.history.transactions),
        world.clock.now,
    )
    return result, world


def run_seeds(
    seeds: Iterable[int], faults: Faults | None = None, progress: Callable[[Result], None] | None = None
) -> list[Result]:
    """Many runs; returns those that found something."""
    bad = []
    for seed in seeds:
        result, _ = run_seed(seed, faults)
        if progress is not None:
            progress(result)
        if result.violations:
            bad.append(result)
    return bad


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
