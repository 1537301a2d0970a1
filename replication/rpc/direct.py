"""What travels on a direct connection between a client and a replica's agent.

After the handshake the agent says `READY`; from then on every WebSocket message is one byte that tells what follows:
a bundle of requests or responses as they travel through brokers, or quick reads. A quick read names a statement that
the agent has described, and carries parameters and rows as PostgreSQL takes and gives them.
"""

from typing import Final, TypeVar

import msgspec

from replication.rpc.calls import Denied, Failed
from tops.model.errors import ProtocolError

T = TypeVar("T")
PATH: Final = "/direct"
READY: Final = b"\x02"
BUNDLE: Final = 0
QUICK: Final = 1
STATEMENTS_MAX: Final = 1_000  # that a connection numbers
SETTLED, CHOSEN = 1, 2  # flags of a read, as in `calls.Read`

QuickRequest = tuple[int, int, bytes, int, float, int]  # id, statement, parameters, position, wait in seconds, flags
Column = tuple[str, int]


class QuickRequests(msgspec.Struct, frozen=True, array_like=True):
    """Reads, and statements to be described, by the numbers that the client gives them; `is_anew`: it begins to count
    anew."""

    reads: list[QuickRequest]
    statements: list[tuple[int, str]] = []
    is_anew: bool = False


class QuickResponses(msgspec.Struct, frozen=True, array_like=True):
    """Rows of reads; reads that failed; reads to be asked for as any other request (`again`). Statements that are
    described: their parameters' and columns' types; that are not quick; that have to be described again."""

    rows: list[tuple[int, bytes]]
    failed: list[tuple[int, Failed | Denied]]
    again: list[int]
    described: list[tuple[int, list[int], list[Column]]]
    not_quick: list[int]
    dropped: list[int]


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(QuickRequests)
_responses = msgspec.msgpack.Decoder(QuickResponses)


def encode_quick(said: QuickRequests | QuickResponses) -> bytes:
    buffer = bytearray((QUICK,))
    _encoder.encode_into(said, buffer, 1)
    return bytes(buffer)


def encode_direct_bundle(bundle: bytes) -> bytes:
    return bytes((BUNDLE,)) + bundle


def decode_quick_requests(data: memoryview) -> QuickRequests:
    return _decoded(_requests, data)


def decode_quick_responses(data: memoryview) -> QuickResponses:
    return _decoded(_responses, data)


def _decoded(decoder: "msgspec.msgpack.Decoder[T]", data: memoryview) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not quick reads: {str(error)[:200]}") from None
