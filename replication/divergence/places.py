"""Which rows a replicated change touches, as far as the change itself tells.

A row change names its key. A statement often does: `where id = $1`. Where it does not, every row of the tables that it
names may be touched. Keys are compared loosely: two spellings of one value are the same, and taking two different
values for the same only makes a check look again or a repair wait.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from tops.changes import Change, Insert, InvalidChange, Row, Statement, split_table_name

Place = tuple[str, str]
"""A table, and a key as JSON text of loosely written values by column."""

_WORD = re.compile(r'"((?:[^"]|"")+)"|([A-Za-z_]\w*)')
_TAIL = re.compile(r"\s+returning\s.*$|\s*;\s*$", re.IGNORECASE | re.DOTALL)
_BY_WHERE = re.compile(
    r"\s*(?:update\s+(?:only\s+)?[\w.\"]+\s+set\s(?P<set>.+?)|delete\s+from\s+(?:only\s+)?[\w.\"]+)"
    r"\s+where\s+(?P<where>.+)",
    re.IGNORECASE | re.DOTALL,
)
_INSERTED = re.compile(
    r"\s*insert\s+into\s+[\w.\"]+\s*\((?P<columns>[^()]+)\)\s*values\s*\((?P<values>[^()]+)\)(?!\s*,).*",
    re.IGNORECASE | re.DOTALL,
)
_EQUALS = re.compile(r'\(?\s*"?(?P<column>\w+)"?\s*=\s*(?P<value>\$\d+|-?\d+|\'(?:[^\']|\'\')*\')(?:::\w+)?\s*\)?')


def table_name(table: str) -> str:
    """One name for a table, however it was written: without `public`, without quotes that need not be."""
    try:
        schema, name = split_table_name(table)
    except InvalidChange:
        return table
    return name if schema in (None, "public") else f"{schema}.{name}"


def loose(value: Any) -> str:
    """A key's value as text that is the same for all spellings of it."""
    match value:
        case bool():
            return str(value).lower()
        case bytes():
            return value.hex()
        case datetime():
            return _moment(value)
    text = str(value)
    try:
        return format(Decimal(text).normalize(), "f")
    except InvalidOperation:
        pass
    try:
        return _moment(datetime.fromisoformat(text))
    except ValueError:
        return text.lower()


def _moment(value: datetime) -> str:
    return (value.astimezone(UTC) if value.tzinfo else value).replace(tzinfo=None).isoformat()


def place(table: str, key: Mapping[str, Any]) -> Place:
    written = {name: loose(value) for name, value in sorted(key.items())}
    return table_name(table), msgspec.json.encode(written).decode()


def columns_of(key: str) -> frozenset[str]:
    return frozenset(msgspec.json.decode(key))


def tables_named_in(sql: str, tables: Iterable[str]) -> list[str]:
    words = {quoted or plain.lower() for quoted, plain in _WORD.findall(sql)}
    return [table for table in tables if table.split(".")[-1].strip('"') in words]


def keys_of(change: Change, columns: frozenset[str]) -> Iterator[Row] | None:
    """The keys that a change touches in a table whose key has these columns; None if any row may be touched."""
    if isinstance(change, Statement):
        key = key_in(change.sql, change.args, columns)
        return None if key is None else iter([key])
    given = change.values if isinstance(change, Insert) else change.key
    if not columns <= given.keys():
        return None
    return iter([{name: given[name] for name in columns}])


def key_in(sql: str, args: Sequence[Any], columns: frozenset[str]) -> Row | None:
    """The one key that a statement is about; None if it is about any other number of rows."""
    statement = _TAIL.sub("", sql)
    inserted = _INSERTED.fullmatch(statement)
    if inserted is not None:
        names = [name.strip().strip('"') for name in inserted["columns"].split(",")]
        values = [value.strip() for value in inserted["values"].split(",")]
        pairs = dict(zip(names, values, strict=False)) if len(names) == len(values) else {}
        return _valued({name: pairs[name] for name in columns}, args) if columns <= pairs.keys() else None
    found = _BY_WHERE.fullmatch(statement)
    if found is None or re.search(r"\bor\b|\bselect\b", found["where"], re.IGNORECASE):
        return None
    if found["set"] is not None and (re.search(r"\b(from|select)\b", found["set"], re.IGNORECASE)):
        return None
    given: dict[str, str] = {}
    for part in re.split(r"\s+and\s+", found["where"].strip(), flags=re.IGNORECASE):
        equals = _EQUALS.fullmatch(part.strip())
        if equals is not None:
            given[equals["column"]] = equals["value"]
    return _valued({name: given[name] for name in columns}, args) if columns <= given.keys() else None


def _valued(written: Mapping[str, str], args: Sequence[Any]) -> Row | None:
    values: Row = {}
    for name, text in written.items():
        if re.fullmatch(r"\$\d+", text):
            number = int(text[1:])
            if not 0 < number <= len(args):
                return None
            values[name] = args[number - 1]
        elif re.fullmatch(r"-?\d+|'(?:[^']|'')*'", text):
            values[name] = text[1:-1].replace("''", "'") if text.startswith("'") else text
        else:
            return None
    return values
