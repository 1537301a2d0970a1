"""The ordering modules of one site, one per domain, behind its subscriptions that are not durable.

A module adds a topic once the route of the subscription is confirmed: from then on every event that gets an index
reaches this site. On a new link all topics begin again, since events may have been lost with the old one.
"""

from collections.abc import Mapping, Sequence

from tops.core.ordering.arrivals import Arrived
from tops.core.ordering.module import OrderingModule
from tops.core.participant.subscriptions import Subscription
from tops.model.ids import NodeId
from tops.model.ordering import OrderingDomain
from tops.protocol.effects import CompleteRequest, Deliver, Effect, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    ChangeSubscription,
    ConfirmRoute,
    CutMade,
    Dissemination,
    IndexesSkipped,
    OrderedPublished,
)

ROUTES = ("ordering", "", "routes")


class SiteOrdering:
    """Which subscriptions of a site are ordered, and how far each of them is."""

    def __init__(
        self, domains: Sequence[OrderingDomain], subscriptions: Mapping[int, Subscription], retry_s: float
    ) -> None:
        self._domains = {domain.name: domain for domain in domains}
        self._topics = {name: (domain, n) for domain in domains for n, name in enumerate(domain.types)}
        self._subscriptions, self._retry_s = subscriptions, retry_s
        self.modules: dict[str, OrderingModule] = {}
        self._without_route: dict[int, Subscription] = {}
        self._waiting: dict[int, list[int]] = {}  # subscription -> requests that complete when it is ordered
        self._link: NodeId | None = None
        self._is_timer_set = False

    def is_ordered(self, s: Subscription) -> bool:
        """Whether events of this subscription come through an ordering module."""
        return s.family in self._topics and s.wish.durable is None and s.replica is None

    def link_up(self, link: NodeId) -> list[Effect]:
        """All ordered subscriptions begin again with the events that this link brings."""
        self._link = link
        effects: list[Effect] = []
        for module in self.modules.values():
            module.wanted.clear()
            effects += module.begin_again()
        for s in self._subscriptions.values():
            effects += self.added(s)
        return effects

    def added(self, s: Subscription) -> list[Effect]:
        """A subscription was announced on the link. The request to confirm its route must follow it on that link."""
        if not self.is_ordered(s) or self._link is None:
            return []
        self._without_route[s.number] = s
        return [_request(s), *self._request_later()]

    def removed(self, s: Subscription) -> list[Effect]:
        """A subscription has ended."""
        self._without_route.pop(s.number, None)
        self._waiting.pop(s.number, None)
        if not self.is_ordered(s) or any(o.family == s.family and self.is_ordered(o) for o in self._others(s)):
            return []
        domain, topic = self._topics[s.family]
        module = self.modules.get(domain.name)
        return module.unsubscribe([topic]) if module is not None else []

    def _others(self, s: Subscription) -> list[Subscription]:
        return [other for other in self._subscriptions.values() if other is not s]

    def _request_later(self) -> list[Effect]:
        if self._is_timer_set or not self._without_route:
            return []
        self._is_timer_set = True
        return [SetTimer(ROUTES, self._retry_s)]

    def on_route(self, number: int) -> list[Effect]:
        """The route is in place: events that are published from now on reach this subscription."""
        s = self._without_route.pop(number, None)
        if s is None:
            return []
        domain, topic = self._topics[s.family]
        return self._and_complete(self._module(domain).subscribe([topic]))

    def complete_when_ordered(self, request: int, number: int) -> list[Effect]:
        """Complete a request that waits for a subscription, once its events are delivered in order."""
        self._waiting.setdefault(number, []).append(request)
        return self._and_complete([])

    def _and_complete(self, effects: list[Effect]) -> list[Effect]:
        for number in list(self._waiting):
            s = self._subscriptions.get(number)
            if s is None or self.holds(s):
                effects = [*effects, *(CompleteRequest(request, number) for request in self._waiting.pop(number))]
        return effects

    def holds(self, s: Subscription) -> bool:
        """Whether events of this subscription are delivered in order."""
        domain, topic = self._topics[s.family]
        module = self.modules.get(domain.name)
        return module is not None and topic in module.held

    def _module(self, domain: OrderingDomain) -> OrderingModule:
        module = self.modules.get(domain.name)
        if module is None:

            def deliver(topic: int, event: Arrived, out_of_order: bool) -> list[Effect]:
                return self._deliver(event, out_of_order)

            def request(version: int, topics: tuple[int, ...], former: tuple[int, ...]) -> list[Effect]:
                return self._request(domain, version, topics, former)

            timer = ("ordering", domain.name)
            module = self.modules[domain.name] = OrderingModule(domain, timer, deliver, request, self._retry_s)
        return module

    def _request(
        self, domain: OrderingDomain, version: int, topics: tuple[int, ...], former: tuple[int, ...]
    ) -> list[Effect]:
        if self._link is None:
            return []
        change = ChangeSubscription(
            domain=domain.name,
            version=version,
            types=tuple(domain.types[topic] for topic in topics),
            former=tuple(domain.types[topic] for topic in former),
        )
        return [SendTo(Address(self._link), change)]

    def _deliver(self, arrived: Arrived, out_of_order: bool) -> list[Effect]:
        message: Dissemination = arrived.payload
        assert isinstance(message.publication, OrderedPublished)
        event = message.publication.event
        return [
            Deliver(s.number, event, None, message.sender, out_of_order)
            for s in self._subscriptions.values()
            if self.is_ordered(s) and s.matches(message.lineage, event.body)
        ]

    def on_publication(self, message: Dissemination, now: float) -> list[Effect]:
        """An event of a domain, or indexes that are not for this site."""
        publication = message.publication
        assert isinstance(publication, OrderedPublished | IndexesSkipped)
        module = self.modules.get(publication.domain)
        if module is None:
            return []
        if type(publication) is OrderedPublished:
            arrived = Arrived(publication.index, publication.entries, message, now)
            return self._and_complete(module.on_event(publication.topic, arrived))
        assert type(publication) is IndexesSkipped
        return self._and_complete(module.on_skipped(publication.topic, publication.after, publication.upto))

    def on_cut(self, cut: CutMade) -> list[Effect]:
        module = self.modules.get(cut.domain)
        return self._and_complete(module.on_cut(cut.version, cut.entries)) if module is not None else []

    def on_timer(self, domain: str, kind: str, *of: str) -> list[Effect]:
        if kind == ROUTES[2]:
            self._is_timer_set = False
            return [*(_request(s) for s in self._without_route.values()), *self._request_later()]
        return self._and_complete(self.modules[domain].on_timer(kind, *of))


def _request(s: Subscription) -> SendTo:
    return SendTo(Address(s.coordinator), ConfirmRoute(subscription=s.number))
