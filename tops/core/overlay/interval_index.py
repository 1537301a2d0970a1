"""Which of many half-open intervals contain a value, by bisection; knows nothing of filters.

An item may have several intervals as long as they are disjoint, so that a value finds it at most once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from math import isqrt
from typing import Any, Final, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

_CHANGES_MIN: Final = 8  # a scan of so few is faster than building a tree


class Rays(Generic[Item]):
    """Intervals that are open to one side, in the order of their one end."""

    def __init__(self) -> None:
        self._ends: list[Any] = []
        self._items: list[Item] = []

    def add(self, end: Any, item: Item) -> None:
        """Index `item` under the end of its ray."""
        position = bisect_right(self._ends, end)
        self._ends.insert(position, end)
        self._items.insert(position, item)

    def remove(self, end: Any, item: Item) -> None:
        """Remove what was added with the same arguments."""
        position = self._items.index(item, bisect_left(self._ends, end), bisect_right(self._ends, end))
        del self._ends[position], self._items[position]

    def up_to(self, value: Any) -> list[Item]:
        """The items whose end is `value` or less: of the rays `[end, ...)`, the ones that contain it."""
        return self._items[: bisect_right(self._ends, value)]

    def beyond(self, value: Any) -> list[Item]:
        """The items whose end is greater than `value`: of the rays `(..., end)`, the ones that contain it."""
        return self._items[bisect_right(self._ends, value) :]


class _Node(Generic[Item]):
    """Of a centred interval tree: the intervals that contain the centre, and the trees to both sides of it."""

    __slots__ = ("by_high", "by_low", "centre", "highs", "left", "lows", "right")

    def __init__(self, intervals: list[tuple[Any, Any, Item]]) -> None:
        """`intervals` are sorted by their low ends, of which the middle one becomes the centre."""
        centre = intervals[len(intervals) // 2][0]
        here = [each for each in intervals if each[0] <= centre < each[1]]
        left = [each for each in intervals if each[1] <= centre]
        right = [each for each in intervals if each[0] > centre]
        self.centre = centre
        self.lows = [low for low, _, _ in here]
        self.by_low = [item for _, _, item in here]
        here.sort(key=lambda each: each[1])
        self.highs = [high for _, high, _ in here]
        self.by_high = [item for _, _, item in here]
        self.left: _Node[Item] | None = _Node(left) if left else None
        self.right: _Node[Item] | None = _Node(right) if right else None


class IntervalTree(Generic[Item]):
    """Intervals with two ends.

    The tree is built as a whole. Changes since then are kept beside it and scanned one by one, until they are so many
    that the next search rebuilds it; many changes together cost one rebuild.
    """

    def __init__(self) -> None:
        self._intervals: dict[Item, list[tuple[Any, Any]]] = {}
        self._root: _Node[Item] | None = None
        self._added: dict[Item, None] = {}
        self._removed: set[Item] = set()

    def add(self, low: Any, high: Any, item: Item) -> None:
        """Index `item` under `[low, high)`, in addition to its other intervals."""
        self._intervals.setdefault(item, []).append((low, high))
        self._added[item] = None

    def remove(self, item: Item) -> None:
        """Remove `item` with all of its intervals; the same object must not be added again."""
        del self._intervals[item]
        self._added.pop(item, None)
        self._removed.add(item)

    def containing(self, value: Any) -> list[Item]:
        """The items with an interval that contains `value`."""
        if len(self._added) + len(self._removed) > _CHANGES_MIN + isqrt(len(self._intervals)):
            self._build()
        found: list[Item] = []
        node = self._root
        while node is not None:
            if value < node.centre:
                found += node.by_low[: bisect_right(node.lows, value)]
                node = node.left
            else:
                found += node.by_high[bisect_right(node.highs, value) :]
                node = node.right
        if self._removed:
            found = [item for item in found if item not in self._removed]
        for item in self._added:
            if any(low <= value < high for low, high in self._intervals[item]):
                found.append(item)
        return found

    def _build(self) -> None:
        flat = [(low, high, item) for item, intervals in self._intervals.items() for low, high in intervals]
        flat.sort(key=lambda each: each[0])
        self._root = _Node(flat) if flat else None
        self._added.clear()
        self._removed.clear()
