"""Which brokers there are, how they are linked, and which of them is the rendezvous of what.

Paths come from the configured topology alone, never from which broker is alive, so that all brokers agree on them.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache

from tops.model.errors import ConfigError
from tops.model.ids import NodeId


@lru_cache(maxsize=4096)
def rendezvous_of(brokers: tuple[NodeId, ...], family: str) -> NodeId:
    """The broker where a family of event types meets: highest hash wins, so that one broker more or less moves only
    the families that it wins or held."""
    return max(brokers, key=lambda b: hashlib.sha256(f"{b}\0{family}".encode()).digest())


class Topology:
    """The brokers of the configuration and the links between them."""

    def __init__(self, links: Mapping[NodeId, Iterable[NodeId]]) -> None:
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
        """The broker where a family of event types meets."""
        return rendezvous_of(self.brokers, family)

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
