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

from adapters.changes import InvalidChange, NotDeterministic, Value
from adapters.postgres.sql.fixed_times import is_fixed_time, names_a_clock

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
    base: str = ""  # the catalogue's name of the type, or of the one beneath a domain
    is_domain: bool = False
    is_loose: bool = False  # its collation takes different texts for equal
    declared: str = ""  # the name with the length or precision that a column has declared, if any

    def canonical(self, expression: str) -> str:
        """The same text for all values that the database takes for equal."""
        return self.one_form.format(expression)

    @property
    def holds_rows(self) -> bool:
        """Whether values are rows, or arrays of rows, with fields of their own types."""
        return self.category == "C" or (self.element is not None and self.element.category == "C")

    @property
    def has_one_text(self) -> bool:
        """Whether values that the database takes for equal have one text, once they are `canonical`. Others are told
        apart by the database alone: {1.0} is {1.00}."""
        if self.is_loose:
            return False
        if self.category == "A":
            return self.element is not None and self.element.one_form == "{}" and self.element.has_one_text
        if self.is_integer or self.is_uuid or self.is_bytes or self.category in ("B", "E", "D"):
            return True
        return self.one_form != "{}" or self.base in _ONE_TEXT

    @property
    def has_stored_form(self) -> bool:
        """Whether a value may be stored in its one form: nothing that a user has written is lost. Of citext, the case
        would be; what a domain does with a text that is too long depends on how it gets there."""
        cuts = self.is_domain and self.base in ("varchar", "bpchar")
        return self.has_one_text and self.base != "citext" and not cuts

    def plain(self, value: Value) -> Value:
        """The value in its one form, as `readable` gives it, where that can be told without the database; else None."""
        kind = type(value)
        try:
            if self.is_integer:
                number = value if kind is int else int(value) if kind is str else None
                limit = _LIMITS[self.base]
                return number if number is not None and -limit <= number < limit else None
            if self.is_uuid:
                return str(UUID(str(value))) if kind in (str, UUID) else None
            if kind is str and not self.is_domain and not self.is_loose and is_text(value):
                # Blanks at the end may be cut off a varchar that is stored.
                if self.base == "text" or (self.base == "varchar" and not value.endswith(" ")):
                    return value
                if self.base == "date" and date.fromisoformat(value).isoformat() == value:
                    return value
        except ValueError:
            return None
        return value if (kind is bool and self.base == "bool") or (kind is bytes and self.is_bytes) else None

    def in_one_form(self, text: str, *, stored: bool) -> str:
        """SQL for the one form of the value that an expression of type text holds, as `readable`. With `stored`, of
        what a column makes of it: digits beyond its precision are rounded, and blanks beyond its length cut off."""
        value = f"{text}::{self.name}"
        if stored and self.declared != self.name and self.category not in ("V", "A"):
            kept = f"{text}::{self.declared}"
            # Anything else that is too long is for the column to reject.
            fits = f"rtrim({kept}::text) = rtrim({value}::text)"
            value = f"case when {fits} then {kept} else {value} end" if self.category == "S" else kept
        return self.readable(self.canonical(f"({value})"))

    def readable(self, expression: str) -> str:
        """The value as Python takes it and `text_form` gives it back: an integer, a boolean, bytes, or its text."""
        as_it_is = self.is_integer or self.is_bytes or self.category == "B"
        return expression if as_it_is else f"{expression}::text"

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


_LIMITS = {"int2": 2**15, "int4": 2**31, "int8": 2**63}
# Types of which equal values have equal texts.
_ONE_TEXT = frozenset(
    {"text", "varchar", "name", "inet", "cidr", "macaddr", "macaddr8", "bit", "varbit", "oid", "pg_lsn"}
)
_HOW_TO = "write digits, with a numeric offset from UTC"
TEXT = SqlType("text", "S", base="text")
BIGINT = SqlType("bigint", "N", is_integer=True, base="int8")
BYTEA = SqlType("bytea", "U", is_bytes=True)


def is_text(value: str) -> bool:
    """Whether PostgreSQL can store it: whole characters, none of them NUL."""
    try:
        return "\0" not in value and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


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


def text_form(value: Value, sql_type: SqlType, *, read_once: bool = False, captured: bool = False) -> str | None:
    """The text that the type's input function turns into exactly this value; None for NULL.

    With `read_once`, one server alone reads the text: it may name a time by the clock or by a time zone. A `captured`
    one is what an origin's server has written: words in a row are those of the fields beside its times."""
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
        is_fixed = captured and sql_type.holds_rows and not names_a_clock(value)
        if sql_type.holds_time and not read_once and not is_fixed and not is_fixed_time(value):
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


def array_literal(values: list[Value], sql_type: SqlType, *, captured: bool = False) -> str:
    """One literal that holds a column's values of all rows of a batch; `captured` as for `text_form`."""
    # The two common cases, without a call per value.
    kinds = set(map(type, values))
    if sql_type.category == "N" and kinds == {int}:
        return f"'{{{','.join(map(str, values))}}}'"
    if sql_type.category == "S" and kinds == {str}:
        joined = "\0".join(values)
        if joined.count("\0") == len(values) - 1:
            elements = _element(joined).replace("\0", '","')
            return quote(f"{{{elements}}}")
    texts = [text_form(value, sql_type, captured=captured) for value in values]
    return quote("{" + ",".join(map(_element, texts)) + "}")


def literal(value: Value, sql_type: SqlType, *, read_once: bool = False) -> str:
    """One value as a parameter of EXECUTE."""
    text = text_form(value, sql_type, read_once=read_once)
    return "NULL" if text is None else quote(text)
