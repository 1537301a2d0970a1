"""Parameters of writes from PostgreSQL's formats to Python, and returned rows back.

Reads never come here. Types that are not listed travel as text; one that a driver sends or wants in binary form is
rejected before anything is written."""

import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from adapters import text_values as types

_EPOCH, _EPOCH_DAY = datetime(2000, 1, 1), date(2000, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_TRUE = frozenset({b"t", b"true", b"y", b"yes", b"on", b"1"})
_FALSE = frozenset({b"f", b"false", b"n", b"no", b"off", b"0"})
_TEXTS = (types.TEXT, types.VARCHAR, types.BPCHAR, types.NAME, types.JSON, 0, 705)


class NotBinary(Exception):
    """A type that the gateway does not know in binary form."""


def _number(form: str) -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
    packed = struct.Struct(form)
    return lambda data: packed.unpack(data)[0], packed.pack


def _numeric_from(data: bytes) -> Decimal:
    count, weight, sign, scale = struct.unpack_from(">hhHh", data)
    if sign not in (0, 0x4000):
        return Decimal({0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}[sign])
    whole = 0
    for digit in struct.unpack_from(f">{count}h", data, 8):
        whole = whole * 10_000 + digit
    value = Decimal(whole).scaleb(4 * (weight - count + 1))
    value = value.quantize(Decimal(1).scaleb(-scale)) if count else Decimal(0).scaleb(-scale)
    return -value if sign else value


def _numeric_to(value: Any) -> bytes:
    number = Decimal(value)
    if not number.is_finite():
        sign = 0xC000 if number.is_nan() else 0xF000 if number < 0 else 0xD000
        return struct.pack(">hhHh", 0, 0, sign, 0)
    text = f"{abs(number):f}"
    whole, _, fraction = text.partition(".")
    padded = whole.zfill(-(-len(whole) // 4) * 4) + fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    digits = [int(padded[i : i + 4]) for i in range(0, len(padded), 4)]
    weight = -(-len(whole) // 4) - 1
    sign = 0x4000 if number < 0 else 0
    return struct.pack(f">hhHh{len(digits)}h", len(digits), weight, sign, len(fraction), *digits)


def _naive(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None)


_BINARY: dict[int, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    types.INT2: _number(">h"), types.INT4: _number(">i"), types.INT8: _number(">q"), 26: _number(">I"),
    types.FLOAT4: _number(">f"), types.FLOAT8: _number(">d"), types.BOOL: _number(">?"),
    types.NUMERIC: (_numeric_from, _numeric_to),
    types.BYTEA: (bytes, bytes),
    types.UUID_: (lambda data: UUID(bytes=data), lambda value: UUID(str(value)).bytes),
    types.JSONB: (lambda data: data[1:].decode(), lambda value: b"\1" + str(value).encode()),
    types.DATE: (
        lambda data: _EPOCH_DAY + timedelta(days=struct.unpack(">i", data)[0]),
        lambda value: struct.pack(">i", (value - _EPOCH_DAY).days),
    ),
    types.TIMESTAMP: (
        lambda data: _EPOCH + struct.unpack(">q", data)[0] * _MICROSECOND,
        lambda value: struct.pack(">q", (value - _EPOCH) // _MICROSECOND),
    ),
    types.TIMESTAMPTZ: (
        lambda data: (_EPOCH + struct.unpack(">q", data)[0] * _MICROSECOND).replace(tzinfo=UTC),
        lambda value: struct.pack(">q", (_naive(value) - _EPOCH) // _MICROSECOND),
    ),
    **{oid: (bytes.decode, lambda value: str(value).encode()) for oid in _TEXTS},
}  # fmt: skip


def knows_binary(oid: int) -> bool:
    return oid in _BINARY


def parameter(data: bytes | None, oid: int, *, is_binary: bool) -> Any:
    """Raises NotBinary, and ValueError for what is no value of the type."""
    if data is None:
        return None
    if is_binary:
        if oid not in _BINARY:
            raise NotBinary(f"a parameter of the type with oid {oid} in binary form")
        try:
            return _BINARY[oid][0](data)
        except (struct.error, OverflowError, KeyError) as error:
            raise ValueError(f"incorrect binary data format: {error}") from None
    if oid == types.BOOL:
        if data.strip().lower() in _TRUE | _FALSE:
            return data.strip().lower() in _TRUE
        raise ValueError(f"invalid input syntax for type boolean: {data[:100].decode(errors='replace')!r}")
    if oid in (types.INT2, types.INT4, types.INT8):
        return int(data)
    decode = types.DECODERS.get(oid)
    if decode is not None and oid not in (types.FLOAT4, types.FLOAT8):
        try:
            return decode(data)
        except (ValueError, ArithmeticError):
            pass  # the database may understand the text: 'today', 'infinity'
    return data.decode()


def returned(value: Any, oid: int, *, is_binary: bool) -> bytes | None:
    if value is None:
        return None
    return _BINARY[oid][1](value) if is_binary else _text(value)


def _text(value: Any) -> bytes:
    match value:
        case bool():
            return b"t" if value else b"f"
        case bytes():
            return b"\\x" + value.hex().encode()
        case datetime():
            text = value.isoformat(" ")
            return (text.removesuffix(":00") if value.tzinfo is not None else text).encode()
        case date() | time():
            return value.isoformat().encode()
        case timedelta():
            return f"{value.days} days {value.seconds + value.microseconds / 1e6:f} seconds".encode()
        case list():
            return b"{" + b",".join(map(_element, value)) + b"}"
    return str(value).encode()


def _element(value: Any) -> bytes:
    if value is None:
        return b"NULL"
    text = _text(value)
    if isinstance(value, list):
        return text
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
