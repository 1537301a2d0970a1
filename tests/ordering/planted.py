"""Which seed finds which planted bug of the ordering layer, and the table of that:
`python -m tests.ordering.planted > tests/ordering/PLANTED_BUGS.md`.

A seed that found a bug before is tried first; every bug must be found within `SEEDS` seeds either way.
"""

from tests.ordering.sabotage import SABOTAGES
from tops.sim.ordering.checkers import violations
from tops.sim.ordering.shape import draw_quiet
from tops.sim.ordering.world import OrderingWorld

SEEDS = 300
# Bugs that hide where much goes on: they are looked for in runs in which little does.
IN_QUIET_RUNS = frozenset({"groups_shrink_at_once", "older_versions_of_a_subscription_are_accepted"})
FOUND_BEFORE = {
    "a_hop_of_the_chain_is_left_out": 109,
    "a_restarted_manager_forgets_what_has_passed": 109,
    "groups_shrink_at_once": 101,
    "lost_lines_are_not_numbered_again": 90,
    "older_versions_of_a_subscription_are_accepted": 67,
}


def find(bug: str) -> tuple[int, str] | None:
    """The first seed that finds this bug, and what it sees."""
    quiet = bug in IN_QUIET_RUNS
    before = FOUND_BEFORE.get(bug)
    with SABOTAGES[bug]():
        for seed in [*([before] if before is not None else []), *range(SEEDS)]:
            world = OrderingWorld(seed, shape=draw_quiet(seed) if quiet else None)
            world.run()
            found = violations(world)
            if found:
                return seed, found[0]
    return None


def table() -> str:
    lines = [
        "# Planted bugs of the ordering layer",
        "",
        "Each build is broken on purpose in one way; the seed and the checker by which the simulator finds it.",
        "Made by `python -m tests.ordering.planted > tests/ordering/PLANTED_BUGS.md`.",
        "",
        "| bug | seed | checker |",
        "|---|---|---|",
    ]
    for bug in sorted(SABOTAGES):
        found = find(bug)
        where = ", in quiet runs" if bug in IN_QUIET_RUNS else ""
        seen = f"{found[0]}{where} | `{found[1].partition(':')[0]}`" if found else f"not within {SEEDS} | "
        lines.append(f"| {bug.replace('_', ' ')} | {seen} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
