"""Scenarios of the core, the same functions, to be run over real processes and sockets.

Those that look into machines, lose single messages or move the clock stay with the simulator.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.integration.overlay.cluster import Cluster
from tests.integration.overlay.scenario_cluster import ProcessCluster
from tests.scenarios import test_hts as hts
from tests.scenarios import test_thesis as thesis

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
    "HTS 5.6": hts.test_5_6_a_publisher_that_will_not_wait_any_longer_aborts_an_unchecked_transaction,
}


async def run_scenario(name: str, brokers: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scenario at these brokers; how many there are is the topology's business here, not the scenario's."""
    made: list[ProcessCluster] = []
    loop = asyncio.get_running_loop()

    def make(*sites: str, **_: Any) -> ProcessCluster:
        made.append(ProcessCluster(loop, brokers, *sites))
        return made[-1]

    monkeypatch.setattr(thesis, "Cluster", make)
    monkeypatch.setattr(hts, "Cluster", make)
    try:
        await asyncio.to_thread(SCENARIOS[name])
    finally:
        for cluster in made:
            await cluster.close()
    assert made, "the scenario ran here and not in the simulator"
