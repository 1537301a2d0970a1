"""One node's effects, carried out in order; an effect behind a record waits until the record is on disk.

A record goes to the journal as soon as the machine returns it, so that records of the same time share one sync. Effects
that precede a record in the list may then be carried out after it is written: a crash in between loses a message that a
crash could lose anyway, and nothing else.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tops.protocol.effects import Effect, Note, Persist
from tops.protocol.records import AnyRecord


class RecordSink(Protocol):
    """The part of a journal that the outbox needs."""

    def append(self, record: AnyRecord, *, soon: bool = True) -> int:
        """Queue a record; returns its number in the journal. If not `soon`, nothing waits for it."""

    def is_durable(self, sequence: int) -> bool: ...

    def when_durable(self, sequence: int, callback: Callable[[], object]) -> None: ...


class Outbox:
    """The queue of effects of one node; without a sink, for a machine that persists no records."""

    def __init__(self, perform: Callable[[Effect], None], sink: RecordSink | None = None) -> None:
        self._perform, self._sink = perform, sink
        self._queue: deque[Effect | int] = (
            deque()
        )  # effects, and numbers of records for which the following effects wait
        self._waiting = False
        self._draining = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, effects: Sequence[Effect]) -> None:
        """Queue a machine's effects; those that need not wait for a record are carried out when this returns."""
        queue, sink = self._queue, self._sink
        if sink is None:
            queue.extend(effects)
        else:
            for effect in effects:
                kind = type(effect)
                if kind is Persist:
                    queue.append(sink.append(effect.record))  # type: ignore[attr-defined]
                elif kind is Note:
                    sink.append(effect.record, soon=False)  # type: ignore[attr-defined]
                else:
                    queue.append(effect)
        if not self._waiting and not self._draining:
            self._drain()

    def _drain(self) -> None:
        queue, perform = self._queue, self._perform
        self._draining = True
        try:
            while queue:
                item = queue.popleft()
                if type(item) is not int:
                    perform(item)  # type: ignore[arg-type]
                elif not self._reached(item):
                    queue.appendleft(item)
                    return
        finally:
            self._draining = False

    def _reached(self, sequence: int) -> bool:
        sink = self._sink
        assert sink is not None
        if sink.is_durable(sequence):
            return True
        self._waiting = True
        sink.when_durable(sequence, self._go_on)
        return False

    def _go_on(self) -> None:
        self._waiting = False
        self._drain()
