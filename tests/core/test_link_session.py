"""A link's memory: nothing lost and nothing repeated between two lives, whatever the connection does."""

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tops.core.link.session import Frame, LinkSession
from tops.model.errors import ProtocolError, TopsError
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId
from tops.model.transactions import Scope
from tops.protocol.messages import Address, Envelope, PublisherDone, RouteRemoved, ScopeChosen, Sender


def message(number: int) -> ScopeChosen:
    return ScopeChosen(tx=TxId(f"t{number}"), scope=Scope.LOCAL, distributed=False)


def test_a_repeated_frame_has_no_effect() -> None:
    one, other = LinkSession(), LinkSession()
    frame = one.pack((message(1),))

    assert other.unpack(frame) == (message(1),)
    assert [other.unpack(frame) for _ in range(4)] == [()] * 4


def test_a_frame_after_a_lost_one_is_an_error_that_takes_nothing() -> None:
    one, other = LinkSession(), LinkSession()
    lost, later = one.pack((message(1),)), one.pack((message(2),))

    with pytest.raises(ProtocolError):
        other.unpack(later)
    assert other.received == 0
    assert other.unpack(lost) + other.unpack(later) == (message(1), message(2))


def test_what_was_not_received_is_sent_again_and_what_was_is_forgotten() -> None:
    one, other = LinkSession(), LinkSession()
    frames = [one.pack((message(n),)) for n in range(1, 5)]
    for frame in frames[:2]:
        other.unpack(frame)

    assert one.resume(other.received) == frames[2:]
    assert list(one.unacknowledged) == frames[2:]


def test_traffic_the_other_way_acknowledges_on_its_own() -> None:
    one, other = LinkSession(), LinkSession()
    other.unpack(one.pack((message(1),)))

    one.unpack(other.pack((message(2),)))

    assert not one.unacknowledged


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_over_breaking_connections_everything_arrives_once_and_in_order(data: Any) -> None:
    one, other = LinkSession(), LinkSession()
    sent: list[ScopeChosen] = []
    arrived: list[object] = []
    in_flight: list[Frame] = []
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["send", "send", "arrive", "arrive", "break"])):
            case "send":
                sent.append(message(len(sent)))
                in_flight.append(one.pack((sent[-1],)))
            case "arrive" if in_flight:
                arrived += other.unpack(in_flight.pop(0))
            case "break":
                in_flight = one.resume(other.received)
                in_flight += in_flight[: data.draw(st.integers(0, 2))]  # repeated once more behind the rest
                in_flight.sort(key=lambda frame: frame.number)

    for frame in one.resume(other.received):
        arrived += other.unpack(frame)

    assert arrived == sent


# ------------------------------------------------------------------------------------------------- bytes off the wire

ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Frame)
SAMPLE = Frame(
    1,
    0,
    (
        message(1),
        RouteRemoved(event_type="plain", filter=Filter.where("key", "=", "a")),
        Envelope(
            to=Address(NodeId("b1")),
            body=PublisherDone(tx=TxId("t")),
            reply_to=Address(NodeId("b2"), "P", 1),
            sender=Sender("P", "writer", incarnation=1),
        ),
    ),
)


# The decoder's own words, text that is no text, nesting without end, and values that contradict themselves.
REJECTION_KINDS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TopsError)


def decodes_or_refuses(data: bytes) -> None:
    try:
        frame = DECODER.decode(data)
    except REJECTION_KINDS:
        return
    assert isinstance(frame, Frame)


def test_a_frame_survives_the_wire() -> None:
    assert DECODER.decode(ENCODER.encode(SAMPLE)) == SAMPLE


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x93")
@example(b"\xc1")
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91" * 5000)
def test_arbitrary_bytes_are_a_frame_or_refused_and_nothing_else(data: bytes) -> None:
    decodes_or_refuses(data)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_a_frame_with_flipped_bytes_is_a_frame_or_refused_and_nothing_else(data: Any) -> None:
    encoded = bytearray(ENCODER.encode(SAMPLE))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))

    decodes_or_refuses(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))
    decodes_or_refuses(bytes(encoded))


nested = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.tuples(st.integers(0, 9), st.integers(0, 9), st.lists(nested, max_size=3)))
def test_well_formed_msgpack_of_the_wrong_shape_is_refused_and_nothing_else(parts: tuple[int, int, list[Any]]) -> None:
    decodes_or_refuses(ENCODER.encode(parts))


KINDS = ["Envelope", "Dissemination", "RouteAdded", "RouteRemoved", "RoutesReset", "SubscriptionChanged", "ScopeChosen"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(KINDS), st.lists(nested, max_size=6))
def test_messages_of_a_known_kind_with_other_fields_are_refused_and_nothing_else(kind: str, fields: list[Any]) -> None:
    decodes_or_refuses(ENCODER.encode([1, 0, [[kind, *fields]]]))
