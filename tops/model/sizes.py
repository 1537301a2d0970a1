"""How long messages and transactions may be, and how they are measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

import msgspec

FRAME_BYTES_MAX: Final = 8 * 2**20  # of one WebSocket message, after authentication
MESSAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - 1024  # of one message: a frame holds at least one
# Of one message of a site, and of one transaction in a log. Brokers forward the content of such a message inside of
# other messages, which must fit into a frame as well. They add once the sender's stamp, addresses and names (below
# 2 KiB each), an epoch's id and 64 sequence numbers in a prepare, and in a delivery of the log 256 digests (8 KiB) and
# the hashed names of the voters that committed an entry (1,000 voters take about 20 KiB).
SITE_MESSAGE_BYTES_MAX: Final = MESSAGE_BYTES_MAX - 32 * 1024
# Of events that travel encoded. They may be decoded and encoded again, where a float of 5 bytes takes 9.
ENCODED_BYTES_MAX: Final = SITE_MESSAGE_BYTES_MAX * 5 // 9
# A shorter frame is not measured: none of its messages is more than 16 times as long when it is encoded again. Values
# take 9 bytes instead of 5 at most, and a structure without its optional fields grows about tenfold.
UNMEASURED_BYTES_MAX: Final = SITE_MESSAGE_BYTES_MAX // 16

TEXT_MAX: Final = 2048  # of an id, a name or a reason in a message of a site, in characters
# Of one transaction with all its events, as it stands in a log: its entry is delivered in one message.
TX_BYTES_MAX: Final = SITE_MESSAGE_BYTES_MAX
# Of one transaction that a replica commits before it is logged, as it is published. The request to commit it travels
# encoded, with its sender and its addressee.
LOCAL_TX_BYTES_MAX: Final = 4 * 2**20
# Of what a broker puts together in one message, one entry of a log or one epoch. A single member may be longer.
BUNDLE_BYTES: Final = 2**20

_AROUND_BYTES: Final = 64  # of a logged transaction: headers of its fields, its scope limit and its kind
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


def encoded_bytes(value: object) -> int:
    """The size of a value of a message on the wire and in a journal. To encode a small write takes a tenth of a
    microsecond, which is less than to add up the sizes of its values."""
    return len(_encoder.encode(value))


def logged_bytes(tx: str, event_type: str, attributes: Mapping[str, object], events: Iterable[object] = ()) -> int:
    """How many bytes a transaction takes in an entry of a log."""
    return len(_encoder.encode((tx, event_type, attributes, events))) + _AROUND_BYTES


def bundles(members: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """The members in their order, in as few bundles as their sizes allow."""
    bundle: list[T] = []
    size = 0
    for member in members:
        own = size_of(member)
        if bundle and size + own > BUNDLE_BYTES:
            yield bundle
            bundle, size = [], 0
        bundle.append(member)
        size += own
    if bundle:
        yield bundle
