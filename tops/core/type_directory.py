"""What a site knows of event types, and where each of them meets."""

from collections.abc import Sequence

from tops.core.routing import rendezvous_of
from tops.errors import TopsError
from tops.event_types import EventTypes
from tops.ids import NodeId
from tops.messages import Definitions, Event


class TypeDirectory:
    """The types of one site: known, advertised, and which broker coordinates them."""

    def __init__(self, brokers: Sequence[NodeId]) -> None:
        self.brokers = tuple(sorted(brokers))
        self.types = EventTypes()
        self.advertised: dict[str, Definitions] = {}
        self._coordinators: dict[str, NodeId] = {}

    def rendezvous(self, family: str) -> NodeId:
        return rendezvous_of(self.brokers, family)

    def coordinator_of(self, event_type: str) -> NodeId:
        known = self._coordinators.get(event_type)
        if known is None:
            known = self._coordinators[event_type] = self.rendezvous(self.types.family(event_type))
        return known

    def problem_with(self, event: Event) -> TopsError | None:
        """Why the event does not fit its type, or None."""
        try:
            self.types.whole(event.type).check(event.body)
        except TopsError as error:
            return error
        return None
