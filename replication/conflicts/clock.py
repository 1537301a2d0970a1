"""A hybrid logical clock: close to the time of day, and never behind anything that was seen."""

import time
from collections.abc import Callable

_SHIFT = 16  # bits below the millisecond


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def reading_at(ms: int) -> int:
    """The lowest reading of that millisecond."""
    return ms << _SHIFT


class HybridClock:
    """Readings are integers that grow; a reading's upper part is milliseconds."""

    def __init__(self, wall: Callable[[], int] = wall_ms) -> None:
        self._wall, self._last = wall, 0
        self.skew_ms = 0  # how far the furthest reading seen was ahead of our time

    def tick(self) -> int:
        """A reading for a change made here and now."""
        self._last = max(self._wall() << _SHIFT, self._last + 1)
        return self._last

    def see(self, reading: int) -> None:
        """A reading of another site: what is done here from now on comes after it."""
        self._last = max(self._last, reading)
        self.skew_ms = max(self.skew_ms, (reading >> _SHIFT) - self._wall())
