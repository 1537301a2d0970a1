"""The simulator finds bugs: protocol builds that are broken on purpose are caught within 500 seeds."""

import pytest

from tests.sim.planted import FOUND_BEFORE, SEEDS, find
from tests.sim.sabotage import SABOTAGES
from tops.sim.runner import run_seed, shortest_failing_prefix

QUICK = (
    "commit_is_not_journaled_at_all",
    "commit_is_told_before_it_is_journaled",
    "constraints_are_not_retested_after_the_votes",
    "compensation_runs_twice",
    "a_participant_in_doubt_guesses_commit",
    "a_peers_word_counts_without_a_signature",
    "an_epoch_commits_with_differing_exclusions",
    "a_local_subscriber_is_rolled_back_by_a_distributed_abort",
    "a_lagging_replica_votes",
    "a_repeated_publication_is_logged_again",
    "an_older_journal_is_gone_on_from",
)


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


def test_there_are_at_least_twenty_planted_bugs_and_each_can_be_planted() -> None:
    assert len(SABOTAGES) >= 20
    for plant in SABOTAGES.values():
        with plant():
            pass


def test_a_failing_run_is_cut_to_the_step_at_which_it_goes_wrong() -> None:
    with SABOTAGES["commit_is_not_journaled_at_all"]():
        whole, _ = run_seed(0, keep_trace=True)
        world, found = shortest_failing_prefix(0)

    assert found
    assert world.clock.steps < whole.steps
    assert world.trace.lines
