"""Events that an application passes on for sending, by their type or its name, within the size of a message."""

from collections.abc import Mapping, Sequence
from typing import Any

from tops.model.errors import EventTooLarge
from tops.model.event_types import EventType
from tops.model.sizes import MESSAGE_BYTES_MAX
from tops.protocol.messages import Event, encode_body

Body = Mapping[str, Any]
TypeOrName = EventType | str
EVENT_BYTES_MAX = MESSAGE_BYTES_MAX - 64 * 1024  # the rest is for what surrounds the events


def name_of(event_type: TypeOrName) -> str:
    return event_type if isinstance(event_type, str) else event_type.name


def event_of(event_type: str, body: Body) -> Event:
    """An event that fits into a message, or EventTooLarge. This is checked before the machine gets the event, so an
    error leaves no state."""
    event = Event(event_type, dict(body))
    _check_size(len(encode_body(event.body)))
    return event


def _check_size(size: int) -> None:
    if size > EVENT_BYTES_MAX:
        raise EventTooLarge(size, EVENT_BYTES_MAX)


def events_of(tx_type: str, events: Sequence[Body | tuple[TypeOrName, Body]]) -> tuple[Event, ...]:
    return tuple(
        [Event(name_of(e[0]), dict(e[1])) if isinstance(e, tuple) else Event(tx_type, dict(e)) for e in events]
    )


def checked_size(events: Sequence[Event]) -> int:
    """The size of the events in a message; EventTooLarge if they do not fit."""
    size = sum([len(encode_body(event.body)) for event in events])
    _check_size(size)
    return size
