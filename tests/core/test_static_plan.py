"""The order that follows from a static plan, and which event types are routed along the tree."""

import pytest

from tops.core.routing_tx.plan import StaticPlan
from tops.model.errors import InvalidEventType, InvalidTransaction
from tops.model.event_types import EventType, EventTypes
from tops.model.filters import Filter


def test_a_client_s_operations_come_in_the_order_in_which_they_were_written() -> None:
    plan = StaticPlan()
    first = plan.publish("e", "update", {})
    second = plan.publish("e", "update", {})
    other = plan.publish("f", "update", {})

    steps = plan.steps()

    assert steps[second].after == (first,)
    assert steps[other].after == ()


def test_what_a_tcm_triggers_comes_before_what_its_client_does_next() -> None:
    plan = StaticPlan()
    invoke = plan.tcm("e", "invoke", {})
    update = plan.publish("e", "update", {})
    assign = plan.tcm("d", "assign", {}, after=invoke)
    taken = plan.subscribe("a", "update", Filter(), after=assign)
    given = plan.unsubscribe("d", "update", "d.1#1", after=assign)

    steps = plan.steps()

    assert steps[update].after == (invoke, assign, taken, given)
    assert steps[given].after == (invoke, assign, taken)


def test_a_publication_triggers_nothing() -> None:
    plan = StaticPlan()
    first = plan.publish("e", "update", {})
    plan.publish("d", "update", {}, after=first)
    last = plan.publish("e", "update", {})

    assert plan.steps()[last].after == (first,)


def test_operations_that_wait_for_each_other_are_rejected() -> None:
    plan = StaticPlan()
    one, other = plan.tcm("e", "invoke", {}), plan.tcm("d", "invoke", {})
    plan.publish("d", "update", {}, after=one)
    plan.publish("e", "update", {}, after=other)

    with pytest.raises(InvalidTransaction, match="circle"):
        plan.steps()


def test_an_operation_can_not_be_after_one_that_the_plan_does_not_have() -> None:
    with pytest.raises(InvalidTransaction, match="only be after"):
        StaticPlan().publish("e", "update", {}, after=3)


@pytest.mark.parametrize("other", [{"parent": "p"}, {"durable": True}, {"discloses_sender": True}])
def test_a_type_that_is_routed_along_the_tree_stands_alone(other: dict[str, object]) -> None:
    with pytest.raises(InvalidEventType, match="routing"):
        EventType("t", {}, routing="tree", **other)  # type: ignore[arg-type]


def test_an_unknown_routing_is_rejected() -> None:
    with pytest.raises(InvalidEventType, match="use one of"):
        EventType("t", {}, routing="flooded")


def test_a_type_of_a_replica_set_is_not_routed_along_the_tree() -> None:
    with pytest.raises(InvalidEventType, match="replica sets"):
        EventType("rs.shop", {}, routing="tree")


def test_a_type_that_is_routed_along_the_tree_has_no_children() -> None:
    types = EventTypes()
    types.define(EventType("t", {}, routing="tree"))

    with pytest.raises(InvalidEventType, match="along the tree"):
        types.define(EventType("t.child", {}, parent="t"))
