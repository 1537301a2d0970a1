"""Timers by key on the event loop's clock; setting a key again replaces its timer."""

import asyncio
from collections.abc import Callable, Hashable, Iterable

Fire = Callable[[tuple[str, ...]], None]


class Timers:
    """All timers of one node. `fire` gets the key's parts as text, as machines expect them."""

    def __init__(self, fire: Fire) -> None:
        self._fire = fire
        self._loop = asyncio.get_running_loop()  # cached: to look it up costs a system call each time
        self._handles: dict[Hashable, asyncio.TimerHandle] = {}

    def set(self, key: Hashable, after_s: float) -> None:
        known = self._handles.pop(key, None)
        if known is not None:
            known.cancel()
        self._handles[key] = self._loop.call_later(after_s, self._due, key)

    def cancel(self, key: Hashable) -> None:
        known = self._handles.pop(key, None)
        if known is not None:
            known.cancel()

    def clear(self) -> None:
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _due(self, key: Hashable) -> None:
        self._handles.pop(key, None)
        parts: Iterable[object] = key if isinstance(key, tuple) else (key,)
        self._fire(tuple(map(str, parts)))
