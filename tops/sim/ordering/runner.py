"""Runs of the ordering layer: one seed, or many of them."""

import gc
import hashlib
from collections.abc import Callable, Generator, Sequence

import msgspec

from tops.sim.ordering.checkers import violations
from tops.sim.ordering.shape import OrderingFaults
from tops.sim.ordering.world import OrderingWorld
from tops.sim.workers import in_order

RUNS_PER_JOB = 16


class OrderingResult(msgspec.Struct):
    """One run."""

    seed: int
    violations: list[str]
    digest: str  # of what every site received
    events: int
    delivered: int
    crashes: int
    simulated_s: float


def run_seed(seed: int, faults: OrderingFaults | None = None) -> OrderingResult:
    """One whole run, checked."""
    world = OrderingWorld(seed, faults)
    world.run()
    received = [(site.name, [d.event for d in site.delivered]) for site in world.sites.values()]
    return OrderingResult(
        seed=seed,
        violations=violations(world),
        digest=hashlib.sha256(repr(received).encode()).hexdigest(),
        events=world.events,
        delivered=sum(len(events) for _, events in received),
        crashes=world.crashes,
        simulated_s=world.clock.now,
    )


def run_seeds(
    seeds: Sequence[int],
    faults: OrderingFaults,
    processes: int,
    begin: Callable[[], None],
    stopped: Callable[[], bool],
) -> Generator[OrderingResult, None, None]:
    """Many runs, in the order of the seeds."""
    jobs = [(seeds[i : i + RUNS_PER_JOB], faults) for i in range(0, len(seeds), RUNS_PER_JOB)]
    for results in in_order(_run_all, jobs, processes, begin, stopped):
        yield from results


def _run_all(job: tuple[Sequence[int], OrderingFaults]) -> list[OrderingResult]:
    seeds, faults = job
    results = [run_seed(seed, faults) for seed in seeds]
    gc.collect()  # workers collect garbage between jobs only
    return results
