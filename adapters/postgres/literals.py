"""Values as SQL text: how one message to the server carries a whole batch and its parameters.

Every type's own input function reads the text, so that what was written is exactly what is stored, for any type the
database has. Nothing here reaches the server unquoted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from tops.changes import CLOCK_STRINGS, InvalidChange, Value


@dataclass(frozen=True, slots=True)
class SqlType:
    """A column's or parameter's type, as far as writing a value down depends on it."""

    name: str  # as SQL spells it, qualified and quoted where needed
    category: str  # PostgreSQL's: A array, B boolean, C row, D date and time, N number, S string, …
    has_array: bool = True
    is_json: bool = False
    is_float: bool = False
    is_bytes: bool = False
    is_integer: bool = False
    is_uuid: bool = False
    element: "SqlType | None" = None

    @property
    def _goes_as_text(self) -> bool:
        """Arrays of arrays must be rectangular, and unnest takes rows apart."""
        return not self.has_array or self.category in ("A", "C")

    @property
    def carrier(self) -> str:
        """The type of an array that carries many values."""
        return "text[]" if self._goes_as_text else f"{self.name}[]"

    @property
    def cast(self) -> str:
        return f"::{self.name}" if self._goes_as_text else ""


def quote(text: str) -> str:
    """A string literal; standard_conforming_strings is on in our sessions."""
    if "\0" in text:
        raise InvalidChange("PostgreSQL's text can't hold the character NUL: use bytes and a bytea column")
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    if not name or "\0" in name:
        raise InvalidChange(f"{name!r} can't be the name of a table or column")
    return '"' + name.replace('"', '""') + '"'


def text_form(value: Value, sql_type: SqlType) -> str | None:
    """The text that the type's input function turns into exactly this value; None for NULL."""
    if value is None:
        return None
    if type(value) is int and not sql_type.is_json:
        return str(value)
    if sql_type.is_json:
        # Text is a document already written; anything else becomes one.
        return value if isinstance(value, str) else _json(value)
    if isinstance(value, str):
        if sql_type.category == "T" and value.startswith("-P"):
            # A negative timedelta that came over the wire; PostgreSQL does not read its sign there.
            return _scalar(msgspec.convert(value, timedelta), sql_type)
        if sql_type.category == "D" and value.strip().lower() in CLOCK_STRINGS:
            raise InvalidChange(f"{value!r} means another time on every replica: write the time itself")
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes | bytearray | memoryview):
        if not sql_type.is_bytes:
            raise InvalidChange(f"bytes do not fit a value of type {sql_type.name}")
        return "\\x" + bytes(value).hex()
    if isinstance(value, list | tuple):
        if sql_type.category != "A" or sql_type.element is None:
            raise InvalidChange(f"a list does not fit a value of type {sql_type.name}")
        return _array(value, sql_type.element)
    return _scalar(value, sql_type)


def _scalar(value: Value, sql_type: SqlType) -> str:
    match value:
        case float():
            return repr(value)
        case Decimal() | UUID() | int():
            return str(value)
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
        case _:
            raise InvalidChange(f"a {type(value).__name__} can't be stored as {sql_type.name}")


def _json(value: Value) -> str:
    def plain(other: Any) -> Any:
        if isinstance(other, Decimal):
            return float(other)
        if isinstance(other, UUID | datetime | date | time):
            return str(other)
        raise InvalidChange(f"a {type(other).__name__} can't be part of a JSON document")

    return json.dumps(value, default=plain, ensure_ascii=False)


def _array(values: Sequence[Value], element: SqlType) -> str:
    parts = (
        _array(value, element)
        if isinstance(value, list | tuple) and not element.is_json  # in a document, a list is a value
        else _element(text_form(value, element))
        for value in values
    )
    return "{" + ",".join(parts) + "}"


def _element(text: str | None) -> str:
    if text is None:
        return "NULL"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def array_literal(values: list[Value], sql_type: SqlType) -> str:
    """One literal that holds a column's values of all rows of a batch."""
    if sql_type.is_integer and set(map(type, values)) == {int}:
        return f"'{{{','.join(map(str, values))}}}'"  # the common case, without a call per value
    return quote("{" + ",".join([_element(text_form(value, sql_type)) for value in values]) + "}")


def literal(value: Value, sql_type: SqlType) -> str:
    """One value as a parameter of EXECUTE."""
    text = text_form(value, sql_type)
    return "NULL" if text is None else quote(text)
