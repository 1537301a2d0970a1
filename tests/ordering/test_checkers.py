"""Each checker stays silent on a good run and names what is wrong with a bad one."""

from collections.abc import Callable

import pytest

from tops.core.ordering.arrivals import Arrived
from tops.protocol.messages import LogEntry
from tops.sim.ordering import checkers
from tops.sim.ordering.checkers import violations
from tops.sim.ordering.nodes import Delivered, Site
from tops.sim.ordering.world import OrderingWorld


def good(*, durable: bool, causal: bool = False) -> OrderingWorld:
    """A run in which two sites received the same three events or more."""
    for seed in range(1000):
        world = OrderingWorld(seed)
        if world.domain.durable is durable and world.domain.causal is causal and world.shape.sites < 20:
            world.run()
            if pair(world) is not None:
                return world
    raise AssertionError("no seed gives such a run")


def pair(world: OrderingWorld) -> tuple[Site, Site, list[int]] | None:
    sites = [site for site in world.sites.values() if site.up]
    for number, one in enumerate(sites):
        for other in sites[:number]:
            both = {d.event for d in one.delivered} & {d.event for d in other.delivered}
            if len(both) >= 3:
                return one, other, [d.event for d in one.delivered if d.event in both]
    return None


def swap(world: OrderingWorld) -> None:
    found = pair(world)
    assert found is not None
    site, _, both = found
    places = [place for place, d in enumerate(site.delivered) if d.event in both[:2]]
    first, second = places
    site.delivered[first], site.delivered[second] = site.delivered[second], site.delivered[first]


def against_the_past(world: OrderingWorld) -> None:
    for site in world.sites.values():
        for place, later in enumerate(site.delivered):
            for earlier in site.delivered[:place]:
                if world.past_of[later.event] >> earlier.event & 1:
                    site.delivered.remove(later)
                    site.delivered.insert(0, later)
                    return
    raise AssertionError("nothing in this run depends on anything")


def buffered(world: OrderingWorld) -> None:
    site = next(s for s in world.sites.values() if s.module.held)
    topic, state = next(iter(site.module.held.items()))
    site.module.on_event(topic, Arrived(state.clock + 2, {topic: state.clock + 2}, None, 0.0))


def twice(world: OrderingWorld) -> None:
    site = next(s for s in world.sites.values() if s.delivered)
    site.delivered.append(site.delivered[0])


def one_is_missing(world: OrderingWorld) -> None:
    site = next(s for s in world.sites.values() if any(d.topic in s.begun for d in s.delivered))
    last = next(d for d in reversed(site.delivered) if d.topic in site.begun)
    site.delivered.remove(last)


def logged_twice(world: OrderingWorld) -> None:
    log = next(log for broker in world.brokers.values() for log in broker.logs.values() if log.tail)
    entry = next(iter(log.tail.values()))
    log.fill(LogEntry(number=log.reserve(), event=entry.event))


CASES: list[tuple[Callable[..., object], bool, bool, Callable[[OrderingWorld], None]]] = [
    (checkers.no_two_subscribers_disagree, True, False, swap),
    (checkers.causal_order_holds, True, True, against_the_past),
    (checkers.nothing_stays_buffered, True, False, buffered),
    (checkers.nothing_is_delivered_twice, False, False, twice),
    (checkers.events_are_complete, True, False, one_is_missing),
    (checkers.logs_are_whole, True, False, logged_twice),
]


@pytest.mark.parametrize(("checker", "durable", "causal", "spoil"), CASES)
def test_a_checker_names_what_is_wrong(
    checker: Callable[..., object], durable: bool, causal: bool, spoil: Callable[[OrderingWorld], None]
) -> None:
    world = good(durable=durable, causal=causal)
    assert violations(world) == []

    spoil(world)

    assert any(found.startswith(f"{checker.__name__}: ") for found in violations(world))


def test_every_checker_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(checkers.CHECKERS)


def test_an_event_that_is_out_of_order_is_no_disagreement() -> None:
    world = good(durable=False)
    swap(world)
    assert any(found.startswith("no_two") for found in violations(world))

    for site in world.sites.values():
        site.delivered = [Delivered(d.event, d.topic, d.index, True) for d in site.delivered]

    assert violations(world) == []
