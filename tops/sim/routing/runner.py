"""Runs of the routing layer: each seed is one cluster, with the kinds of transactions in turn."""

from tops.model.routing import TxKind
from tops.sim.faults import Faults
from tops.sim.routing.checkers import violations
from tops.sim.routing.world import RoutingFaults, RoutingWorld
from tops.sim.runner import Result

KINDS = tuple(TxKind)


def run_kind(
    seed: int,
    kind: TxKind,
    faults: RoutingFaults | None = None,
    *,
    wait_s: float | None = None,
    keep_trace: bool = False,
) -> tuple[Result, RoutingWorld]:
    """One whole run with transactions of one kind, checked."""
    world = RoutingWorld(seed, kind, faults, wait_s=wait_s, keep_trace=keep_trace)
    world.run()
    found = Result(
        seed,
        violations(world),
        world.trace.digest(),
        world.clock.steps,
        len(world.seen.transactions),
        world.crashes,
        world.clock.now,
    )
    return found, world


def run_seed(seed: int, faults: Faults | None = None, *, keep_trace: bool = False) -> tuple[Result, RoutingWorld]:
    """One run; the seed also chooses the kind. Faults are the layer's own: with any others nothing breaks."""
    chosen = None if faults is None or faults == Faults() else RoutingFaults(calm=1.0, cut=0.0, pause=0.0)
    return run_kind(seed // len(KINDS), KINDS[seed % len(KINDS)], chosen, keep_trace=keep_trace)


def failing_run(seed: int, faults: Faults | None = None) -> tuple[RoutingWorld, list[str]]:
    """The whole run of a bad seed, with its trace."""
    result, world = run_seed(seed, faults, keep_trace=True)
    return world, result.violations
