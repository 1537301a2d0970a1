"""Messages to and from bytes, and the few words that two ends of a link say about the link itself.

After the handshake every WebSocket message is one byte that tells what follows, then MessagePack: a frame of the link's
session, or one of the words below. Everything is decoded into declared types; whatever else arrives is a
`ProtocolError`, never an exception of a library.
"""

from typing import Final

import msgspec

from tops.core.link.session import Frame
from tops.model.errors import ProtocolError, TopsError, Undecodable
from tops.model.ordering import OrderingDomain
from tops.model.sizes import MESSAGE_BYTES_MAX
from tops.protocol.messages import PROTOCOL, LinkMessage

FRAME: Final = 0
WORD: Final = 1
BATCH_BYTES: Final = 256 * 2**10  # a frame takes no more messages once it has reached this


class Word(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Something about the link, outside its session: neither numbered nor repeated."""


class Meet(Word, frozen=True):
    """The first word on a connection, from both ends. If both name the same session it goes on, else a new one
    begins under the name that the accepting end proposes.

    A broker also names the brokers of the cluster, since rendezvous are chosen among them, where they listen, and the
    ordering domains."""

    protocol: int
    session: str
    received: int
    proposal: str
    brokers: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    domains: tuple[OrderingDomain, ...] = ()


class Refused(Word, frozen=True):
    """A message from the other end was not acted on. `subject` names it: `events TYPE`, `tx ID`, `subscription N`,
    `type NAME`."""

    subject: str
    verb: str
    event_type: str
    text: str
    code: str = "denied"  # or why a message that the rights allow was not acted on: see `Reject`


class Pressed(Word, frozen=True):
    """A broker has more queued than it likes, or no longer; passed on from broker to broker while `change` is new."""

    broker: str
    incarnation: int
    change: int
    pressed: bool


class AcknowledgementWanted(Word, frozen=True):
    """Somebody waits to hear that everything sent so far has arrived."""


class Parting(Word, frozen=True):
    """Why the connection is about to be closed by this end."""

    reason: str


AnyWord = Meet | Refused | Pressed | AcknowledgementWanted | Parting

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_words: msgspec.msgpack.Decoder[AnyWord] = msgspec.msgpack.Decoder(AnyWord)


def encode_message(message: LinkMessage) -> bytes:
    """One message, to be put into any number of frames; refused when no frame could hold it."""
    encoded = _encoder.encode(message)
    if len(encoded) > MESSAGE_BYTES_MAX:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(encoded)} bytes is over the limit of {MESSAGE_BYTES_MAX}: split it"
        )
    return encoded


def encode_frame(frame: Frame) -> bytes:
    """A frame; its messages may be `msgspec.Raw`, encoded before."""
    buffer = bytearray(b"\0")
    _encoder.encode_into(frame, buffer, 1)
    return bytes(buffer)


def encode_word(word: AnyWord) -> bytes:
    return b"\1" + _encoder.encode(word)


def decode(data: bytes) -> Frame | AnyWord:
    """What one WebSocket message holds."""
    if not data:
        raise _refusal("an empty message", None)
    try:
        if data[0] == FRAME:
            return _frames.decode(memoryview(data)[1:])
        if data[0] == WORD:
            return _words.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TopsError, ValueError, TypeError) as error:
        # A filter or an event type that contradicts itself is refused by its own class, in its own words.
        raise _refusal("a message that is not ours", error) from None
    raise _refusal(f"a message of unknown kind {data[0]}", None)


def _refusal(what: str, error: Exception | None) -> Undecodable:
    detail = f": {str(error)[:200]}" if error is not None else ""
    return Undecodable(f"the other end sent {what}{detail}")


def meeting(
    session: str,
    received: int,
    proposal: str,
    brokers: tuple[str, ...],
    urls: tuple[str, ...],
    domains: tuple[OrderingDomain, ...] = (),
) -> Meet:
    return Meet(PROTOCOL, session, received, proposal, brokers, urls, domains)
