"""Scenarios of the core, the same functions, over real processes and sockets, in every topology.

Those that look into machines, lose single messages or move the clock stay with the simulator.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.integration.overlay.cluster import Cluster
from tests.integration.overlay.scenario_cluster import ProcessCluster
from tests.scenarios import test_constraints as at
from tests.scenarios import test_hts as hts
from tests.scenarios import test_thesis as thesis
from tops.model.constraints import AtLeast, Required

pytestmark = pytest.mark.asyncio(loop_scope="module")

A, AB = frozenset("A"), frozenset("AB")
SCENARIOS: dict[str, Callable[[], None]] = {
    "3.1.2": thesis.test_3_1_2_a_successful_transaction_commits_at_all_subscribers,
    "3.1.3": thesis.test_3_1_3_too_few_enlisted_leaves_the_census_unfulfilled_and_no_transaction,
    "3.1.4": thesis.test_3_1_4_one_failed_preparation_aborts_the_transaction_everywhere,
    "3.1.5": thesis.test_3_1_5_two_clients_run_transactions_against_each_other_and_both_commit,
    "4.1.1": thesis.test_4_1_1_two_publishers_contribute_to_one_transaction,
    "4.1.2": thesis.test_4_1_2_the_initiator_takes_no_part_unless_it_subscribes_and_joins,
    "4.1.3": thesis.test_4_1_3_one_subscription_gets_ordinary_and_transactional_events_of_a_type,
    "4.1.4": thesis.test_4_1_4_participants_get_events_of_types_they_never_subscribed_to,
    "4.1.5 event": partial(thesis.test_4_1_5_constraints_that_still_hold_let_the_others_commit, "event"),
    "4.1.5 prepare": partial(thesis.test_4_1_5_constraints_that_still_hold_let_the_others_commit, "prepare"),
    "4.1.6": thesis.test_4_1_6_in_a_local_transaction_only_the_subscriber_that_fails_aborts,
    "4.7.2": thesis.test_4_7_2_the_callbacks_of_a_single_publisher_transaction_come_in_order,
    "4.7.3": thesis.test_4_7_3_publishers_take_part_and_a_non_transactional_subscriber_sees_ordinary_events,
    "4.B": thesis.test_table_4_B_publishers_hear_the_outcome_of_their_transactions_as_well,
    "HTS 4.1 time": hts.test_4_1_a_census_closes_when_its_time_is_over,
    "HTS 4.1 replies": hts.test_4_1_a_census_closes_with_enough_replies,
    "HTS 4.1 met": partial(hts.test_4_1_a_census_closes_as_soon_as_the_constraints_are_met_if_asked_to, True),
    "HTS 4.2": hts.test_4_2_a_participant_that_fails_early_aborts_the_transaction_at_once,
    "HTS 4.3 commit": partial(
        hts.test_4_3_compensatable_and_other_participants_share_one_transaction_and_its_end, False
    ),
    "HTS 4.3 abort": partial(hts.test_4_3_compensatable_and_other_participants_share_one_transaction_and_its_end, True),
    "HTS 5.6 wait": hts.test_5_6_a_late_vote_raises_unchecked_and_waiting_again_commits,
    "HTS 5.6 abort": hts.test_5_6_a_publisher_that_will_not_wait_any_longer_aborts_an_unchecked_transaction,
    "census": at.test_when_the_census_closes_unmet_constraints_end_the_transaction_before_any_event,
    "drop-out": partial(
        at.test_when_a_participant_drops_out_the_constraints_decide_before_commit_is_asked_for, 3, False
    ),
    "votes 2": partial(at.test_after_the_votes_the_constraints_decide_among_those_who_said_yes, 2, True),
    "votes 3": partial(at.test_after_the_votes_the_constraints_decide_among_those_who_said_yes, 3, False),
    "no constraint": at.test_without_constraints_whoever_joined_must_commit,
    "ceiling": at.test_only_a_ceiling_on_participants_does_not_excuse_one_who_drops_out,
    "only from": at.test_only_those_on_the_list_may_join,
    "required": partial(at.test_who_fails_matters_where_constraints_name_participants, (Required(A),), "A", False),
    "not required": partial(at.test_who_fails_matters_where_constraints_name_participants, (Required(A),), "B", True),
    "at least 1": partial(at.test_who_fails_matters_where_constraints_name_participants, (AtLeast(1, AB),), "A", True),
    "at least 2": partial(at.test_who_fails_matters_where_constraints_name_participants, (AtLeast(2, AB),), "A", False),
    "deadline": partial(at.test_a_deadline_that_passes_aborts_the_transaction_wherever_it_is, "voting"),
    "distributed only": at.test_constraints_count_distributed_participants_only,
}
# Table 4-A: one scenario for each of its cases, when it is asked and by a standing answer.
SCENARIOS |= {
    f"4.A {'-'.join(part.name for part in case)}{' standing' * standing}": partial(
        thesis.test_table_4_A_the_scope_taken_in_a_run_is_the_one_of_the_table, case, standing
    )
    for case in thesis.TABLE_4_A
    for standing in (False, True)
}


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_scenario_of_the_core(cluster: Cluster, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many brokers there are is the topology's business here, not the scenario's."""
    made: list[ProcessCluster] = []
    loop = asyncio.get_running_loop()

    def make(*sites: str, **_: Any) -> ProcessCluster:
        made.append(ProcessCluster(loop, cluster, *sites))
        return made[-1]

    for module in (thesis, hts, at):
        monkeypatch.setattr(module, "Cluster", make)
    try:
        await asyncio.to_thread(SCENARIOS[scenario])
    finally:
        for each in made:
            await each.close()
    assert made, "the scenario ran here and not in the simulator"
