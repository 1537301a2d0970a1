"""What an INSERT … VALUES is made of: its table, its columns, the text of every value, what it returns.

The parts are cut out of the statement's own text, so that a value which is written into another statement means what it
meant in this one. Whatever has another form has no parts here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pglast import ast, enums
from pglast.parser import scan

from adapters.sql import parse

Piece = str | int  # a part of a text, or the number of a parameter
Expression = tuple[Piece, ...]

_OPENING, _CLOSING = ("ASCII_40", "ASCII_91"), ("ASCII_41", "ASCII_93")  # ( [ and ) ]
_COMMA, _ROW = "ASCII_44", "ASCII_40"
_OVERRIDING = (enums.OverridingKind.OVERRIDING_NOT_SET, enums.OverridingKind.OVERRIDING_SYSTEM_VALUE)
_PLAIN_SELECT = frozenset({"valuesLists", "op", "all", "limitOption", "groupDistinct"})


@dataclass(frozen=True, slots=True)
class InsertText:
    schema: str | None
    table: str
    columns: tuple[str, ...] | None  # None: all, in their order
    rows: tuple[tuple[Expression | None, ...], ...]  # None: DEFAULT
    returned: tuple[tuple[str, str | None], ...]  # label and column; a column None: all columns


def insert_text(sql: str) -> InsertText | None:
    """None: it is no INSERT of listed values that returns nothing but columns."""
    statement = parse(sql)[0].node
    if not isinstance(statement, ast.InsertStmt) or statement.onConflictClause or statement.withClause:
        return None
    columns, returned = _columns(statement.cols), _returned(statement)
    relation = statement.relation
    if columns == () or returned is None or statement.override not in _OVERRIDING or relation is None:
        return None
    if relation.catalogname or relation.alias or relation.relname is None:
        return None
    rows: tuple[tuple[Expression | None, ...], ...] | None = ((),)
    if statement.selectStmt is not None:
        rows = _rows(sql, statement.selectStmt)
    return None if rows is None else InsertText(relation.schemaname, relation.relname, columns, rows, returned)


def _columns(named: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Nothing in the tuple: one of them is an element or a field of a column."""
    if not named:
        return None
    return () if any(column.indirection for column in named) else tuple(column.name for column in named)


def _returned(statement: ast.InsertStmt) -> tuple[tuple[str, str | None], ...] | None:
    clause = statement.returningClause
    if clause is None:
        return ()
    if clause.options or clause.exprs is None:
        return None
    found: list[tuple[str, str | None]] = []
    for item in clause.exprs:
        fields = item.val.fields if isinstance(item.val, ast.ColumnRef) else None
        if fields is None or len(fields) != 1:
            return None
        (field,) = fields
        if isinstance(field, ast.A_Star):
            found.append(("", None))
        else:
            found.append((item.name or field.sval, field.sval))
    return tuple(found)


def _rows(sql: str, select: Any) -> tuple[tuple[Expression | None, ...], ...] | None:
    lists = select.valuesLists
    if not lists or any(getattr(select, name) for name in select if name not in _PLAIN_SELECT):
        return None
    found = _cut(sql)
    if found is None or list(map(len, found)) != list(map(len, lists)):
        return None
    return tuple(
        tuple(None if isinstance(value, ast.SetToDefault) else text for text, value in zip(texts, values, strict=True))
        for texts, values in zip(found, lists, strict=True)
    )


def _cut(sql: str) -> list[list[Expression]] | None:
    """The texts of the values, row by row; None if it is not plain where they are."""
    tokens = [token for token in scan(sql) if not token.name.endswith("COMMENT")]
    depth, begins = 0, []
    for place, token in enumerate(tokens):
        if depth == 0 and token.name == "VALUES":
            begins.append(place)
        depth += (token.name in _OPENING) - (token.name in _CLOSING)
    if len(begins) != 1:
        return None
    rows: list[list[Expression]] = []
    value: list[Any] = []
    for token in tokens[begins[0] + 1 :]:
        if depth == 0 and token.name not in (_ROW, _COMMA):
            break
        closes = token.name in _CLOSING
        depth -= closes
        if depth == 0 and token.name == _ROW:
            rows.append([])
        elif (depth == 0 and closes) or (depth == 1 and token.name == _COMMA):
            rows[-1].append(_pieces(sql, value))
            value = []
        elif depth > 0:
            value.append(token)
        depth += token.name in _OPENING
    return rows


def _pieces(sql: str, tokens: Sequence[Any]) -> Expression:
    """The text from the first to the last token, with its parameters by number."""
    pieces: list[Piece] = []
    begin = tokens[0].start
    for token in tokens:
        if token.name == "PARAM":
            pieces += [sql[begin : token.start], int(sql[token.start + 1 : token.end + 1])]
            begin = token.end + 1
    return (*pieces, sql[begin : tokens[-1].end + 1])
