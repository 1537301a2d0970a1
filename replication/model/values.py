"""Rows on their way between an agent and a client: every value arrives as the Python type that the database gave.

The wire's own format knows no decimals, UUIDs, dates and times of day; they travel as marked text.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from adapters.changes import Row
from tops.model.errors import ResultTooLarge
from tops.model.map_keys import check_map_keys

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_INT_MAX = 2**63 - 1
RESPONSE_BYTES_MAX = 4 * 2**20  # of rows: a response is one message
_DIGITS_MAX = 131_072  # before the point of a numeric
_SLICE_ROWS = 500  # packed in one event-loop iteration
_DECIMAL, _UUID, _DATETIME, _DATE, _TIME, _TIMEDELTA, _INT = range(1, 8)
_READERS: dict[int, Callable[[str], Any]] = {
    _DECIMAL: Decimal,
    _UUID: UUID,
    _DATETIME: datetime.fromisoformat,
    _DATE: date.fromisoformat,
    _TIME: time.fromisoformat,
    _TIMEDELTA: lambda text: timedelta(microseconds=int(text)),
    _INT: int,
}


def _unpacked(code: int, data: memoryview) -> Any:
    return _READERS[code](bytes(data).decode())


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[dict[str, Any]], ext_hook=_unpacked)
_args_decoder = msgspec.msgpack.Decoder(list[Any], ext_hook=_unpacked)


def pack_rows(rows: Sequence[Row]) -> bytes:
    return _encoder.encode([{name: _packed(value) for name, value in row.items()} for row in rows])


async def pack_result(where: str, rows: Sequence[Row]) -> bytes:
    """As `pack_rows`, up to the size of a response; others have their turn meanwhile. Raises ResultTooLarge."""
    if len(rows) <= _SLICE_ROWS:
        packed = pack_rows(rows)
    else:
        parts, size = [struct.pack(">BI", 0xDD, len(rows))], 0  # the head of an array of so many elements
        for start in range(0, len(rows), _SLICE_ROWS):
            part = rows[start : start + _SLICE_ROWS]
            parts.append(pack_rows(part)[1 if len(part) < 16 else 3 :])  # without the head of an array of its own
            size += len(parts[-1])
            if size > RESPONSE_BYTES_MAX:
                break
            await asyncio.sleep(0)
        packed = b"".join(parts)
    if len(packed) > RESPONSE_BYTES_MAX:
        raise ResultTooLarge(where, RESPONSE_BYTES_MAX)
    return packed


def unpack_rows(data: bytes) -> list[Row]:
    return _decoder.decode(data)


def pack_values(values: Sequence[Any]) -> bytes:
    return _encoder.encode([_packed(value) for value in values])


def unpack_values(data: bytes) -> list[Any]:
    check_map_keys(data)
    return _args_decoder.decode(data)


def _packed(value: Any) -> Any:
    kind = type(value)
    if kind is int and not -_INT_MAX <= value <= _INT_MAX:
        return _marked(_INT, str(value))
    if kind in _PLAIN:
        return value
    match value:
        case list() | tuple():
            return [_packed(element) for element in value]
        case dict():
            return {str(key): _packed(element) for key, element in value.items()}
        case Decimal():
            return _marked(_DECIMAL, _digits(value))
        case UUID():
            return _marked(_UUID, str(value))
        case datetime():
            return _marked(_DATETIME, value.isoformat())
        case date():
            return _marked(_DATE, value.isoformat())
        case time():
            return _marked(_TIME, value.isoformat())
        case timedelta():
            return _marked(_TIMEDELTA, str(value // timedelta(microseconds=1)))
    return str(value)


def _digits(value: Decimal) -> str:
    """As PostgreSQL prints it: the driver makes 1E+4 of 10000."""
    exponent = value.as_tuple().exponent
    return f"{value:f}" if isinstance(exponent, int) and 0 < exponent <= _DIGITS_MAX else str(value)


def _marked(code: int, text: str) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, text.encode())
