"""The simulator finds bugs in routing transactions: builds that are broken on purpose are caught within 300 seeds."""

from typing import NamedTuple

import pytest

from tests.sim.routing.sabotage import SABOTAGES
from tops.model.routing import TxKind
from tops.sim.routing.runner import run_kind

SEEDS = 300
QUICK = (
    "there_is_no_test_at_all",
    "a_leaver_is_not_acknowledged_for",
    "an_abort_undoes_without_marks",
    "publications_are_routed_without_the_commit_number",
    "tables_are_dropped_before_every_neighbour_has_flipped",
    "a_flip_is_sent_for_this_broker_alone",
    "covering_is_switched_on",
    "a_commit_is_sent_before_it_is_on_disk",
)


class Found(NamedTuple):
    seed: int
    kind: TxKind
    violation: str


def find(bug: str) -> Found | None:
    """The first violation that the simulator sees in a build with this bug."""
    with SABOTAGES[bug]():
        for seed in range(SEEDS):
            for kind in TxKind:
                violations = run_kind(seed, kind)[0].violations
                if violations:
                    return Found(seed, kind, violations[0])
    return None


@pytest.mark.parametrize("bug", QUICK)
def test_a_planted_bug_is_found(bug: str) -> None:
    assert find(bug) is not None


@pytest.mark.long
@pytest.mark.parametrize("bug", sorted(set(SABOTAGES) - set(QUICK)))
def test_every_other_planted_bug_is_found(bug: str) -> None:
    assert find(bug) is not None
