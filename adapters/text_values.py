"""Values of PostgreSQL's common types from and to their text, for rows and parameters that travel as PostgreSQL sends
them.

Only what needs no guess is here. Everything else (other types, infinite dates, a parameter of another Python type than
the statement's) is left to the driver of the agent, so that a value never depends on the road that a query takes.
"""

import struct
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from adapters.changes import Row

Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes | None]  # None: not a value that this type takes without a guess

BOOL, BYTEA, NAME, INT8, INT2, INT4, TEXT, JSON = 16, 17, 19, 20, 21, 23, 25, 114
FLOAT4, FLOAT8, BPCHAR, VARCHAR, DATE, TIME = 700, 701, 1042, 1043, 1082, 1083
TIMESTAMP, TIMESTAMPTZ, NUMERIC, UUID_, JSONB = 1114, 1184, 1700, 2950, 3802

_LENGTH = struct.Struct(">i")
_COUNT = struct.Struct(">H")
_NULL = _LENGTH.pack(-1)
_FLOAT4 = struct.Struct("f")
_HEAD = 7  # of a row's message: its kind, its length, the number of its columns


def _decoded_float4(text: bytes) -> float:
    """As the driver gives it, which reads the four bytes of the value."""
    return float(_FLOAT4.unpack(_FLOAT4.pack(float(text)))[0])


def _decoded_uuid(text: bytes) -> UUID:
    return UUID(text.decode())


DECODERS: dict[int, Decode] = {
    BOOL: b"t".__eq__,
    INT2: int,
    INT4: int,
    INT8: int,
    FLOAT4: _decoded_float4,
    FLOAT8: float,
    NUMERIC: lambda text: Decimal(text.decode()),
    TEXT: bytes.decode,
    VARCHAR: bytes.decode,
    BPCHAR: bytes.decode,
    NAME: bytes.decode,
    JSON: bytes.decode,
    JSONB: bytes.decode,
    UUID_: _decoded_uuid,
    BYTEA: lambda text: bytes.fromhex(text[2:].decode()),
    DATE: lambda text: date.fromisoformat(text.decode()),
    TIME: lambda text: time.fromisoformat(text.decode()),
    TIMESTAMP: lambda text: datetime.fromisoformat(text.decode()),
    TIMESTAMPTZ: lambda text: datetime.fromisoformat(text.decode()),
}


def _integer(value: Any) -> bytes | None:
    return b"%d" % value if type(value) is int else None


def _text(value: Any) -> bytes | None:
    return value.encode() if type(value) is str else None


def _boolean(value: Any) -> bytes | None:
    return (b"t" if value else b"f") if type(value) is bool else None


def _float(value: Any) -> bytes | None:
    return repr(value).encode() if type(value) is float else None


def _numeric(value: Any) -> bytes | None:
    return str(value).encode() if type(value) in (Decimal, int) else None


def _uuid(value: Any) -> bytes | None:
    return str(value).encode() if type(value) is UUID else None


def _bytea(value: Any) -> bytes | None:
    return b"\\x" + value.hex().encode() if type(value) is bytes else None


def _date(value: Any) -> bytes | None:
    # The driver sends the first and the last day as infinity.
    return value.isoformat().encode() if type(value) is date and date.min < value < date.max else None


def _timestamp(value: Any) -> bytes | None:
    plain = type(value) is datetime and value.tzinfo is None and datetime.min < value < datetime.max
    return value.isoformat().encode() if plain else None


def _timestamptz(value: Any) -> bytes | None:
    # One without a zone is local time for the driver, and UTC for the server.
    plain = type(value) is datetime and value.tzinfo is not None and value.year not in (1, 9999)
    return value.isoformat().encode() if plain else None


ENCODERS: dict[int, Encode] = {
    BOOL: _boolean,
    INT2: _integer,
    INT4: _integer,
    INT8: _integer,
    FLOAT8: _float,
    NUMERIC: _numeric,
    TEXT: _text,
    VARCHAR: _text,
    BPCHAR: _text,
    NAME: _text,
    JSON: _text,
    JSONB: _text,
    UUID_: _uuid,
    BYTEA: _bytea,
    DATE: _date,
    TIMESTAMP: _timestamp,
    TIMESTAMPTZ: _timestamptz,
}


def encode_parameters(encoders: Sequence[Encode], values: Sequence[Any]) -> bytes | None:
    """The parameters as they stand in a Bind message, in text; None if one of them needs the driver."""
    if len(encoders) != len(values):
        return None
    parts = [_COUNT.pack(len(values))]
    for encode, value in zip(encoders, values, strict=True):
        if value is None:
            parts.append(_NULL)
            continue
        try:
            encoded = encode(value)
        except (UnicodeEncodeError, ValueError):  # a text that is none, an integer of too many digits
            return None
        if encoded is None:
            return None
        parts.append(_LENGTH.pack(len(encoded)))
        parts.append(encoded)
    return b"".join(parts)


def decode_rows(data: bytes, names: Sequence[str], decoders: Sequence[Decode]) -> list[Row]:
    """The rows in PostgreSQL's messages; ValueError or OverflowError for a value that Python has no type for."""
    rows: list[Row] = []
    position, end, length_at = 0, len(data), _LENGTH.unpack_from
    try:
        while position < end:
            position += _HEAD
            values: list[Any] = []
            for decode in decoders:
                (length,) = length_at(data, position)
                position += 4
                if length < 0:
                    values.append(None)
                else:
                    values.append(decode(data[position : position + length]))
                    position += length
            rows.append(dict(zip(names, values, strict=True)))
    except (ArithmeticError, struct.error) as error:
        raise ValueError(f"a row that can't be read: {error}") from error
    return rows
