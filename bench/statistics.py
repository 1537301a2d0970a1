"""Percentiles of latencies, and figures: how two sides compare over several pairs of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil
from statistics import median
from typing import TypedDict


class Better(Enum):
    """Which way a quantity is good."""

    HIGHER = "higher"  # throughput
    LOWER = "lower"  # latency


class FigureRecord(TypedDict):
    ratio: float
    ours: float
    theirs: float
    runs: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Figure:
    """How we compare with a peer; a ratio above 1 means that we are better, whatever the quantity.

    `ratio` is the median over the pairs of each pair's own ratio, since the two runs of a pair met the same moment
    of a drifting machine; `low` and `high` are the worst and the best pair. `ours` and `theirs` are the medians of
    each side, so their quotient may differ a little from `ratio`.
    """

    ratio: float
    ours: float
    theirs: float
    runs: int
    low: float
    high: float

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[float, float]], better: Better) -> "Figure":
        """From (ours, theirs) pairs of one quantity; every value must be above 0."""
        if not pairs:
            raise ValueError("a figure needs at least one pair of runs")
        ratios = [ours / theirs if better is Better.HIGHER else theirs / ours for ours, theirs in pairs]
        return cls(
            ratio=median(ratios),
            ours=median(ours for ours, _ in pairs),
            theirs=median(theirs for _, theirs in pairs),
            runs=len(pairs),
            low=min(ratios),
            high=max(ratios),
        )

    def record(self) -> FigureRecord:
        """As it stands in the results."""
        return FigureRecord(
            ratio=round(self.ratio, 4),
            ours=round(self.ours, 4),
            theirs=round(self.theirs, 4),
            runs=self.runs,
            low=round(self.low, 4),
            high=round(self.high, 4),
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of all values do not exceed; `ordered` is sorted and not empty."""
    if not ordered:
        raise ValueError("no values to take a percentile of")
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]
