"""Which seed finds which planted bug of the ordering layer: `python -m tests.ordering.planted`."""

from tests.ordering.sabotage import SABOTAGES
from tops.sim.ordering.checkers import violations
from tops.sim.ordering.shape import draw_quiet
from tops.sim.ordering.world import OrderingWorld

SEEDS = 300
# Bugs that hide where much goes on: they are looked for in quiet runs, and a seed that found them is tried first.
IN_QUIET_RUNS = {"groups_shrink_at_once": 101, "older_versions_of_a_subscription_are_accepted": 67}


def find(bug: str) -> tuple[int, str] | None:
    """The first seed that finds this bug, and what it sees."""
    quiet = bug in IN_QUIET_RUNS
    with SABOTAGES[bug]():
        for seed in [*([IN_QUIET_RUNS[bug]] if quiet else []), *range(SEEDS)]:
            world = OrderingWorld(seed, shape=draw_quiet(seed) if quiet else None)
            world.run()
            found = violations(world)
            if found:
                return seed, found[0]
    return None


if __name__ == "__main__":
    for name in sorted(SABOTAGES):
        print(name, find(name))
