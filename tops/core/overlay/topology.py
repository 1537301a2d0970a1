"""Which brokers there are, how they are linked, and which of them is the rendezvous of what.

Paths come from the configured topology alone, never from which broker is alive, so that all brokers agree on them.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from tops.model.errors import ConfigError
from tops.model.ids import NodeId
from tops.model.ordering import OrderingDomain, Placement


@lru_cache(maxsize=4096)
def rendezvous_of(brokers: tuple[NodeId, ...], family: str) -> NodeId:
    """The broker where a family of event types meets: highest hash wins, so that one broker more or less moves only
    the families that it wins or held."""
    return max(brokers, key=lambda b: hashlib.sha256(f"{b}\0{family}".encode()).digest())


def placed_with(domains: Iterable[OrderingDomain]) -> dict[str, str]:
    """Families that do not meet where their own names say, but where the name of their ordering domain does."""
    together = [domain for domain in domains if domain.placement is Placement.TOGETHER]
    return {name: domain.name for domain in together for name in domain.types}


class Topology:
    """The brokers of the configuration and the links between them."""

    def __init__(self, links: Mapping[NodeId, Iterable[NodeId]], domains: Sequence[OrderingDomain] = ()) -> None:
        self.domains = tuple(domains)
        self._placed = placed_with(domains)
        neighbours: dict[NodeId, set[NodeId]] = {b: set() for b in links}
        for broker, others in links.items():
            for other in others:
                if other not in neighbours:
                    raise ConfigError(f"broker {broker!r} has a link to {other!r}, which is not configured")
                neighbours[broker].add(other)
                neighbours[other].add(broker)
        self.neighbours = {b: tuple(sorted(n)) for b, n in sorted(neighbours.items())}
        self.brokers = tuple(self.neighbours)
        self._next_hops: dict[NodeId, dict[NodeId, NodeId]] = {b: self._towards(b) for b in self.brokers}

    def rendezvous(self, family: str) -> NodeId:
        """The rendezvous broker of a family of event types."""
        return rendezvous_of(self.brokers, self._placed.get(family, family))

    def next_hop(self, broker: NodeId, target: NodeId) -> NodeId | None:
        """The neighbour of `broker` on the way to `target`; None if there is no way."""
        return self._next_hops.get(target, {}).get(broker)

    def _towards(self, target: NodeId) -> dict[NodeId, NodeId]:
        hops: dict[NodeId, NodeId] = {}
        reached, frontier = {target}, deque([target])
        while frontier:
            near = frontier.popleft()
            for far in self.neighbours[near]:
                if far not in reached:
                    reached.add(far)
                    hops[far] = near
                    frontier.append(far)
        return hops
