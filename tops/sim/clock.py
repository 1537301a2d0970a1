"""Virtual time: a heap of things to do. Nothing happens between them, so idle time costs nothing."""

import heapq
from collections.abc import Callable


class Clock:
    """Runs scheduled actions in order of time, ties in order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time, self._order, action))

    def step(self, until: float) -> bool:
        """Do the next thing that is due by `until`; False if there is none."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.steps += 1
        action()
        return True
