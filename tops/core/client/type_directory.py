"""What a site knows of event types, and where each of them meets."""

from collections.abc import Sequence

import msgspec

from tops.core.overlay.topology import rendezvous_of
from tops.model.errors import TopsError
from tops.model.event_types import EventTypes
from tops.model.ids import NodeId
from tops.protocol.messages import Definitions, Event, TxSpec


class Route(msgspec.Struct, frozen=True):
    """Where publications of a type go, and which types' subscribers receive them; for good, as definitions are."""

    coordinator: NodeId
    lineage: tuple[str, ...]
    durable: bool


class TypeDirectory:
    """The types of one site: known, advertised, and which broker coordinates them."""

    def __init__(self, brokers: Sequence[NodeId]) -> None:
        self.brokers = tuple(sorted(brokers))
        self.types = EventTypes()
        self.advertised: dict[str, Definitions] = {}
        self.plans: dict[str, tuple[TxSpec, ...]] = {}  # declared with a type
        self.members: dict[str, frozenset[str]] = {}  # likewise
        self._routes: dict[str, Route] = {}

    def rendezvous(self, family: str) -> NodeId:
        return rendezvous_of(self.brokers, family)

    def route(self, event_type: str) -> Route:
        known = self._routes.get(event_type)
        if known is None:
            lineage = self.types.lineage(event_type)
            known = Route(self.rendezvous(lineage[-1]), lineage, self.types.whole(event_type).durable)
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
