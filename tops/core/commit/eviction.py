"""Bounded dictionaries: the oldest entry is evicted first."""

from collections import OrderedDict
from typing import Any

REMEMBERED_MAX = 10_000


def trim(memory: "OrderedDict[Any, Any]") -> None:
    """Evict the oldest entry if there are too many; to be called after each addition."""
    if len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)
