"""Messages to and from bytes, and the control frames of a link.

After the handshake every WebSocket message is one byte for the kind, then MessagePack: a frame of the link's session,
or one of the control frames below. Everything is decoded into declared types; other data is a `ProtocolError`, never an
exception of a library.
"""

from typing import Final

import msgspec

from tops.core.link.session import Frame
from tops.model.errors import ProtocolError, TopsError, Undecodable
from tops.model.map_keys import check_map_keys
from tops.model.ordering import OrderingDomain
from tops.model.sizes import MESSAGE_BYTES_MAX
from tops.protocol.messages import PROTOCOL, LinkMessage

FRAME: Final = 0
CONTROL: Final = 1


class LinkControl(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A control frame: about the link itself, outside its session, neither numbered nor repeated."""


class LinkHello(LinkControl, frozen=True):
    """The first control frame on a connection, from both ends. If both name the same session, it continues; otherwise a
    new one begins under the name that the accepting end proposes.

    A broker also names the brokers of the cluster, among which rendezvous are chosen, their addresses, and the ordering
    domains."""

    protocol: int
    session: str
    received: int
    proposal: str
    brokers: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    domains: tuple[OrderingDomain, ...] = ()


class MessageRejected(LinkControl, frozen=True):
    """A message from the other end was not acted on. `subject` names it: `events TYPE`, `tx ID`, `subscription N`,
    `type NAME`."""

    subject: str
    verb: str
    event_type: str
    text: str
    code: str = "denied"  # or why a message within the sender's rights was not acted on: see `Reject`


class Backpressure(LinkControl, frozen=True):
    """A broker has too much queued, or no longer; brokers forward it to each other while `change` is new."""

    broker: str
    incarnation: int
    change: int
    backpressure: bool


class RequestAcknowledgement(LinkControl, frozen=True):
    """The sender waits for the acknowledgement of everything that it has sent so far."""


class Goodbye(LinkControl, frozen=True):
    """The sender is about to close the connection, for this reason."""

    reason: str


AnyControl = LinkHello | MessageRejected | Backpressure | RequestAcknowledgement | Goodbye

_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_controls: msgspec.msgpack.Decoder[AnyControl] = msgspec.msgpack.Decoder(AnyControl)


def encode_message(message: LinkMessage) -> bytes:
    """One message, to be put into any number of frames; ProtocolError if it fits into none."""
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


def encode_control(control: AnyControl) -> bytes:
    return b"\1" + _encoder.encode(control)


def decode(data: bytes) -> Frame | AnyControl:
    """The content of one WebSocket message."""
    if not data:
        raise _undecodable("an empty message", None)
    try:
        if data[0] == FRAME:
            check_map_keys(memoryview(data)[1:])
            return _frames.decode(memoryview(data)[1:])
        if data[0] == CONTROL:
            return _controls.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TopsError, ValueError, TypeError) as error:
        # Filters and event types that contradict themselves raise errors of their own classes.
        raise _undecodable("a message that can't be decoded", error) from None
    raise _undecodable(f"a message of unknown kind {data[0]}", None)


def _undecodable(what: str, error: Exception | None) -> Undecodable:
    detail = f": {str(error)[:200]}" if error is not None else ""
    return Undecodable(f"the other end sent {what}{detail}")


def make_link_hello(
    session: str,
    received: int,
    proposal: str,
    brokers: tuple[str, ...],
    urls: tuple[str, ...],
    domains: tuple[OrderingDomain, ...] = (),
) -> LinkHello:
    return LinkHello(PROTOCOL, session, received, proposal, brokers, urls, domains)
