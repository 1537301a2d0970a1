"""For how long an index has been the last one of a log: this gives a follower's lag in seconds from its position.

Marks are at least a second apart, and their number is bounded: a lag is exact to a second, and one that is longer than
the marks reach back is reported as at least that long.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Final

from tops.core.log.event_log import EventLog

MARK_EVERY_S: Final = 1.0
MARKS_MAX: Final = 3600


class LogAges:
    """When the logs of one broker reached their indexes."""

    def __init__(self, logs: Mapping[str, EventLog]) -> None:
        self._logs = logs
        self._marks: dict[str, deque[tuple[int, float]]] = {}  # by log: its last index, and since when

    def look(self, now: float) -> None:
        """Set marks; to be called at least once a second."""
        for name, log in self._logs.items():
            marks = self._marks.setdefault(name, deque(maxlen=MARKS_MAX))
            index = log.decided_upto
            if not marks or (index > marks[-1][0] and now - marks[-1][1] >= MARK_EVERY_S):
                marks.append((index, now))

    def lag_s(self, name: str, position: int, now: float) -> float:
        """For how long the log has had an entry beyond this position; 0 if it has none."""
        log = self._logs[name]
        marks = self._marks.get(name)
        if position >= log.decided_upto or not marks:
            return 0.0
        first = bisect_right(marks, position, key=lambda mark: mark[0])
        since = next(islice(marks, first, None), (0, now))[1]
        return now - since
