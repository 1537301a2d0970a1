"""A publisher in causal domains: an event of another type waits until those before it have their places."""

from collections import Counter, deque
from collections.abc import Sequence

from tops.model.ordering import OrderingDomain

Key = tuple[str, int]  # family, number


class CausalOrder:
    """Which publications of one site may be sent, by domain."""

    def __init__(self, domains: Sequence[OrderingDomain]) -> None:
        self._domain_of = {name: domain.name for domain in domains if domain.causal for name in domain.types}
        self._sent: dict[str, Counter[str]] = {name: Counter() for name in self._domain_of.values()}
        self._held: dict[str, deque[Key]] = {name: deque() for name in self._domain_of.values()}

    def holds(self, family: str) -> bool:
        """Whether an event that is published now has to wait."""
        domain = self._domain_of.get(family)
        return domain is not None and (bool(self._held[domain]) or not self._sent[domain].keys() <= {family})

    def sent(self, family: str, count: int = 1) -> None:
        """Events went to their topic manager."""
        domain = self._domain_of.get(family)
        if domain is not None:
            self._sent[domain][family] += count

    def hold(self, key: Key) -> None:
        """This one waits; `holds` has said so."""
        self._held[self._domain_of[key[0]]].append(key)

    def is_held(self, key: Key) -> bool:
        domain = self._domain_of.get(key[0])
        return domain is not None and key in self._held[domain]

    def settled(self, key: Key) -> list[Key]:
        """An event is confirmed, or will not be. Returns those that go now."""
        domain = self._domain_of.get(key[0])
        if domain is None:
            return []
        held, sent = self._held[domain], self._sent[domain]
        if key in held:
            held.remove(key)
        else:
            sent[key[0]] -= 1
            if sent[key[0]] <= 0:
                del sent[key[0]]
        released: list[Key] = []
        while held and sent.keys() <= {held[0][0]}:
            released.append(held.popleft())
            sent[released[-1][0]] += 1
        return released
