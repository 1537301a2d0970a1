"""One text form per value, the same whatever database the value came from.

PostgreSQL writes the form itself (`postgres_text`), so that only text crosses the wire; SQLite's values are dynamic and
are written here in Python (`sqlite_text`). Both follow PostgreSQL's own output with fixed settings (UTC, ISO dates,
shortest floats), without trailing zeros in numerics. Long values are replaced by their length and SHA-256, so that a
value of any size is compared whole and none is carried whole.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from replication.tables.schema import Column, ValueKind, quoted

DIGEST_OVER_BYTES = 1024
SHOWN_CHARACTERS = 48
_DIGEST_SIGN = (
    " bytes, sha256 "  # a short text that has it as a digest has is digested too: it can't pass for another's
)

SESSION_SETTINGS = {
    "timezone": "UTC",
    "datestyle": "ISO, YMD",
    "intervalstyle": "iso_8601",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "client_encoding": "UTF8",
    # How PostgreSQL writes definitions down: names with their schemas, and quotes where they are needed.
    "search_path": "public",
    "quote_all_identifiers": "off",
    # Keys are written into statements as constants.
    "standard_conforming_strings": "on",
    # A check takes its time; limits that protect a server from applications would only leave it half done.
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    # An index range is the point of reading by bucket; JIT costs more than it saves on these statements.
    "jit": "off",
    # A policy that hides rows from this role is an error rather than a table that looks emptier than it is.
    "row_security": "off",
}
"""What every session that writes or hashes canonical text must set; text forms depend on all of them."""


class NotOfType(str):
    """Canonical text of a value that is not of its column's type, as SQLite allows."""

    __slots__ = ()


NOT_OF_TYPE = "\x00not of type: "
"""Prefix of such values on their way through Arrow and Spark; no PostgreSQL text can hold the zero byte."""


def marked(text: str | None) -> str | None:
    """With the prefix where it belongs; text of SQLite that begins like it gets it as well, to be told from it."""
    if text is not None and (isinstance(text, NotOfType) or text.startswith("\x00")):
        return NOT_OF_TYPE + text
    return text


def is_marked(text: str | None) -> bool:
    return text is not None and text.startswith("\x00")


def postgres_text(column: Column, *, digest: bool = True) -> str:
    """An SQL expression for the canonical text of a column; the session must have `SESSION_SETTINGS`."""
    name = quoted(column.name)
    match column.kind:
        case ValueKind.NUMERIC:
            return f"trim_scale({name}::numeric)::text"
        case ValueKind.FLOAT4:
            return f"({name}::float4 + 0::float4)::text"  # adding zero turns -0 into 0
        case ValueKind.FLOAT8:
            return f"({name} + 0::float8)::text"
        case ValueKind.BYTES:
            return _digested_bytes(name) if digest else f"encode({name}, 'hex')"
        case ValueKind.TEXT | ValueKind.OTHER:
            return _digested_text(f"{name}::text") if digest else f"{name}::text"
        case ValueKind.CHAR:
            return f"rtrim({name}::text, ' ')"
        case ValueKind.BOOLEAN:
            # The other replica's column may be a number there: 1 is true, and 2 is no truth value.
            return f"CASE {name}::text WHEN '1' THEN 'true' WHEN '0' THEN 'false' ELSE {name}::text END"
        case _:
            return f"{name}::text"


def _digested_text(expression: str) -> str:
    sha = f"encode(sha256(convert_to({expression}, 'UTF8')), 'hex')"
    also = f" OR {expression} LIKE '%{_DIGEST_SIGN}%]'"
    return _digested(expression, f"octet_length({expression})", f"left({expression}, {SHOWN_CHARACTERS})", sha, also)


def _digested_bytes(name: str) -> str:
    shown = f"left(encode(substring({name} from 1 for {SHOWN_CHARACTERS}), 'hex'), {SHOWN_CHARACTERS})"
    return _digested(f"encode({name}, 'hex')", f"octet_length({name})", shown, f"encode(sha256({name}), 'hex')")


def _digested(whole: str, length: str, shown: str, sha: str, also: str = "") -> str:
    short = f"{shown} || '… [' || {length} || '{_DIGEST_SIGN}' || {sha} || ']'"
    return f"CASE WHEN {length} > {DIGEST_OVER_BYTES}{also} THEN {short} ELSE {whole} END"


def digested(text: str, raw: bytes) -> str:
    """What the SQL above makes of a long value, made here."""
    if len(raw) <= DIGEST_OVER_BYTES and not (text.endswith("]") and _DIGEST_SIGN in text):
        return text
    return f"{text[:SHOWN_CHARACTERS]}… [{len(raw)}{_DIGEST_SIGN}{hashlib.sha256(raw).hexdigest()}]"


def json_text(text: str | None) -> str | None:
    """JSON with sorted keys and numbers without needless digits; equal documents have equal text.

    A text that is no document, or one that is too deep to be read, stays as the database spells it.
    """
    if text is None:
        return None
    try:
        return _json(text)
    except (ValueError, RecursionError):
        return digested(text, text.encode())


def _json_document(value: Any) -> str:
    match value:
        case Decimal():
            return numeric_text(value)
        case dict():
            members = (f"{_json_document(key)}:{_json_document(value[key])}" for key in sorted(value))
            return "{" + ",".join(members) + "}"
        case list():
            return "[" + ",".join(map(_json_document, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def numeric_text(value: Decimal) -> str:
    if value.is_nan():
        return "NaN"
    if value.is_infinite():
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0:
        return "0"
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def float_text(value: float, *, single: bool = False) -> str:
    """As PostgreSQL prints floats: shortest digits that read back the same, exponents from 1e15 (1e6) on."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0:
        return "0"
    digits, exponent = _shortest(value, single)
    sign = "-" if value < 0 else ""
    if -4 <= exponent < (6 if single else 15):
        return sign + numeric_text(Decimal(int(digits)).scaleb(exponent - len(digits) + 1))
    mantissa = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
    return f"{sign}{mantissa}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"


def _shortest(value: float, single: bool) -> tuple[str, int]:
    """The digits of a number and the power of ten of the first."""
    text = _shortest_single(abs(value)) if single else repr(abs(value))
    _, digits, exponent = Decimal(text).normalize().as_tuple()
    return "".join(map(str, digits)), int(exponent) + len(digits) - 1


def _shortest_single(value: float) -> str:
    exact = struct.pack("f", value)
    candidates = (f"{struct.unpack('f', exact)[0]:.{digits}e}" for digits in range(9))
    return next(text for text in candidates if struct.pack("f", float(text)) == exact)


def sqlite_text(kind: ValueKind, value: object, *, digest: bool = True) -> str | None:
    """Canonical text of what SQLite returned; `NotOfType` where it is not a value of the kind."""
    if value is None:
        return None
    try:
        if not digest and kind in _WHOLE:
            return _WHOLE[kind](value)
        return _SQLITE[kind](value)
    except (ValueError, TypeError, OverflowError, InvalidOperation, UnicodeDecodeError, RecursionError):
        return NotOfType(_anything(value))


def _integer(value: object) -> str:
    if isinstance(value, int) or (isinstance(value, str) and value.isascii() and value.strip().lstrip("+-").isdigit()):
        return str(int(value))
    raise TypeError(value)


def _numeric(value: object) -> str:
    return numeric_text(Decimal(repr(value) if isinstance(value, float) else _number(value)))


def _number(value: object) -> int | float | str:
    """Python reads 1_000 as a thousand, and digits of any script; to a database they are text."""
    if not isinstance(value, int | float | str) or (isinstance(value, str) and ("_" in value or not value.isascii())):
        raise TypeError(value)
    return value


def _boolean(value: object) -> str:
    truth = {1: "true", 0: "false", "1": "true", "0": "false", "t": "true", "f": "false"}
    lowered = value.lower() if isinstance(value, str) else value
    if lowered in ("true", "false"):
        return str(lowered)
    if lowered in truth:
        return truth[lowered]
    raise ValueError(value)


def _float(value: object, *, single: bool) -> str:
    return float_text(float(_number(value)), single=single)


def _text(value: object) -> str:
    return digested(_whole_text(value), str(value).encode())


def _whole_text(value: object) -> str:
    if isinstance(value, bytes):
        raise TypeError(value)
    return str(value)


def _bytes(value: object) -> str:
    raw = _raw(value)
    return digested(raw[:DIGEST_OVER_BYTES].hex(), raw)


def _raw(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(value)
    return value


def _timestamp(value: object, *, zoned: bool) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    if value in ("infinity", "-infinity"):
        return value
    moment = datetime.fromisoformat(_in_microseconds(value))
    if zoned:
        moment = moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    elif moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return f"{moment:%Y-%m-%d} {_time_text(moment.time())}" + ("+00" if zoned else "")


def _in_microseconds(text: str) -> str:
    """Python drops further digits of a second without a word: two texts that differ there would be one value."""
    if _FINER_THAN_MICROSECONDS.search(text):
        raise ValueError(text)
    return text


_FINER_THAN_MICROSECONDS = re.compile(r"[.,]\d{6}\d*[1-9]")
_MIDNIGHT = re.compile(r"[T ]00:00(:00(\.0+)?)?")


def _time(value: object) -> str:
    parsed = time.fromisoformat(_in_microseconds(str(value)))
    if parsed.tzinfo is not None:
        raise ValueError(value)
    return _time_text(parsed)


def _time_text(value: time) -> str:
    text = f"{value:%H:%M:%S}"
    return f"{text}.{value.microsecond:06d}".rstrip("0") if value.microsecond else text


def _date(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    if value in ("infinity", "-infinity"):
        return value
    if value[10:] and not _MIDNIGHT.fullmatch(value[10:]):
        raise ValueError(value)
    return date.fromisoformat(value[:10]).isoformat()


def _json(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    plain = _json_document(json.loads(value, parse_float=Decimal, parse_int=Decimal))
    return digested(plain, plain.encode())


def _anything(value: object) -> str:
    return _bytes(value) if isinstance(value, bytes) else digested(str(value), str(value).encode())


_SQLITE: dict[ValueKind, Callable[[object], str]] = {
    ValueKind.BOOLEAN: _boolean,
    ValueKind.INTEGER: _integer,
    ValueKind.NUMERIC: _numeric,
    ValueKind.FLOAT4: lambda value: _float(value, single=True),
    ValueKind.FLOAT8: lambda value: _float(value, single=False),
    ValueKind.TEXT: _text,
    ValueKind.CHAR: lambda value: _text(value).rstrip(" "),
    ValueKind.BYTES: _bytes,
    ValueKind.DATE: _date,
    ValueKind.TIME: _time,
    ValueKind.TIMESTAMP: lambda value: _timestamp(value, zoned=False),
    ValueKind.TIMESTAMPTZ: lambda value: _timestamp(value, zoned=True),
    ValueKind.UUID: lambda value: str(UUID(bytes=value) if isinstance(value, bytes) else UUID(str(value))),
    ValueKind.JSON: _json,
    ValueKind.OTHER: _text,
}
# Keys are looked up by their text: a digest finds no row.
_WHOLE: dict[ValueKind, Callable[[object], str]] = {
    ValueKind.TEXT: _whole_text,
    ValueKind.CHAR: lambda value: _whole_text(value).rstrip(" "),
    ValueKind.OTHER: _whole_text,
    ValueKind.BYTES: lambda value: _raw(value).hex(),
}
