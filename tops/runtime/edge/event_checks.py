"""What a broker checks of the events in a message of a site, whatever rights the site has.

The depth of nested values: each level costs a decoder a level of its stack, so a value that one broker can decode may
be too deep for the next one, or for its own journal. With one bound at the edge every node can decode and encode what
passes it. Whether a body fits the definition of a replica set's type. And the writer's clock in a replica set's log: it
is replaced if it is wrong, since replicas rely on it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final

import msgspec

from tops.model.errors import InvalidEvent, ProtocolError
from tops.model.event_types import NAME_LENGTH_MAX, NESTING_MAX, SETS_ROOT, EventType, SetPart, set_part
from tops.protocol.messages import (
    BeginPublic,
    BeginRoutingTx,
    BeginTx,
    CensusOpened,
    Event,
    EventsPublished,
    EventStep,
    Published,
    PublishInTx,
    RunOneShot,
    RunOneShots,
    TreePublished,
    TxPublished,
    TxSpec,
    TypeAdvertised,
    decode_body,
    encode_body,
)
from tops.protocol.set_types import AT, is_plain_write, set_definition

CLOCK_DIFFERENCE_MAX_MS: Final = 5 * 60 * 1000
KNOWN_MAX: Final = 10_000

_CONTAINERS: Final = frozenset([list, dict, tuple])  # tuples: a decoder makes them of lists that are keys
_CONTAINER_HEADERS: Final = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])  # of MessagePack

_first_byte = itemgetter(0)

_CHECKED: Final = frozenset(
    [
        RunOneShot,
        RunOneShots,
        EventsPublished,
        Published,
        TxPublished,
        PublishInTx,
        BeginTx,
        BeginPublic,
        CensusOpened,
        TypeAdvertised,
        TreePublished,
        EventStep,
        BeginRoutingTx,
    ]
)  # all messages with values of any kind; `Filter` checks its own


def check_nesting(name: str, values: dict[str, Any]) -> None:
    """Raise InvalidEvent if a value is nested too deeply. Takes one step per level, without recursion."""
    for attribute, value in values.items():
        if type(value) in _CONTAINERS and _is_too_deep(value):
            raise InvalidEvent(name, attribute[:NAME_LENGTH_MAX], f"is nested deeper than {NESTING_MAX} levels")


def _is_too_deep(value: object) -> bool:
    level = [value]
    for _ in range(NESTING_MAX):
        level = [member for container in level for member in _members(container) if type(member) in _CONTAINERS]
        if not level:
            return False
    return True


def _members(container: Any) -> Iterable[object]:
    return chain(container, container.values()) if type(container) is dict else container


def _may_be_deep(bodies: Sequence[msgspec.Raw]) -> bool:
    """Whether one of these encoded bodies may be nested too deeply. False is certain: a body has at most as many levels
    as all of them have headers of containers, less those with which other bodies begin. Bytes inside of texts count as
    headers as well, so True is only a suspicion."""
    beginnings = bytes(map(_first_byte, map(bytes, bodies)))
    return _headers(b"".join(bodies)) - (_headers(beginnings) - 1) > NESTING_MAX


def _headers(data: bytes) -> int:
    return len(data) - len(data.translate(None, _CONTAINER_HEADERS))


class EventChecks:
    """The checks of one site's events. Events of a replica set's types are checked against their definition, which
    follows from the name; events of other types are checked at their rendezvous, which has the definition."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._of_sets: dict[str, EventType | None] = {}  # by name; None: no type of a set
        self._logs: set[str] = set()

    def check(self, message: object) -> None:
        """Raise InvalidEvent, InvalidEventType or InvalidTransaction if the content of this publication or message must
        not pass."""
        if type(message) not in _CHECKED:
            return
        match message:
            case RunOneShot(spec=spec, events=events):
                self._in_transaction(spec, events)
            case RunOneShots(spec=spec, transactions=transactions):
                self._in_transaction(spec, [event for one in transactions for event in one.events])
            case EventsPublished():
                self._encoded(message)
            case Published(event=event) | TxPublished(event=event) | PublishInTx(event=event):
                self.event(event)
            case TreePublished(event=event) | EventStep(event=event):
                self.event(event)
            case BeginRoutingTx(steps=steps):
                for step in steps:
                    check_nesting(step.event_type, step.body)
            case BeginTx(spec=spec) | BeginPublic(spec=spec) | CensusOpened(spec=spec):
                self._in_transaction(spec, ())
            case TypeAdvertised(plans=plans) if plans is not None:
                for spec in plans:
                    self._in_transaction(spec, ())

    def event(self, event: Event) -> bool:
        """Check one event; returns whether its clock was replaced."""
        return self._event(event, self._now_ms())

    def _event(self, event: Event, now_ms: int) -> bool:
        name, body = event.type, event.body
        if name in self._logs and is_plain_write(body):
            return _bound_clock(body, now_ms)
        definition = self._of_set(name)
        if definition is not None:
            definition.check(body)  # values of its kinds have no members
            return AT in body and _bound_clock(body, now_ms)
        check_nesting(name, body)
        return False

    def _in_transaction(self, spec: TxSpec, events: Iterable[Event]) -> None:
        spec.check_times()
        if spec.attributes:
            check_nesting(spec.event_type, spec.attributes)
        now_ms = self._now_ms()
        for event in events:
            self._event(event, now_ms)

    def _of_set(self, name: str) -> EventType | None:
        known = self._of_sets
        if name not in known:
            if len(known) >= KNOWN_MAX:
                known.clear()
                self._logs.clear()
            known[name] = set_definition(name) if name.partition(".")[0] == SETS_ROOT else None
            if set_part(name) is SetPart.LOG:
                self._logs.add(name)
        return known[name]

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _encoded(self, message: EventsPublished) -> None:
        """Check encoded bodies. Those of a set's types are decoded and checked like others; those of other types are
        decoded only if they may be nested too deeply: most stay encoded on their whole way."""
        name = message.event_type
        if self._of_set(name) is None:
            if _may_be_deep(message.bodies):  # rarely true, and tested once for the whole message
                for encoded in message.bodies:
                    if _may_be_deep((encoded,)):
                        self.event(_decoded(name, encoded))
            return
        events = [_decoded(name, encoded) for encoded in message.bodies]
        replaced = [self.event(event) for event in events]
        if any(replaced):
            bodies = tuple(msgspec.Raw(encode_body(event.body)) for event in events)
            msgspec.structs.force_setattr(
                message, "bodies", bodies
            )  # in place: the message was decoded for this site alone


def _bound_clock(body: dict[str, Any], now_ms: int) -> bool:
    if -CLOCK_DIFFERENCE_MAX_MS <= body[AT] - now_ms <= CLOCK_DIFFERENCE_MAX_MS:
        return False
    body[AT] = now_ms  # in place: the body was decoded for this message alone
    return True


def _decoded(name: str, encoded: msgspec.Raw) -> Event:
    body = decode_body(encoded)
    if body is None:
        raise ProtocolError(f"the body of an event of type {name[:NAME_LENGTH_MAX]!r} can't be decoded")
    return Event(name, body)
