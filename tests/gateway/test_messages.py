"""Messages of PostgreSQL's protocol: whole or in pieces, and what is none of them."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.gateway.messages import (
    MESSAGE_BYTES_MAX,
    PASSWORD_BYTES_MAX,
    PROTOCOL_3,
    AnyMessage,
    Bind,
    Cancel,
    Decoder,
    Message,
    StartUp,
    Violation,
    WantsEncryption,
    decode_bind,
    message,
)

STARTUP = struct.pack(">i", PROTOCOL_3) + b"user\0anna\0database\0shop\0\0"


def first(body: bytes) -> bytes:
    return struct.pack(">i", len(body) + 4) + body


def decoded(*pieces: bytes) -> list[AnyMessage]:
    decoder, found = Decoder(), list[AnyMessage]()
    decoder.is_authenticated = True
    for piece in pieces:
        decoder.feed(piece)
        while (one := decoder.next()) is not None:
            found.append(one)
    return found


def test_a_start_up_and_what_follows_it_are_taken_apart() -> None:
    query = message(b"Q", b"select 1\0")

    start, asked, ended = decoded(first(STARTUP) + query + message(b"X"))

    assert start == StartUp({"user": "anna", "database": "shop"})
    assert isinstance(asked, Message)
    assert (asked.raw, asked.body) == (query, b"select 1\0")
    assert ended == Message(ord("X"), message(b"X"))


@given(st.integers(1, 40))
def test_a_message_in_pieces_is_the_same_message(size: int) -> None:
    data = first(STARTUP) + message(b"Q", b"select 1\0") + message(b"S") + message(b"X")

    assert decoded(*(data[i : i + size] for i in range(0, len(data), size))) == decoded(data)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(80877103, WantsEncryption(True)), (80877104, WantsEncryption(False))],
)
def test_a_request_for_encryption_comes_before_the_start_up(code: int, expected: WantsEncryption) -> None:
    assert decoded(first(struct.pack(">i", code)), first(STARTUP))[0] == expected


def test_a_cancellation_names_a_session() -> None:
    assert decoded(first(struct.pack(">iii", 80877102, 7, -5))) == [Cancel(7, -5)]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">i", 7), struct.pack(">i", -1), struct.pack(">i", 10_001), struct.pack(">i", 2**31 - 1),
        first(struct.pack(">i", 2 << 16)), first(struct.pack(">i", 80877102)), first(STARTUP[:-1]),
        first(struct.pack(">i", PROTOCOL_3) + b"user\0\0"), first(struct.pack(">i", PROTOCOL_3) + b"\xff\0a\0\0"),
    ],
)  # fmt: skip
def test_a_first_message_that_is_none_is_a_violation(data: bytes) -> None:
    with pytest.raises(Violation):
        decoded(data)


@pytest.mark.parametrize("kind", [b"\0", b"A", b"R", b"\xff", b"q"])
def test_an_unknown_kind_is_a_violation_before_its_length_is_there(kind: bytes) -> None:
    with pytest.raises(Violation, match="invalid frontend message type"):
        decoded(first(STARTUP) + kind)


@pytest.mark.parametrize("length", [-1, 0, 3, MESSAGE_BYTES_MAX + 1, 2**31 - 1])
def test_a_wrong_length_is_a_violation_before_the_body_is_waited_for(length: int) -> None:
    with pytest.raises(Violation, match="invalid message length"):
        decoded(first(STARTUP) + b"Q" + struct.pack(">i", length))


def test_before_the_password_is_proved_messages_are_short() -> None:
    decoder = Decoder()
    decoder.feed(first(STARTUP) + b"p" + struct.pack(">i", PASSWORD_BYTES_MAX + 1))
    decoder.next()

    with pytest.raises(Violation, match="invalid message length"):
        decoder.next()


def test_a_bind_is_taken_apart() -> None:
    body = b"portal\0name\0" + struct.pack(">hhhh", 2, 0, 1, 2) + struct.pack(">i", 1) + b"5"
    body += struct.pack(">i", -1) + struct.pack(">hh", 1, 1)

    bind = decode_bind(body)

    assert bind == Bind("portal", "name", (0, 1), (b"5", None), (1,))
    assert (bind.format_of(1), bind.result_format_of(9)) == (1, 1)


@given(st.binary(max_size=60))
def test_no_body_of_a_bind_raises_anything_else(body: bytes) -> None:
    with suppress(Violation):
        decode_bind(body)


@given(st.lists(st.binary(max_size=30), max_size=6))
def test_no_bytes_of_a_client_raise_anything_else(pieces: list[bytes]) -> None:
    with suppress(Violation):
        decoded(first(STARTUP), *pieces)
