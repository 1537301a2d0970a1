"""Virtual time: a heap of scheduled actions. Nothing happens between them, so idle time costs nothing."""

import heapq
from collections.abc import Callable
from typing import Any

Scheduled = tuple[float, int, Callable[..., None], tuple[Any, ...]]


class Clock:
    """Runs scheduled actions in order of time, ties in order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._order = 0
        self._heap: list[Scheduled] = []

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, action, *args)

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time, self._order, action, args))

    def step(self, until: float) -> bool:
        """Run the next action that is due by `until`; False if there is none."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, action, args = heapq.heappop(self._heap)
        self.steps += 1
        action(*args)
        return True

    def run(self, until: float, steps_max: int | None = None) -> None:
        """Run all actions that are due by `until`, or stop after `steps_max` steps since the beginning."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            if self.steps == steps_max:
                return
            self.now, _, action, args = pop(heap)
            self.steps += 1
            action(*args)
        self.now = max(self.now, until)
