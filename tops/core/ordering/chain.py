"""What the managers of one broker pass to those of another: in order, without gaps, each item once.

Every item has a *place*. Places grow, also over restarts of the sender: those of an incarnation begin behind all that
an earlier one can have used, since incarnations are microseconds and no broker passes 1024 items in one.
The sender keeps an item until the receiver has taken it, and then the receiver is responsible for it. The receiver
takes an item only when it has taken the one before, so items never overtake each other on their way up.
"""

from collections import deque
from collections.abc import Iterator

from tops.model.ids import NodeId
from tops.protocol.messages import ChainItem, ChainPassed

PLACE_BITS = 10
ENTRIES_PER_MESSAGE = 16_384


def first_of(incarnation: int) -> int:
    """The number below every place, or index of an event that is not durable, of this incarnation."""
    return incarnation << PLACE_BITS


class Outgoing:
    """The items for one broker that it has not taken."""

    def __init__(self, to: NodeId, incarnation: int) -> None:
        self.to = to
        self.waiting: deque[tuple[int, ChainItem]] = deque()
        self._last = first_of(incarnation)
        self._sent = self._acknowledged = 0

    def put(self, item: ChainItem) -> int:
        """Queue an item and return its place."""
        self._last += 1
        self.waiting.append((self._last, item))
        return self._last

    def recover(self, place: int, item: ChainItem) -> None:
        """An item of an earlier incarnation, which keeps its place. A checkpoint repeats items, topic by topic."""
        if place <= self._acknowledged:
            return
        if not self.waiting or self.waiting[-1][0] < place:
            self.waiting.append((place, item))
        elif all(known != place for known, _ in self.waiting):
            self.waiting = deque(sorted([*self.waiting, (place, item)], key=lambda waits: waits[0]))

    def on_taken(self, upto: int) -> None:
        self._acknowledged = max(self._acknowledged, upto)
        self._sent = max(self._sent, self._acknowledged)
        while self.waiting and self.waiting[0][0] <= upto:
            self.waiting.popleft()

    def send_again(self) -> None:
        """What was sent and not taken may be lost."""
        self._sent = self._acknowledged

    def unsent(self, domain: str, types: int) -> Iterator[ChainPassed]:
        """Messages with everything that was not sent."""
        items: list[tuple[int, ChainItem]] = []
        after, size = self._sent, 0
        for place, item in self.waiting:
            if place <= self._sent:
                continue
            if items and size > ENTRIES_PER_MESSAGE:
                yield ChainPassed(
                    domain=domain, types=types, acknowledged=self._acknowledged, after=after, items=(*items,)
                )
                after, size, items = items[-1][0], 0, []
            items.append((place, item))
            size += 8 + _entries(item)
        if items:
            yield ChainPassed(domain=domain, types=types, acknowledged=self._acknowledged, after=after, items=(*items,))
            self._sent = items[-1][0]


def _entries(item: ChainItem) -> int:
    return len(getattr(item, "entries", ())) + len(getattr(item, "group", ()))


class Incoming:
    """How far the items of each other broker were taken."""

    def __init__(self) -> None:
        self.taken: dict[NodeId, int] = {}

    def fresh(self, sender: NodeId, passed: ChainPassed) -> Iterator[tuple[int, ChainItem]]:
        """The items that were not taken, in order; nothing while one before them is missing: the sender repeats it."""
        # Items that the sender knows to be taken were taken, possibly by an earlier incarnation of this broker.
        cursor = self.taken[sender] = max(self.taken.get(sender, 0), passed.acknowledged)
        if passed.after > cursor:
            return
        for place, item in passed.items:
            if place > cursor:
                cursor = self.taken[sender] = place
                yield place, item

    def recover(self, sender: NodeId, place: int) -> None:
        self.taken[sender] = max(self.taken.get(sender, 0), place)
