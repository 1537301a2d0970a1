"""Which seed finds which planted bug, and the table of that: `python -m tests.sim.planted > tests/sim/PLANTED_BUGS.md`.

A seed that found a bug before is tried first; the simulator must find every bug within `SEEDS` seeds either way.
"""

from typing import NamedTuple

from tests.sim.sabotage import SABOTAGES
from tops.sim.faults import Faults
from tops.sim.runner import run_seed

SEEDS = 500
FOUND_BEFORE = {
    "a_question_does_not_refuse_the_id": 272,
    "a_second_copy_of_a_transaction_is_executed": 304,
    "an_event_with_a_wrong_number_is_accepted": 411,
}
FAULTS = {  # the usual ones for the others
    "a_peers_word_counts_without_a_signature": Faults(lying_site=1.0),
    "a_second_copy_of_a_transaction_is_executed": Faults.restless(),
    "an_older_journal_is_gone_on_from": Faults.restored_journals(),
}


class Found(NamedTuple):
    seed: int
    checker: str
    words: str


def find(bug: str) -> Found | None:
    """The first violation that the simulator sees in a build with this bug."""
    before = FOUND_BEFORE.get(bug)
    seeds = [*([before] if before is not None else []), *range(SEEDS)]
    with SABOTAGES[bug]():
        for seed in seeds:
            violations = run_seed(seed, FAULTS.get(bug))[0].violations
            if violations:
                checker, _, words = violations[0].partition(": ")
                return Found(seed, checker, words)
    return None


def table() -> str:
    lines = [
        "# Planted bugs",
        "",
        "Each build is broken on purpose in one way; the seed and the checker by which the simulator finds it.",
        "Made by `python -m tests.sim.planted > tests/sim/PLANTED_BUGS.md`.",
        "",
        "| bug | seed | checker |",
        "|---|---|---|",
    ]
    for bug in sorted(SABOTAGES):
        found = find(bug)
        faults = ", with other faults than usual" if bug in FAULTS else ""
        seen = f"{found.seed}{faults} | `{found.checker}`" if found is not None else f"not within {SEEDS} | "
        lines.append(f"| {bug.replace('_', ' ')} | {seen} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
