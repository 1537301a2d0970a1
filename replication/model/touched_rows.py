"""Which rows a replicated change touches, as far as the change itself tells.

A row change names its key. A statement often does: `where id = $1`. Where it does not, every row of the tables that it
names may be touched. Keys are compared loosely: two spellings of one value are the same, and taking two different
values for the same only makes a check look again or a repair wait.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

import msgspec
from pglast import ast
from pglast.enums import OnConflictAction

from adapters.changes import Change, Insert, InvalidChange, Row, Statement, joined_table_name, split_table_name
from adapters.sql import NOT_CONSTANT, fixed_columns, inserted_columns, parse

RowKey = tuple[str, str]
"""A table, and a key as JSON text of loosely written values by column."""


_TRUE, _FALSE = {"t", "true", "y", "yes", "on"}, {"f", "false", "n", "no", "off"}


def table_name(table: str) -> str:
    """One name for a table, however it was written: without `public`, without quotes that need not be."""
    try:
        schema, name = split_table_name(table)
    except InvalidChange:
        return table
    return joined_table_name(schema or "public", name)


def loose(value: Any) -> str:
    """A key's value as text that is the same for all spellings of it."""
    match value:
        case bytes():
            return loose(value.hex())
        case datetime():
            return _moment(value)
    text = str(value).strip().lower().removeprefix("\\x")
    if text in _TRUE or text in _FALSE:
        return "1" if text in _TRUE else "0"
    for read in (_number, _moment_in, _uuid):
        with suppress(ValueError, InvalidOperation):
            return read(text)
    return text


def _number(text: str) -> str:
    return str(int(text, 0)) if text.lstrip("+-")[:2] in ("0x", "0o", "0b") else f"{Decimal(text).normalize():f}"


def _moment_in(text: str) -> str:
    return _moment(datetime.fromisoformat(text))


def _uuid(text: str) -> str:
    return str(UUID(text))


def _moment(value: datetime) -> str:
    return (value.astimezone(UTC) if value.tzinfo else value).replace(tzinfo=None).isoformat()


def row_key(table: str, key: Mapping[str, Any]) -> RowKey:
    written = {name: loose(value) for name, value in sorted(key.items())}
    return table_name(table), msgspec.json.encode(written).decode()


def columns_of(key: str) -> frozenset[str]:
    return frozenset(msgspec.json.decode(key))


def tables_named_in(sql: str, tables: Iterable[str]) -> list[str]:
    """Those of the tables, by their `table_name`, that a statement names; all of them if it can't be read."""
    try:
        named = {relation for parsed in parse(sql) for relation in parsed.relations}
    except InvalidChange:
        return list(tables)
    names = {joined_table_name(schema or "public", name) for schema, name in named}
    return [table for table in tables if table in names]


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
    try:
        (parsed,) = parse(sql)
    except (InvalidChange, ValueError):
        return None
    if len(parsed.relations) != 1:
        return None
    match parsed.node:
        case ast.InsertStmt(onConflictClause=conflict) as insert:
            if conflict is not None and conflict.action != OnConflictAction.ONCONFLICT_NOTHING:
                return None  # the row with the other key may be updated
            given = inserted_columns(insert, args) or {}
        case ast.UpdateStmt() as update:
            if not columns.isdisjoint([target.name for target in update.targetList or ()]):
                return None
            given, _ = fixed_columns(update.whereClause, args)
        case ast.DeleteStmt() as delete:
            given, _ = fixed_columns(delete.whereClause, args)
        case _:
            return None
    if not columns <= given.keys() or any(given[name] is NOT_CONSTANT for name in columns):
        return None
    return {name: given[name] for name in columns}
