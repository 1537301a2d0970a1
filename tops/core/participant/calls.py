"""Calls to participants that are under way, and what follows when they return."""

from collections.abc import Callable
from typing import Any

from tops.protocol.effects import Effect

Then = Callable[[Any], list[Effect]]


class Calls:
    """Numbers the calls of one site and keeps the continuation of each."""

    def __init__(self) -> None:
        self._last = 0
        self._waiting: dict[int, Then] = {}

    def open(self, then: Then) -> int:
        """A number for a call that is about to be made; `then` gets its result."""
        self._last += 1
        self._waiting[self._last] = then
        return self._last

    def done(self, call: int, result: Any) -> list[Effect]:
        """A participant has returned; a second result of the same call is ignored."""
        then = self._waiting.pop(call, None)
        return [] if then is None else then(result)
