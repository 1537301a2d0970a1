"""Random runs of the ordering layer: every promise holds in every run, and every planted bug is found."""

import pytest

from tests.ordering.planted import FOUND_BEFORE, SEEDS, find
from tests.ordering.sabotage import SABOTAGES
from tops.sim.ordering.checkers import violations
from tops.sim.ordering.runner import run_seed
from tops.sim.ordering.shape import OrderingFaults, draw, draw_quiet
from tops.sim.ordering.world import OrderingWorld

QUICK = (
    "a_hop_of_the_chain_is_left_out",
    "timestamps_must_equal_the_clock",
    "a_cut_sets_the_clocks_of_topics_that_are_held",
    "a_repeated_request_is_numbered_again_after_a_restart",
    "a_confirmation_comes_before_the_timestamp_is_complete",
    "groups_shrink_at_once",
    "older_versions_of_a_subscription_are_accepted",
    "a_restarted_manager_forgets_what_has_passed",
)


@pytest.mark.parametrize("first", range(0, 600, 60))
def test_every_promise_holds_in_600_runs(first: int) -> None:
    bad = [result for seed in range(first, first + 60) if (result := run_seed(seed)).violations]

    assert not bad, "\n".join(f"seed {r.seed}: {r.violations[0]}" for r in bad)


@pytest.mark.long
def test_every_promise_holds_in_20_000_runs() -> None:
    bad = [result for seed in range(20_000) if (result := run_seed(seed)).violations]

    assert not bad, "\n".join(f"seed {r.seed}: {r.violations[0]}" for r in bad)


def test_runs_are_as_large_and_as_troubled_as_they_claim() -> None:
    shapes = [draw(seed, OrderingFaults()) for seed in range(600)]

    assert max(shape.sites for shape in shapes) > 150
    assert max(len(shape.domain.types) for shape in shapes) > 40
    for is_true in (
        [shape.crashes > 0 for shape in shapes],
        [shape.domain.durable for shape in shapes],
        [shape.domain.causal for shape in shapes],
        [shape.changes > 0 for shape in shapes],
        [shape.filters > 0 for shape in shapes],
    ):
        assert 0.2 < sum(is_true) / len(shapes) < 0.8
    assert sum(shape.loss > 0 for shape in shapes) > 30


def test_a_seed_replays_exactly() -> None:
    assert run_seed(5).digest == run_seed(5).digest != run_seed(6).digest


@pytest.mark.parametrize("seed", range(5))
def test_quiet_runs_keep_every_promise(seed: int) -> None:
    world = OrderingWorld(seed, shape=draw_quiet(seed))
    world.run()

    assert violations(world) == []


@pytest.mark.parametrize("sabotage", QUICK)
def test_a_planted_bug_is_found(sabotage: str) -> None:
    assert find(sabotage) is not None


@pytest.mark.long
@pytest.mark.parametrize("sabotage", sorted(set(SABOTAGES) - set(QUICK)))
def test_every_other_planted_bug_is_found(sabotage: str) -> None:
    assert find(sabotage) is not None


def test_seeds_that_found_a_bug_before_are_among_the_first_ones_that_anybody_tries() -> None:
    assert set(FOUND_BEFORE) <= set(SABOTAGES)
    assert max(FOUND_BEFORE.values()) < SEEDS
