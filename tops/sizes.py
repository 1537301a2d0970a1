"""How long messages may be, and what in them is measured."""

from typing import Final

import msgspec

FRAME_BYTES_MAX: Final = 8 * 2**20  # of one WebSocket message, after authentication
MESSAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - 1024  # of one message: a frame holds at least one
# Of one message of a site, and of one transaction in a log. Brokers send on what such a message holds inside of other
# messages, which must fit a frame as well. What they add once is the sender's stamp, addresses and names (below 2 KiB
# each), an epoch's id and 64 sequence numbers in a prepare, and in a delivery of the log 256 digests (8 KiB) and the
# hashed names of those who committed an entry (1,000 voters take about 20 KiB).
SITE_MESSAGE_BYTES_MAX: Final = MESSAGE_BYTES_MAX - 32 * 1024
# Of events that travel encoded. They may be decoded and encoded again, where a float of 5 bytes takes 9.
ENCODED_BYTES_MAX: Final = SITE_MESSAGE_BYTES_MAX * 5 // 9
# A shorter frame is not measured: none of its messages is more than 16 times as long when it is encoded again. Values
# take 9 bytes instead of 5 at most, and a structure without its optional fields grows about tenfold.
UNMEASURED_BYTES_MAX: Final = SITE_MESSAGE_BYTES_MAX // 16

_AROUND_BYTES: Final = 64  # of a logged transaction: headers of its fields, its scope limit and its kind
_encoder = msgspec.msgpack.Encoder()


def encoded_bytes(value: object) -> int:
    """How many bytes a value of a message takes on the wire and in a journal."""
    return len(_encoder.encode(value))


def logged_bytes(tx: str, event_type: str, attributes: dict[str, object]) -> int:
    """How many bytes a transaction takes in an entry of a log, without its events."""
    return len(_encoder.encode((tx, event_type, attributes))) + _AROUND_BYTES
