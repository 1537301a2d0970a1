"""What must hold in every run."""

from collections.abc import Callable, Iterator

from tops.sim.ordering.nodes import Delivered, Site
from tops.sim.ordering.world import OrderingWorld

Checker = Callable[[OrderingWorld], Iterator[str]]


def subscribers(world: OrderingWorld) -> list[tuple[str, list[Delivered]]]:
    """What each subscriber received. One that is not durable is another one after a restart."""
    found = []
    for site in world.sites.values():
        incarnations = [*site.former, site.delivered]
        found += [
            (f"{site.name}/{number}", incarnation) for number, incarnation in enumerate(incarnations) if incarnation
        ]
    return found


def no_two_subscribers_disagree(world: OrderingWorld) -> Iterator[str]:
    """Any two events that two subscribers received in order, they received in the same order."""
    known = [(name, [d.event for d in received if not d.out_of_order]) for name, received in subscribers(world)]
    places = [(name, {event: place for place, event in enumerate(events)}) for name, events in known]
    for number, (name, events) in enumerate(known):
        for other, at in places[:number]:
            last = -1
            before = -1
            for event in events:
                place = at.get(event, -1)
                if place < 0:
                    continue
                if place < last:
                    yield f"{name} received {before} before {event}, {other} the other way round"
                    break
                last, before = place, event


def causal_order_holds(world: OrderingWorld) -> Iterator[str]:
    """In a causal domain an event is received after everything that its publisher knew when it published it."""
    if not world.domain.causal:
        return
    for name, received in subscribers(world):
        behind = 0  # the events that were received after the one that is looked at
        for delivered in reversed([d for d in received if not d.out_of_order]):
            if behind & world.past_of[delivered.event]:
                yield f"{name} received {delivered.event} before an event of its past"
                break
            behind |= 1 << delivered.event


def nothing_stays_buffered(world: OrderingWorld) -> Iterator[str]:
    for site in running(world):
        if site.module.buffered:
            yield f"{site.name} holds {site.module.buffered} events"
        change = site.module.change
        if change is not None:
            yield f"the change {change.version} of {site.name} is not adopted"
        if site.module.held.keys() != site.topics:
            yield f"{site.name} wants {sorted(site.topics)} and receives {sorted(site.module.held)}"
        if site.outbox or site.unconfirmed:
            yield f"{site.name} waits for the confirmation of {list(site.unconfirmed)}"


def nothing_is_delivered_twice(world: OrderingWorld) -> Iterator[str]:
    for name, received in subscribers(world):
        events = [d.event for d in received]
        if len(set(events)) < len(events):
            twice = sorted({e for e in events if events.count(e) > 1})
            yield f"{name} received {twice} more than once"


def events_are_complete(world: OrderingWorld) -> Iterator[str]:
    """A durable subscriber received every event behind the point at which its subscription began."""
    if not world.domain.durable:
        return
    for site in running(world):
        received = {d.event for d in site.delivered}
        for topic, begun in site.begun.items():
            name = world.domain.types[topic]
            log = world.brokers[world.shape.broker_of[name]].logs[name]
            for number, entry in log.tail.items():
                assert entry.event is not None
                wanted = site.filters[topic] in ("", entry.event.body["kind"])
                if number > begun and wanted and entry.event.body["number"] not in received:
                    yield f"{site.name} did not receive event {number} of {name}"
                    break


def logs_are_whole(world: OrderingWorld) -> Iterator[str]:
    if not world.domain.durable:
        return
    for name in world.domain.types:
        log = world.brokers[world.shape.broker_of[name]].logs[name]
        events = [entry.event.body["number"] for entry in log.tail.values() if entry.event is not None]
        if len(set(events)) < len(events):
            yield f"the log of {name} has an event twice"
        if log.decided_upto < log.last_number:
            yield f"the log of {name} ends at {log.last_number} and is complete up to {log.decided_upto}"


def running(world: OrderingWorld) -> list[Site]:
    return [site for site in world.sites.values() if site.up]


CHECKERS: tuple[Checker, ...] = (
    no_two_subscribers_disagree,
    causal_order_holds,
    nothing_stays_buffered,
    nothing_is_delivered_twice,
    events_are_complete,
    logs_are_whole,
)


def violations(world: OrderingWorld) -> list[str]:
    return [f"{check.__name__}: {found}" for check in CHECKERS for found in check(world)]
