"""Events and one-shot transactions that an application passes on in one event-loop iteration travel together.

When the type of events or the kind of transactions changes, or a limit would be exceeded, what was gathered before is
sent first; so events keep their order among themselves, and so do transactions. The driver calls `send` at the end of
the iteration, and before every other input of the application.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from tops.model.errors import ProtocolError
from tops.model.sizes import MESSAGE_BYTES_MAX
from tops.protocol.effects import Effect
from tops.protocol.messages import Event, TxSpec, encode_body

EVENTS_MAX: Final = 1024  # in one message
ONE_SHOTS_MAX: Final = 64  # in one message: as many as an epoch may have
GATHERED_BYTES_MAX: Final = MESSAGE_BYTES_MAX // 2

GatheredEvent = tuple[int, dict[str, Any], msgspec.Raw]  # request, body, the body encoded
GatheredOneShot = tuple[int, tuple[Event, ...]]  # request, events


class Gathering:
    """What waits for the end of the iteration."""

    def __init__(
        self,
        publish: Callable[[str, Sequence[GatheredEvent]], list[Effect]],
        execute: Callable[[TxSpec, Sequence[GatheredOneShot]], list[Effect]],
    ) -> None:
        self._publish, self._execute = publish, execute
        self._events: list[GatheredEvent] = []
        self._event_type = ""
        self._event_bytes = 0
        self._one_shots: list[GatheredOneShot] = []
        self._spec: TxSpec | None = None
        self._one_shot_bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._events and not self._one_shots

    def add_event(self, request: int, event_type: str, body: dict[str, Any]) -> list[Effect]:
        """An ordinary event of an advertised type, with the request that waits for its confirmation (0: none).

        The caller has checked the body. ProtocolError for an event that fits into no message."""
        encoded = encode_body(body)
        size = len(encoded)
        if size > GATHERED_BYTES_MAX:
            raise ProtocolError(f"an event of {size} bytes is over the limit of {GATHERED_BYTES_MAX}: split it")
        effects: list[Effect] = []
        if self._events and (
            event_type != self._event_type
            or len(self._events) >= EVENTS_MAX
            or self._event_bytes + size > GATHERED_BYTES_MAX
        ):
            effects = self._send_events()
        self._event_type = event_type
        self._events.append((request, body, msgspec.Raw(encoded)))
        self._event_bytes += size
        return effects

    def add_one_shot(self, request: int, spec: TxSpec, events: tuple[Event, ...], size: int) -> list[Effect]:
        """A one-shot transaction with `size` bytes of events, with the request that waits for its outcome."""
        effects: list[Effect] = []
        if self._one_shots and (
            (spec is not self._spec and spec != self._spec)
            or len(self._one_shots) >= ONE_SHOTS_MAX
            or self._one_shot_bytes + size > GATHERED_BYTES_MAX
        ):
            effects = self._send_one_shots()
        self._spec = spec
        self._one_shots.append((request, events))
        self._one_shot_bytes += size
        return effects

    def send(self) -> list[Effect]:
        """The messages for all that was gathered."""
        return self._send_events() + self._send_one_shots()

    def _send_events(self) -> list[Effect]:
        if not self._events:
            return []
        events, self._events, self._event_bytes = self._events, [], 0
        return self._publish(self._event_type, events)

    def _send_one_shots(self) -> list[Effect]:
        if not self._one_shots or self._spec is None:
            return []
        one_shots, self._one_shots, self._one_shot_bytes = self._one_shots, [], 0
        return self._execute(self._spec, one_shots)
