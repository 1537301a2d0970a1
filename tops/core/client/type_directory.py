"""The event types that a site knows, and the rendezvous of each."""

from collections.abc import Sequence

import msgspec

from tops.core.broker.routing import placed_with, rendezvous_of
from tops.model.errors import TopsError
from tops.model.event_types import EventTypes
from tops.model.ids import NodeId
from tops.model.ordering import OrderingDomain
from tops.protocol.messages import Definitions, Event, TxSpec


class Route(msgspec.Struct, frozen=True):
    """Where publications of a type go, and which types' subscribers receive them. It never changes, since definitions
    never change."""

    coordinator: NodeId
    lineage: tuple[str, ...]
    durable: bool
    ordered: bool  # its events are forwarded only with complete timestamps


class TypeDirectory:
    """The types of one site: known and advertised ones, and the brokers that coordinate them."""

    def __init__(self, brokers: Sequence[NodeId], domains: Sequence[OrderingDomain] = ()) -> None:
        self.brokers = tuple(sorted(brokers))
        self.domains = tuple(domains)
        self._placed = placed_with(domains)
        self._ordered = frozenset(name for domain in domains for name in domain.types)
        self.types = EventTypes()
        self.advertised: dict[str, Definitions] = {}
        self.plans: dict[str, tuple[TxSpec, ...]] = {}  # declared with a type
        self.members: dict[str, frozenset[str]] = {}  # likewise
        self._routes: dict[str, Route] = {}

    def rendezvous(self, family: str) -> NodeId:
        return rendezvous_of(self.brokers, self._placed.get(family, family))

    def route(self, event_type: str) -> Route:
        known = self._routes.get(event_type)
        if known is None:
            lineage = self.types.lineage(event_type)
            family = lineage[-1]
            durable = self.types.whole(event_type).durable
            known = Route(self.rendezvous(family), lineage, durable, family in self._ordered)
            self._routes[event_type] = known
        return known

    def coordinator_of(self, event_type: str) -> NodeId:
        return self.route(event_type).coordinator

    def problem_with(self, event: Event) -> TopsError | None:
        """Why the event does not fit its type, or None."""
        try:
            self.types.whole(event.type).check(event.body)
        except TopsError as error:
            return error
        return None
