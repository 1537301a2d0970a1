"""A site's ordinary events: types that it advertised, events that it published, and their confirmations."""

from collections.abc import Sequence

import msgspec

from tops.core.client.causal_order import CausalOrder, Key
from tops.core.client.gathering import GatheredEvent
from tops.core.client.type_directory import TypeDirectory
from tops.model.errors import InvalidEventType, LimitExceeded, NotAdvertised, TopsError
from tops.protocol.effects import CompleteRequest, Disseminate, Effect, SendTo
from tops.protocol.messages import (
    Address,
    AdvertisementHandled,
    Definitions,
    Event,
    EventConfirmed,
    EventsPublished,
    EventsRejected,
    Origin,
    Published,
    TxSpec,
    TypeAdvertised,
)


class EventPublisher:
    """Advertises types and publishes events of them; it repeats what is not confirmed."""

    def __init__(self, directory: TypeDirectory) -> None:
        self.directory = directory
        self.advertising: dict[str, list[int]] = {}
        self.unconfirmed: dict[tuple[str, int], tuple[int, Published]] = {}  # durable publications, in order
        self.numbers: dict[str, int] = {}  # the last assigned number, per family
        self.causal = CausalOrder(directory.domains)

    def advertise(
        self,
        request: int,
        definitions: Definitions,
        plans: tuple[TxSpec, ...] | None = None,
        members: frozenset[str] | None = None,
    ) -> list[Effect]:
        """Advertise a type; the request completes when the rendezvous has accepted it."""
        try:
            self.directory.types.define_all(definitions)
        except InvalidEventType as rejection:
            return [CompleteRequest(request, error=rejection)]
        name = definitions[-1].name
        self.directory.advertised[name] = definitions
        if plans is not None:
            self.directory.plans[name] = plans
        if members is not None:
            self.directory.members[name] = members
        self.advertising.setdefault(name, []).append(request)
        return self._advertisement(definitions)

    def _advertisement(self, definitions: Definitions) -> list[Effect]:
        coordinator = self.directory.rendezvous(definitions[0].name)
        name, directory = definitions[-1].name, self.directory
        plans, members = directory.plans.get(name), directory.members.get(name)
        return [SendTo(Address(coordinator), TypeAdvertised(definitions=definitions, plans=plans, members=members))]

    def on_advertisement_handled(self, handled: AdvertisementHandled) -> list[Effect]:
        waiting = self.advertising.pop(handled.event_type, [])
        if handled.rejection is None:
            return [CompleteRequest(request) for request in waiting]
        self.directory.advertised.pop(handled.event_type, None)
        return [CompleteRequest(request, error=InvalidEventType(handled.rejection)) for request in waiting]

    def stop_advertising(self, name: str) -> list[int]:
        """The broker did not act on the advertisement of this type. Returns the requests that waited for it."""
        self.directory.advertised.pop(name, None)
        return self.advertising.pop(name, [])

    def publish(self, request: int, event: Event) -> list[Effect]:
        """Publish an ordinary event; for a durable type the request completes when the event is on disk."""
        error = self._problem(event)
        if error is not None:
            return [CompleteRequest(request, error=error)]
        family = self.directory.types.family(event.type)
        number = self.numbers[family] = self.numbers.get(family, 0) + 1
        published = Published(event=event, origin=Origin(family, number))
        if not self.directory.types.whole(event.type).durable:
            return [Disseminate(published), CompleteRequest(request)]
        self.unconfirmed[family, number] = (request, published)
        if self.causal.holds(family):
            self.causal.hold((family, number))
            return []
        self.causal.sent(family)
        return [Disseminate(published)]

    def publish_confirmed(self, event_type: str, events: Sequence[GatheredEvent]) -> list[Effect]:
        """Publish events of a durable type, in order, each with its request, its body and that body encoded. Each
        request completes with the event's index when the event is on disk. The caller has checked every body."""
        family = self.directory.types.family(event_type)
        number, holds = self.numbers.get(family, 0), self.causal.holds(family)
        for request, body, _ in events:
            number += 1
            origin = Origin(family, number)
            self.unconfirmed[family, number] = (request, Published(event=Event(event_type, body), origin=origin))
            if holds:
                self.causal.hold((family, number))
        self.numbers[family] = number
        if holds:
            return []
        self.causal.sent(family, len(events))
        bodies = tuple(encoded for _, _, encoded in events)
        return [Disseminate(EventsPublished(event_type=event_type, bodies=bodies, origin=origin))]

    def publish_all(self, event_type: str, bodies: tuple[msgspec.Raw, ...]) -> list[Effect]:
        """Publish ordinary events of an advertised type that is not durable, in order. The caller has checked and
        encoded each."""
        family = self.directory.types.family(event_type)
        number = self.numbers[family] = self.numbers.get(family, 0) + len(bodies)
        origin = Origin(family, number)
        return [Disseminate(EventsPublished(event_type=event_type, bodies=bodies, origin=origin))]

    def _problem(self, event: Event) -> TopsError | None:
        if event.type not in self.directory.advertised:
            return NotAdvertised(event.type)
        return self.directory.problem_with(event)

    def on_confirmed(self, confirmed: EventConfirmed) -> list[Effect]:
        completed: list[Effect] = []
        origin, log_number = confirmed.origin, confirmed.log_number
        for before in range(confirmed.count - 1, -1, -1):
            key = origin.family, origin.number - before
            known = self.unconfirmed.pop(key, None)
            if known is not None:
                completed.append(CompleteRequest(known[0], None if log_number is None else log_number - before))
                completed += self._released(self.causal.settled(key))
        return completed

    def _released(self, keys: list[Key]) -> list[Effect]:
        return [Disseminate(self.unconfirmed[key][1]) for key in keys if key in self.unconfirmed]

    def on_events_rejected(self, rejected: EventsRejected) -> list[Effect]:
        return self.reject_events(rejected.event_type, LimitExceeded(rejected.reason))

    def reject_events(self, event_type: str, error: TopsError) -> list[Effect]:
        """End the requests for durable events of this type with an error.

        The log expects numbers without gaps, so the numbers at the end are assigned again."""
        rejected = [(key, request) for key, (request, p) in self.unconfirmed.items() if p.event.type == event_type]
        released: list[Key] = []
        for (family, number), _ in reversed(rejected):
            del self.unconfirmed[family, number]
            released += self.causal.settled((family, number))
            if self.numbers[family] == number:
                self.numbers[family] -= 1
        return [*(CompleteRequest(request, error=error) for _, request in rejected), *self._released(released)]

    def announce(self) -> list[Effect]:
        """Announce to a new broker everything that it must know."""
        return [message for d in self.directory.advertised.values() for message in self._advertisement(d)]

    def repeat_events(self) -> list[Effect]:
        return [Disseminate(p) for key, (_, p) in self.unconfirmed.items() if not self.causal.is_held(key)]

    def repeat_types(self) -> list[Effect]:
        return [e for name in self.advertising for e in self._advertisement(self.directory.advertised[name])]

    def waits(self) -> bool:
        return bool(self.unconfirmed or self.advertising)
