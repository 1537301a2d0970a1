"""Families of event types in a cluster whose nodes do not all know all members."""

from tests.sim.small_worlds import SmallWorld
from tops.core.participant.participation import Wish
from tops.model.filters import Filter
from tops.model.transactions import Scope, TxType
from tops.protocol.messages import CensusPolicy, Event, TxSpec
from tops.sim.workload import DEFINITIONS

CHILD = DEFINITIONS["plain.child"]
EVENT = Event("plain.child", {"mark": "m1", "key": "a"})


def wish(name: str, scope: Scope | None = None) -> Wish:
    return Wish(DEFINITIONS[name], Filter.everything(), scope=scope)


def test_a_child_s_event_reaches_subscribers_of_the_parent_that_do_not_know_the_child_and_nobody_else() -> None:
    world = SmallWorld()
    publisher, subscriber = world.site("p", "b1", (CHILD,)), world.site("s", "b3", ())
    world.participant(subscriber, wish("plain", Scope.LOCAL))
    world.participant(subscriber, wish("other", Scope.LOCAL))
    world.begin()

    world.request(publisher, lambda request: publisher.site.core.publish(request, EVENT))
    world.go(2.0)

    assert world.history.seen == {("s", 1, 1): [(None, "m1")]}


def test_a_child_s_transaction_asks_subscribers_of_the_parent_that_do_not_know_the_child_and_nobody_else() -> None:
    world = SmallWorld()
    publisher, subscriber = world.site("p", "b1", (CHILD,)), world.site("s", "b3", ())
    database = world.participant(subscriber, wish("plain"))
    world.participant(subscriber, wish("other"))
    world.begin()
    spec = TxSpec("plain.child", TxType.DISTRIBUTED, attributes={"key": "a"}, census=CensusPolicy(0.3))

    registrations = world.request(publisher, lambda request: publisher.site.core.execute(request, spec, (EVENT,)))
    world.settle()

    assert [a.outcome.value for a in registrations] == ["committed"]
    assert len(database.committed) == 1
    assert {key[1:] for key in world.history.scopes} == {("s", 1, 1)}
