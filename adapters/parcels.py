"""Lists that are too long for one message."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def parcels(items: Sequence[T], size_of: Callable[[T], int], bytes_max: int) -> Iterator[Sequence[T]]:
    """The items, in order, in as few lists as their size allows; one that is longer alone has a list of its own."""
    start = size = 0
    for place, item in enumerate(items):
        item_size = size_of(item)
        size += item_size
        if size > bytes_max and place > start:
            yield items[start:place]
            start, size = place, item_size
    yield items[start:]
