"""Links of a simulated run: in order between two nodes, with very different delays between different ones."""

from collections.abc import Callable
from random import Random
from typing import Any

from tops.sim.clock import Clock

Line = tuple[str, str, str]  # from, to, and what for: some pairs have several links


class Network:
    """Carries messages; a crash loses what is on its way to a node, and the end of what it has sent."""

    def __init__(self, clock: Clock, rng: Random, slow_messages: float, slow_links: float) -> None:
        """`slow_messages` and `slow_links` are the shares of those that take much longer than the others."""
        self.clock, self._rng, self._slow_messages, self._slow_links = clock, rng, slow_messages, slow_links
        self._slowness: dict[Line, float] = {}
        self._free_at: dict[Line, float] = {}
        self._epochs: dict[str, int] = {}  # of a node: what was sent to an earlier one does not arrive
        self._cut_at: dict[Line, float] = {}  # what arrives later on this line was lost by its sender's crash
        self.messages = 0

    def send(self, line: Line, deliver: Callable[..., None], *args: Any) -> None:
        slowness = self._slowness.get(line)
        if slowness is None:
            slowness = self._slowness[line] = 30.0 if self._rng.random() < self._slow_links else 1.0
        rate = 100.0 / slowness if self._rng.random() >= self._slow_messages else 4.0
        delay = self._rng.expovariate(rate)
        now = self.clock.now
        at = self._free_at[line] = max(self._free_at.get(line, 0.0), now + delay)
        self.messages += 1
        self.clock.at(at, self._arrive, line, self._epochs.get(line[1], 0), now, deliver, args)

    def _arrive(self, line: Line, epoch: int, sent: float, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        cut = self._cut_at.get(line)
        lost = cut is not None and sent <= cut and self.clock.now > cut
        if self._epochs.get(line[1], 0) == epoch and not lost:
            deliver(*args)

    def crash(self, node: str) -> None:
        """Nothing that is on its way to this node arrives, and of what it has sent only a beginning."""
        self._epochs[node] = self._epochs.get(node, 0) + 1
        now = self.clock.now
        for line in self._free_at:
            if line[0] == node and self._rng.random() < 0.7:
                self._cut_at[line] = now
            if line[1] == node:
                self._free_at[line] = now
