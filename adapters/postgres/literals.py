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

from adapters.postgres.proof.texts import is_fixed_time
from tops.changes import InvalidChange, NotDeterministic, Value

# What the text of a value depends on, as every session of ours has it: texts that replicas compare are written so.
TEXT_SETTINGS = {
    "timezone": "UTC",
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
}


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
    delimiter: str = ","  # between the elements of an array
    holds_time: bool = False  # values are or contain dates or times
    one_form: str = "{}"  # SQL that turns all spellings of a value into one

    def canonical(self, expression: str) -> str:
        """The same text for all values that the database takes for equal."""
        return self.one_form.format(expression)

    @property
    def has_one_text(self) -> bool:
        """Whether values that the database takes for equal have one text, once they are `canonical`. Others are told
        apart by the database alone: '1 day' is '24:00:00', and {1.0} is {1.00}."""
        if (
            self.is_integer
            or self.is_uuid
            or self.is_bytes
            or self.one_form != "{}"
            or self.category in ("B", "E", "D")
        ):
            return True
        if self.category == "A":
            return self.element is not None and self.element.one_form == "{}" and self.element.has_one_text
        return self.name in ("text", "character varying", "name", "inet", "cidr")

    def readable(self, expression: str) -> str:
        """The value as Python takes it and `text_form` gives it back: an integer, a boolean, bytes, or its text."""
        plain = self.is_integer or self.is_bytes or self.category == "B"
        return expression if plain else f"{expression}::text"

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


_HOW_TO = "write digits, with a numeric offset from UTC"
TEXT = SqlType("text", "S")
BIGINT = SqlType("bigint", "N", is_integer=True)
BYTEA = SqlType("bytea", "U", is_bytes=True)


def quote(text: str) -> str:
    """A string literal; standard_conforming_strings is on in our sessions."""
    if "\0" in text:
        raise InvalidChange("PostgreSQL's text can't hold the character NUL: use bytes and a bytea column")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidChange(f"the text holds half a character (a lone surrogate): {error}") from error
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    if not name or "\0" in name:
        raise InvalidChange(f"{name!r} can't be the name of a table or column")
    return '"' + name.replace('"', '""') + '"'


def text_form(value: Value, sql_type: SqlType, *, read_once: bool = False) -> str | None:
    """The text that the type's input function turns into exactly this value; None for NULL.

    With `read_once`, one server alone reads the text: it may name a time by the clock or by a time zone."""
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
        if sql_type.holds_time and not read_once and not is_fixed_time(value):
            raise NotDeterministic("literal", f"{value[:100]!r} may mean another time on every replica: {_HOW_TO}")
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
        return _array(value, sql_type.element, sql_type.delimiter, read_once=read_once)
    return _scalar(value, sql_type)


def _scalar(value: Value, sql_type: SqlType) -> str:
    match value:
        case float():
            return repr(value)
        case Decimal() | UUID() | int():
            return str(value)
        case timedelta() if sql_type.category == "T":
            return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
        case datetime() | date() | time() | timedelta():
            return str(msgspec.to_builtins(value))  # as it would come over the wire, should the column be text
        case _:
            raise InvalidChange(f"a {type(value).__name__} can't be stored as {sql_type.name}")


def _json(value: Value) -> str:
    """A document is the same whether its values came over the wire, where some become text, or straight from here."""
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview))
        return json.dumps(plain, default=_not_json, ensure_ascii=False)
    except TypeError as error:
        raise InvalidChange(f"not a JSON document: {error}") from error


def _not_json(other: Any) -> Any:
    raise InvalidChange(f"a {type(other).__name__} can't be part of a JSON document")


def _array(values: Sequence[Value], element: SqlType, delimiter: str, *, read_once: bool) -> str:
    parts = (
        _array(value, element, delimiter, read_once=read_once)
        if isinstance(value, list | tuple) and not element.is_json  # in a document, a list is a value
        else _element(text_form(value, element, read_once=read_once))
        for value in values
    )
    return "{" + delimiter.join(parts) + "}"


def _element(text: str | None) -> str:
    if text is None:
        return "NULL"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def array_literal(values: list[Value], sql_type: SqlType) -> str:
    """One literal that holds a column's values of all rows of a batch."""
    # The two common cases, without a call per value.
    kinds = set(map(type, values))
    if sql_type.category == "N" and kinds == {int}:
        return f"'{{{','.join(map(str, values))}}}'"
    if sql_type.category == "S" and kinds == {str}:
        joined = "\0".join(values)
        if joined.count("\0") == len(values) - 1:
            elements = _element(joined).replace("\0", '","')
            return quote(f"{{{elements}}}")
    return quote("{" + ",".join([_element(text_form(value, sql_type)) for value in values]) + "}")


def literal(value: Value, sql_type: SqlType, *, read_once: bool = False) -> str:
    """One value as a parameter of EXECUTE."""
    text = text_form(value, sql_type, read_once=read_once)
    return "NULL" if text is None else quote(text)
