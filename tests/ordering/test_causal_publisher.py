"""A site in a causal domain sends an event of another type only when those before it have their places."""

from tops.core.client.event_publisher import EventPublisher
from tops.core.client.type_directory import TypeDirectory
from tops.model.errors import LimitExceeded
from tops.model.event_types import EventType
from tops.model.ids import NodeId
from tops.model.ordering import Order, OrderingDomain
from tops.protocol.effects import CompleteRequest, Disseminate, Effect
from tops.protocol.messages import Event, EventConfirmed, Origin, Published

DOMAIN = OrderingDomain("d", ("x", "y"), Order.CAUSAL, durable=True)


def publisher() -> EventPublisher:
    made = EventPublisher(TypeDirectory([NodeId("b1")], [DOMAIN]))
    for number, name in enumerate(("x", "y", "other")):
        made.advertise(number, (EventType(name, {"n": int}, durable=True),))
    return made


def sent(effects: list[Effect]) -> list[tuple[str, int]]:
    publications = [e.publication for e in effects if isinstance(e, Disseminate)]
    return [(p.origin.family, p.origin.number) for p in publications if isinstance(p, Published)]


def publish(made: EventPublisher, *names: str) -> list[tuple[str, int]]:
    return [key for name in names for key in sent(made.publish(9, Event(name, {"n": 1})))]


def confirm(made: EventPublisher, family: str, number: int) -> list[tuple[str, int]]:
    return sent(made.on_confirmed(EventConfirmed(origin=Origin(family, number))))


def test_events_of_one_type_do_not_wait_for_each_other() -> None:
    assert publish(publisher(), "x", "x", "other", "x") == [("x", 1), ("x", 2), ("other", 1), ("x", 3)]


def test_an_event_of_another_type_waits_for_all_that_were_before_it() -> None:
    made = publisher()

    assert publish(made, "x", "x", "y", "y", "x") == [("x", 1), ("x", 2)]
    assert confirm(made, "x", 1) == []
    assert confirm(made, "x", 2) == [("y", 1), ("y", 2)]
    assert confirm(made, "y", 1) == []
    assert confirm(made, "y", 2) == [("x", 3)]


def test_what_waits_is_not_repeated() -> None:
    made = publisher()
    publish(made, "x", "y")

    assert sent(made.repeat_events()) == [("x", 1)]


def test_events_that_are_refused_hold_up_nothing() -> None:
    made = publisher()
    publish(made, "x", "y")

    effects = made.reject_events("x", LimitExceeded("full"))

    assert [type(e) for e in effects] == [CompleteRequest, Disseminate]
    assert sent(effects) == [("y", 1)]
