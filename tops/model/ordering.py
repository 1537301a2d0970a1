"""Ordering domains: sets of event type families whose events all subscribers receive in one order."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import cached_property

import msgspec

from tops.model.errors import ConfigError
from tops.model.event_types import SetPart, set_part
from tops.model.ids import NodeId


class Order(StrEnum):
    """What a domain guarantees about the order in which events are received."""

    TOTAL = "total"
    CAUSAL = "causal"  # total and causal


class Placement(StrEnum):
    """Where the topic managers of a domain are."""

    TOGETHER = "together"  # at one broker: the rendezvous of the domain's name
    SPREAD = "spread"  # each at the rendezvous of its own family


class Unreliable(msgspec.Struct, frozen=True):
    """How long and how much a subscriber waits for events that may be lost; for types that are not durable."""

    buffer: int = 1000  # events
    ttl_s: float = 2.0


class OrderingDomain(msgspec.Struct, frozen=True, array_like=True):
    """One ordering domain. A *topic* is a family of event types; its number is its position in `types`."""

    name: str
    types: tuple[str, ...]
    order: Order = Order.TOTAL
    durable: bool = False
    placement: Placement = Placement.TOGETHER
    unreliable: Unreliable | None = None  # None: wait until the order is known to be complete

    @property
    def causal(self) -> bool:
        return self.order is Order.CAUSAL

    def check(self) -> None:
        """Raise ConfigError for a domain that contradicts itself."""
        if not self.types:
            raise ConfigError(f"ordering domain {self.name!r} has no types")
        for position, event_type in enumerate(self.types):
            if event_type in self.types[:position]:
                raise ConfigError(f"ordering domain {self.name!r} lists {event_type!r} twice")
            if set_part(event_type) is not SetPart.NONE:
                raise ConfigError(
                    f"ordering domain {self.name!r} lists {event_type!r}, a type of a replica set: "
                    "replica sets can't be members of a domain"
                )
        if self.durable and self.unreliable is not None:
            raise ConfigError(
                f"ordering domain {self.name!r} is durable: its events are never lost, so remove `unreliable`"
            )

    def layout(self, placed: Callable[[str], NodeId]) -> "Layout":
        """Where each topic manager is, see `Layout`."""
        return Layout(self, tuple(placed(event_type) for event_type in self.types))


class Layout:
    """The topic managers of one domain on their brokers.

    The managers of one broker are one *stage*. Stages are ranked by their first type in the list, and within a stage
    topics are ranked by their position, so that a type that is appended to the list changes the rank of no other.
    Stage 0 ranks highest.
    """

    def __init__(self, domain: OrderingDomain, broker_of: Sequence[NodeId]) -> None:
        self.domain, self.broker_of = domain, tuple(broker_of)
        self.stages: tuple[NodeId, ...] = tuple(dict.fromkeys(self.broker_of))
        numbers = {broker: number for number, broker in enumerate(self.stages)}
        self.stage_of: tuple[int, ...] = tuple(numbers[broker] for broker in self.broker_of)
        self.topics: tuple[int, ...] = tuple(range(len(self.broker_of)))

    @cached_property
    def number_of(self) -> dict[str, int]:
        return {event_type: number for number, event_type in enumerate(self.domain.types)}

    def stage_at(self, broker: NodeId) -> int | None:
        """The stage of this broker; None if no topic manager is there."""
        return self.stages.index(broker) if broker in self.stages else None

    def highest(self, topics: Iterable[int]) -> int:
        """The stage that a line through the managers of these topics reaches last."""
        stage_of = self.stage_of
        return min([stage_of[topic] for topic in topics])

    def lowest(self, topics: Iterable[int]) -> int:
        """The stage at which a line through the managers of these topics begins."""
        stage_of = self.stage_of
        return max([stage_of[topic] for topic in topics])


def check_domains(domains: Sequence[OrderingDomain]) -> None:
    """Raise ConfigError for domains that contradict themselves or each other."""
    owners: dict[str, str] = {}
    for position, domain in enumerate(domains):
        domain.check()
        if domain.name in [other.name for other in domains[:position]]:
            raise ConfigError(f"ordering domain {domain.name!r} is there twice")
        for event_type in domain.types:
            if event_type in owners:
                raise ConfigError(
                    f"type {event_type!r} is in the ordering domains {owners[event_type]!r} and {domain.name!r}: "
                    "a type has one order"
                )
            owners[event_type] = domain.name


def difference(ours: Sequence[OrderingDomain], theirs: Sequence[OrderingDomain]) -> str | None:
    """Why two brokers with these domains can't work together, or None. One of them may know types that the other does
    not know yet, at the end of a list."""
    mine = {domain.name: domain for domain in ours}
    for other in theirs:
        own = mine.get(other.name)
        if own is None:
            continue  # it is new: its types are not in use before all brokers know it
        shared = min(len(own.types), len(other.types))
        if own.types[:shared] != other.types[:shared]:
            return (
                f"ordering domain {own.name!r} lists the types {', '.join(own.types)} here and "
                f"{', '.join(other.types)} there: types are only ever appended"
            )
        if (own.order, own.durable, own.placement) != (other.order, other.durable, other.placement):
            return (
                f"ordering domain {own.name!r} differs between brokers: order, durable and placement must be the same"
            )
    return None
