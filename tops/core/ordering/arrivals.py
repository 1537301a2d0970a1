"""The events of one topic at a subscriber: which have arrived, how far they are delivered, which are given up."""

from typing import Any

import msgspec

LOST_MAX = 1000  # ranges; what arrives of an older one is dropped


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """An event that waits for its turn."""

    index: int
    entries: dict[int, int]  # its timestamp
    payload: Any
    at: float


class Arrivals(msgspec.Struct):
    """One topic. `clock`: everything up to this index is delivered, skipped or given up."""

    clock: int = 0
    events: dict[int, Arrived] = {}
    skips: dict[int, int] = {}  # indexes that are not for this subscriber, or given up: the last one by the first one
    lost: list[range] = []  # given up: what arrives of it later is out of order
    late: set[int] = set()  # of these, what has arrived since
    marker: int = 0  # everything up to here was sent, as far as it was going to be

    def take(self, event: Arrived) -> None:
        self.events[event.index] = event

    def is_known(self, index: int) -> bool:
        """Whether the event of this index has arrived before, or is behind us."""
        return index <= self.clock or index in self.events

    def is_late(self, index: int) -> bool:
        """Whether this index was given up; true once for each."""
        if index in self.late or not any(index in lost for lost in self.lost):
            return False
        self.late.add(index)
        return True

    def skip(self, first: int, upto: int, *, lost: bool = False) -> None:
        """These indexes need not be waited for."""
        first = max(first, self.clock + 1)
        if upto < first:
            return
        self.skips[first] = max(upto, self.skips.get(first, 0))
        if lost:
            self.lost.append(range(first, upto + 1))
            if len(self.lost) > LOST_MAX:
                del self.lost[0]
                self.late = {index for index in self.late if index >= self.lost[0].start}

    def begin(self, clock: int) -> None:
        """Delivery begins behind this index."""
        self.clock = clock
        self.events = {index: event for index, event in self.events.items() if index > clock}
        skips, self.skips = self.skips, {}
        for first, upto in skips.items():
            self.skip(first, upto)

    def head(self) -> Arrived | None:
        """The next event; moves the clock over what is skipped before it."""
        while (upto := self.skips.pop(self.clock + 1, None)) is not None:
            self.clock = max(self.clock, upto)
        return self.events.get(self.clock + 1)

    def missing(self, upto: int) -> list[range]:
        """The indexes behind the clock, up to this one, that have neither arrived nor are skipped."""
        there = [(index, index) for index in self.events if index <= upto]
        there += [(first, last) for first, last in self.skips.items() if first <= upto]
        found: list[range] = []
        following = self.clock + 1
        for first, last in sorted(there):
            if first > following:
                found.append(range(following, first))
            following = max(following, last + 1)
        if following <= upto:
            found.append(range(following, upto + 1))
        return found

    @property
    def first(self) -> int | None:
        """The lowest index that has arrived."""
        return min(self.events, default=None)
