"""Memories that are bounded: what is oldest is forgotten first."""

from collections import OrderedDict
from typing import Any

REMEMBERED_MAX = 10_000


def trim(memory: "OrderedDict[Any, Any]") -> None:
    """Forget the oldest, after something was added, if there is too much."""
    if len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)
