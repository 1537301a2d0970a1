"""The filters that a broker forwards so that it gets everything its links want: few, and found with bounded work.

A filter that another one covers need not be forwarded. Filters form trees, each below one that covers it, and the roots
are forwarded. The forwarded filters may match more than is wanted, since events are filtered again nearer to the
subscriber; they never match less. So every search for a cover may stop early, and a filter that is no longer wanted may
stay while many lie below it: a change costs a bounded number of comparisons, whatever the filters are.
"""

from itertools import islice
from typing import Any, Final

from tops.core.overlay.filter_index import FilterIndex
from tops.model.filters import Filter

PASSED_ON_MAX: Final = 1_024  # filters; instead of more, one that matches all events is forwarded
LOOKED_AT_MAX: Final = 32  # filters that one is compared with in each direction
MOVED_MAX: Final = 16  # filters that one change moves
INTERVALS_MAX: Final = (
    64  # of a filter that is compared; for a longer one it would take long, and it rarely has a cover
)

_EVERYTHING: Final = Filter.everything()


class _Node:
    """A filter with the filters below it, each of which it covers."""

    __slots__ = ("above", "below", "filter", "is_wanted", "size")

    def __init__(self, wanted: Filter, is_wanted: bool) -> None:
        self.filter, self.is_wanted = wanted, is_wanted
        self.size = sum(1 if each.allowed is None else len(each.allowed.intervals) for each in wanted.constraints)
        self.above: _Node | None = None
        self.below: dict[_Node, None] = {}

    def covers(self, other: "_Node") -> bool:
        """Whether it covers the other one; False also if a proof would take long."""
        if not self.filter.constraints:
            return True
        return other.size <= INTERVALS_MAX and self.filter.covers(other.filter)


class Cover:
    """Wanted filters, and the filters that cover them."""

    def __init__(
        self, passed_on_max: int = PASSED_ON_MAX, looked_at_max: int = LOOKED_AT_MAX, moved_max: int = MOVED_MAX
    ) -> None:
        self._passed_on_max, self._looked_at_max, self._moved_max = passed_on_max, looked_at_max, moved_max
        self._nodes: dict[Filter, _Node] = {}
        self._roots: dict[_Node, None] = {}  # the least recently compared first
        self._index: FilterIndex[_Node] = FilterIndex()  # of the roots
        self._unwanted: dict[_Node, None] = {}  # kept for the filters below them
        self._changed: dict[Filter, bool] = {}  # since the last `changes`: forwarded, or no longer

    @property
    def passed_on(self) -> list[Filter]:
        return [root.filter for root in self._roots]

    def add(self, wanted: Filter) -> None:
        """The filter is wanted; to add it twice is to add it once."""
        if not wanted.satisfiable:
            return
        node = self._nodes.get(wanted)
        if node is None:
            node = self._nodes[wanted] = _Node(wanted, is_wanted=True)
            self._place(node)
        elif not node.is_wanted:
            node.is_wanted = True
            del self._unwanted[node]
        self._move()

    def remove(self, wanted: Filter) -> None:
        """The filter is no longer wanted."""
        node = self._nodes.get(wanted)
        if node is None or not node.is_wanted:
            return
        node.is_wanted = False
        self._unwanted[node] = None
        self._drop_if_idle(node)
        self._move()

    def changes(self) -> tuple[list[Filter], list[Filter]]:
        """The filters that are forwarded since the last call, and those that no longer are."""
        changed, self._changed = self._changed, {}
        return [f for f, passed in changed.items() if passed], [f for f, passed in changed.items() if not passed]

    # ------------------------------------------------------------------------------------------------------ placing

    def _place(self, node: _Node) -> None:
        """Put a filter below a root that covers it, or make it a root above those that it covers."""
        above = self._cover_of(node)
        if above is not None:
            _put_below(node, above)
            return
        self._take_roots_below(node)
        self._make_root(node)
        if len(self._roots) > self._passed_on_max:
            self._ask_for_everything()

    def _cover_of(self, node: _Node) -> _Node | None:
        # A filter that covers another one matches every event of it, so it must match this sample event.
        for root in self._index.first_matches(_some_event_of(node.filter), self._looked_at_max):
            if not self._is_dissolving(root) and root.covers(node):
                return root
        return None

    def _take_roots_below(self, node: _Node) -> None:
        roots = self._roots
        looked_at = list(islice(roots, self._looked_at_max) if node.filter.constraints else roots)
        for root in looked_at:
            if node.covers(root):
                self._end_root(root)
                _put_below(root, node)
            else:
                roots[root] = roots.pop(root)  # the next search begins with others

    def _ask_for_everything(self) -> None:
        node = self._nodes.get(_EVERYTHING)
        if node is None:
            node = self._nodes[_EVERYTHING] = _Node(_EVERYTHING, is_wanted=False)
            self._unwanted[node] = None
        else:
            self._end_root(node)
        self._take_roots_below(node)
        self._make_root(node)

    def _make_root(self, node: _Node) -> None:
        self._roots[node] = None
        self._index.add(node, node.filter)
        self._note(node, passed=True)

    def _end_root(self, node: _Node) -> None:
        del self._roots[node]
        self._index.remove(node, node.filter)
        self._note(node, passed=False)

    def _note(self, node: _Node, *, passed: bool) -> None:
        if self._changed.pop(node.filter, passed) is passed:
            self._changed[node.filter] = passed

    # ------------------------------------------------------------------------------------------- the end of a filter

    def _is_dissolving(self, node: _Node) -> bool:
        """Whether the filters below an unwanted root move elsewhere. While there are many, moving costs more than
        keeping the root."""
        return not node.is_wanted and len(node.below) <= self._passed_on_max // 2

    def _move(self) -> None:
        """Move some of the filters below unwanted ones."""
        left = self._moved_max
        for unwanted in list(islice(self._unwanted, self._moved_max)):
            above = unwanted.above
            if above is None and not self._is_dissolving(unwanted):
                continue
            for node in list(islice(unwanted.below, left)):
                left -= 1
                del unwanted.below[node]
                node.above = None
                if above is None:
                    self._place(node)
                else:
                    _put_below(node, above)
            self._drop_if_idle(unwanted)
            if not left:
                return

    def _drop_if_idle(self, node: _Node | None) -> None:
        while node is not None and not node.is_wanted and not node.below:
            above = node.above
            if above is None:
                self._end_root(node)
            else:
                del above.below[node]
            del self._nodes[node.filter], self._unwanted[node]
            node = above


def _put_below(node: _Node, above: _Node) -> None:
    node.above = above
    above.below[node] = None


def _some_event_of(candidate: Filter) -> dict[str, Any]:
    """A body that the filter matches; None where any value would do, since a filter on values covers no `exists`."""
    return {
        constraint.attribute: None if constraint.allowed is None else constraint.allowed.intervals[0][0]
        for constraint in candidate.constraints
    }
