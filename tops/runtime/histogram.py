"""Durations, counted by range in the form of Prometheus; to add one costs a bisection."""

from bisect import bisect_left
from itertools import accumulate
from typing import Final

# From a commit on a fast disk to the end of a client's patience.
BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NAMES: Final = (*(str(bound) for bound in BOUNDS_S), "+Inf")


class Histogram:
    """The number of durations in each range, and the sum of all."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s

    def buckets(self) -> list[tuple[str, float]]:
        """The name of each upper bound, and the number of durations that are not above it."""
        return [(name, float(count)) for name, count in zip(_NAMES, accumulate(self.counts), strict=True)]
