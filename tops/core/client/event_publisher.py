"""A site's ordinary events: types that it advertised, events that it published, and which of them are on disk."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tops.core.client.causal_order import CausalOrder, Key
from tops.core.client.type_directory import TypeDirectory
from tops.model.errors import InvalidEventType, LimitExceeded, NotAdvertised, TopsError
from tops.protocol.effects import Answer, Disseminate, Effect, Post
from tops.protocol.messages import (
    Address,
    Definitions,
    Event,
    EventConfirmed,
    EventsPublished,
    EventsRefused,
    Origin,
    Published,
    TxSpec,
    TypeAdvertised,
    TypeAnswered,
)


class EventPublisher:
    """Advertises types and publishes events of them; what is not confirmed is said again."""

    def __init__(self, directory: TypeDirectory) -> None:
        self.directory = directory
        self.advertising: dict[str, list[int]] = {}
        self.unconfirmed: dict[tuple[str, int], tuple[int, Published]] = {}  # durable publications, in order
        self.numbers: dict[str, int] = {}  # the last one given, per family
        self.causal = CausalOrder(directory.domains)

    def advertise(
        self,
        request: int,
        definitions: Definitions,
        plans: tuple[TxSpec, ...] | None = None,
        members: frozenset[str] | None = None,
    ) -> list[Effect]:
        """Say that this site is going to publish a type; answered when the rendezvous has taken it."""
        try:
            self.directory.types.define_all(definitions)
        except InvalidEventType as refusal:
            return [Answer(request, error=refusal)]
        name = definitions[-1].name
        self.directory.advertised[name] = definitions
        if plans is not None:
            self.directory.plans[name] = plans
        if members is not None:
            self.directory.members[name] = members
        self.advertising.setdefault(name, []).append(request)
        return self._advertise_letter(definitions)

    def _advertise_letter(self, definitions: Definitions) -> list[Effect]:
        coordinator = self.directory.rendezvous(definitions[0].name)
        name, directory = definitions[-1].name, self.directory
        plans, members = directory.plans.get(name), directory.members.get(name)
        return [Post(Address(coordinator), TypeAdvertised(definitions=definitions, plans=plans, members=members))]

    def on_type_answered(self, answered: TypeAnswered) -> list[Effect]:
        waiting = self.advertising.pop(answered.event_type, [])
        if answered.refusal is None:
            return [Answer(request) for request in waiting]
        self.directory.advertised.pop(answered.event_type, None)
        return [Answer(request, error=InvalidEventType(answered.refusal)) for request in waiting]

    def stop_advertising(self, name: str) -> list[int]:
        """The broker did not act on the advertisement of this type. Returns the requests that waited for it."""
        self.directory.advertised.pop(name, None)
        return self.advertising.pop(name, [])

    def publish(self, request: int, event: Event) -> list[Effect]:
        """An ordinary event; for a durable type the answer means that it is on disk."""
        error = self._problem(event)
        if error is not None:
            return [Answer(request, error=error)]
        family = self.directory.types.family(event.type)
        number = self.numbers[family] = self.numbers.get(family, 0) + 1
        published = Published(event=event, origin=Origin(family, number))
        if not self.directory.types.whole(event.type).durable:
            return [Disseminate(published), Answer(request)]
        self.unconfirmed[family, number] = (request, published)
        if self.causal.holds(family):
            self.causal.hold((family, number))
            return []
        self.causal.sent(family)
        return [Disseminate(published)]

    def publish_confirmed(
        self, event_type: str, events: Sequence[tuple[int, dict[str, Any], msgspec.Raw]]
    ) -> list[Effect]:
        """Events of a durable type, in order, each with its request, its body and that body encoded; each request is
        answered with the event's number when it is on disk. The caller has checked every body."""
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
        """Ordinary events of an advertised type that is not durable, in order; the caller has checked and encoded
        each."""
        family = self.directory.types.family(event_type)
        number = self.numbers[family] = self.numbers.get(family, 0) + len(bodies)
        origin = Origin(family, number)
        return [Disseminate(EventsPublished(event_type=event_type, bodies=bodies, origin=origin))]

    def _problem(self, event: Event) -> TopsError | None:
        if event.type not in self.directory.advertised:
            return NotAdvertised(event.type)
        return self.directory.problem_with(event)

    def on_confirmed(self, confirmed: EventConfirmed) -> list[Effect]:
        answers: list[Effect] = []
        origin, log_number = confirmed.origin, confirmed.log_number
        for before in range(confirmed.count - 1, -1, -1):
            key = origin.family, origin.number - before
            known = self.unconfirmed.pop(key, None)
            if known is not None:
                answers.append(Answer(known[0], None if log_number is None else log_number - before))
                answers += self._released(self.causal.settled(key))
        return answers

    def _released(self, keys: list[Key]) -> list[Effect]:
        return [Disseminate(self.unconfirmed[key][1]) for key in keys if key in self.unconfirmed]

    def on_refused(self, refused: EventsRefused) -> list[Effect]:
        return self.refuse_events(refused.event_type, LimitExceeded(refused.reason))

    def refuse_events(self, event_type: str, error: TopsError) -> list[Effect]:
        """Durable events of this type that wait for a confirmation get none.

        The log expects numbers without gaps, so those at the end are given again."""
        refused = [(key, request) for key, (request, p) in self.unconfirmed.items() if p.event.type == event_type]
        released: list[Key] = []
        for (family, number), _ in reversed(refused):
            del self.unconfirmed[family, number]
            released += self.causal.settled((family, number))
            if self.numbers[family] == number:
                self.numbers[family] -= 1
        return [*(Answer(request, error=error) for _, request in refused), *self._released(released)]

    def announce(self) -> list[Effect]:
        """Everything a new broker must know."""
        return [letter for d in self.directory.advertised.values() for letter in self._advertise_letter(d)]

    def repeat_events(self) -> list[Effect]:
        return [Disseminate(p) for key, (_, p) in self.unconfirmed.items() if not self.causal.is_held(key)]

    def repeat_types(self) -> list[Effect]:
        return [e for name in self.advertising for e in self._advertise_letter(self.directory.advertised[name])]

    def waits(self) -> bool:
        return bool(self.unconfirmed or self.advertising)
