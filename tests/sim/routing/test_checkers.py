"""Every checker of routing transactions can fail."""

from collections.abc import Callable

import pytest

from tops.core.routing_tx.tables import Mark
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.routing import RouteKind, TxKind, route_key
from tops.sim.routing.checkers import CHECKERS, violations
from tops.sim.routing.history import Delivery, Operation, Update
from tops.sim.routing.runner import run_kind
from tops.sim.routing.world import RoutingFaults, RoutingWorld

CALM = RoutingFaults(calm=1.0, undisturbed=0.0)
UNDISTURBED = RoutingFaults(calm=1.0, undisturbed=1.0)


def calm_run(faults: RoutingFaults = CALM) -> RoutingWorld:
    result, world = run_kind(3, TxKind.ISOLATED, faults)
    assert result.violations == []
    return world


def committed(world: RoutingWorld) -> TxId:
    return next(record.tx for record in world.commits() if world.seen.transactions[record.tx].updates)


def fail_a_machine(world: RoutingWorld) -> None:
    world.history.broken.append("b1: the machine raised ValueError()")


def leave_a_transaction_open(world: RoutingWorld) -> None:
    world.tree(next(iter(world.brokers))).termination.work(TxId("e00.1.r99"), TxKind.ISOLATED)


def tell_a_lie(world: RoutingWorld) -> None:
    world.seen.transactions[committed(world)].outcomes["a00.1"] = False


def lose_an_entry(world: RoutingWorld) -> None:
    tables = world.tree(next(iter(world.brokers))).routes.tables
    tables.drop(next(iter(tables.entries)))


def leave_a_mark(world: RoutingWorld) -> None:
    tables = world.tree(next(iter(world.brokers))).routes.tables
    next(iter(tables.entries.values())).mark(TxId("e00.1.r99"), Mark(0, False, None))


def show_an_update_to_two(world: RoutingWorld) -> None:
    tx = committed(world)
    mark = world.seen.transactions[tx].updates[0]
    for agent in world.agents[0]:
        world.seen.deliveries.append(Delivery(agent, 1, route_key(f"{agent}.1", 99), mark, tx, 3.0))


def show_what_did_not_commit(world: RoutingWorld) -> None:
    agent = world.agents[0][0]
    delivery = Delivery(agent, 1, route_key(f"{agent}.1", 99), "m0", TxId("e00.1.r99"), 3.0)
    world.seen.deliveries.append(delivery)


def lose_a_regular_update(world: RoutingWorld) -> None:
    world.seen.updates.append(Update("m0", 0, 0, 3.0))


def lose_an_update_in_the_end(world: RoutingWorld) -> None:
    world.seen.updates.append(Update("m0", 0, 0, world.clock.now))


def repeat_a_delivery(world: RoutingWorld) -> None:
    world.seen.deliveries.append(world.seen.deliveries[0])


def publish_to_nobody(world: RoutingWorld) -> None:
    operation = Operation(NodeId("e00"), None, event_type="update", body={"group": 0, "item": 0, "mark": "m0"})
    world.seen.transactions[committed(world)].operations.append(operation)


def remove_what_is_not_there(world: RoutingWorld) -> None:
    key = route_key("a00.1", 99)
    operation = Operation(NodeId("a00"), RouteKind.SUBSCRIPTION, False, key, "update", Filter())
    world.seen.transactions[committed(world)].operations.append(operation)


DAMAGES: dict[str, list[Callable[[RoutingWorld], None]]] = {
    "machines_do_not_fail": [fail_a_machine],
    "everything_ends": [leave_a_transaction_open],
    "outcomes_agree": [tell_a_lie],
    "tables_agree": [lose_an_entry, leave_a_mark],
    "each_update_of_a_transaction_reaches_one_agent": [show_an_update_to_two, show_what_did_not_commit],
    "each_regular_update_reaches_one_agent": [lose_a_regular_update, lose_an_update_in_the_end],
    "nothing_is_delivered_twice": [repeat_a_delivery],
    "isolated_histories_are_serializable": [publish_to_nobody, remove_what_is_not_there],
}


@pytest.mark.parametrize(
    ("checker", "damage"), [(name, damage) for name, damages in DAMAGES.items() for damage in damages]
)
def test_a_checker_sees_damage(checker: str, damage: Callable[[RoutingWorld], None]) -> None:
    world = calm_run()

    damage(world)

    assert checker in {found.partition(":")[0] for found in violations(world)}


def test_an_undisturbed_transaction_that_does_not_commit_is_seen() -> None:
    world = calm_run(UNDISTURBED)
    root = world.topology.rendezvous("tops.routing")

    world.brokers[root].disk.records.remove(world.commits()[0])

    assert "undisturbed_transactions_commit" in {found.partition(":")[0] for found in violations(world)}


def test_every_checker_is_tested() -> None:
    assert {checker.__name__ for checker in CHECKERS} == {*DAMAGES, "undisturbed_transactions_commit"}
