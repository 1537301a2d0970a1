"""What a shipped statement did to one row, where its text alone tells: as the row change that does the same.

Only statements about one row by its whole key, with values that are constants or parameters. A column that gets any
other expression is known to have changed, and not to what.
"""

from collections.abc import Sequence
from typing import Any

import pglast
from pglast import ast
from pglast.enums import A_Expr_Kind, BoolExprType

from tops.changes import Delete, Insert, Row, RowChange, Statement, Update

_UNKNOWN = object()


def as_row_change(statement: Statement, key: frozenset[str]) -> RowChange | None:
    """None where the statement may do something else, or to other rows. `add` names the columns that are not known."""
    try:
        parsed = pglast.parse_sql(statement.sql)
    except pglast.parser.ParseError:
        return None
    if len(parsed) != 1:
        return None
    match parsed[0].stmt:
        case ast.UpdateStmt(withClause=None, fromClause=None) as update:
            found = _key(update.whereClause, statement.args, key)
            given = _assigned(update.targetList, statement.args)
            if found is None or given is None or not key.isdisjoint(given):
                return None
            values = {name: value for name, value in given.items() if value is not _UNKNOWN}
            return Update(_name(update.relation), found, values, dict.fromkeys(given.keys() - values.keys()))
        case ast.DeleteStmt(withClause=None, usingClause=None) as delete:
            found = _key(delete.whereClause, statement.args, key)
            return None if found is None else Delete(_name(delete.relation), found)
        case ast.InsertStmt(withClause=None, onConflictClause=None) as insert:
            return _insert(insert, statement.args, key)
    return None


def _insert(insert: ast.InsertStmt, args: Sequence[Any], key: frozenset[str]) -> Insert | None:
    source = insert.selectStmt
    if not insert.cols or not isinstance(source, ast.SelectStmt) or not source.valuesLists:
        return None
    if len(source.valuesLists) != 1 or len(source.valuesLists[0]) != len(insert.cols):
        return None
    given = {column.name: _value(value, args) for column, value in zip(insert.cols, source.valuesLists[0], strict=True)}
    if not key <= given.keys() or any(value is _UNKNOWN for value in given.values()):
        return None
    return Insert(_name(insert.relation), given)


def _name(relation: ast.RangeVar | None) -> str:
    assert relation is not None  # every such statement names a table
    return f"{relation.schemaname}.{relation.relname}" if relation.schemaname else str(relation.relname)


def _assigned(targets: Sequence[Any] | None, args: Sequence[Any]) -> Row | None:
    given: Row = {}
    for target in targets or ():
        if not isinstance(target, ast.ResTarget) or target.indirection or isinstance(target.val, ast.MultiAssignRef):
            return None
        given[str(target.name)] = _value(target.val, args)
    return given


def _key(where: Any, args: Sequence[Any], key: frozenset[str]) -> Row | None:
    """The key, if the condition is that each of its columns equals a value, and nothing else."""
    parts: Sequence[Any] = [where]
    if isinstance(where, ast.BoolExpr) and where.boolop == BoolExprType.AND_EXPR:
        parts = where.args or ()
    found: Row = {}
    for part in parts:
        match part:
            case ast.A_Expr(
                kind=A_Expr_Kind.AEXPR_OP,
                name=(ast.String(sval="="),),
                lexpr=ast.ColumnRef(fields=(*_, ast.String(sval=str(name)))),
                rexpr=given,
            ):
                value = _value(given, args)
            case _:
                return None
        if value is _UNKNOWN or value is None or name in found:
            return None
        found[name] = value
    return found if found.keys() == key else None


def _value(node: Any, args: Sequence[Any]) -> Any:
    match node:
        case ast.ParamRef(number=int(number)) if 0 < number <= len(args):
            return args[number - 1]
        case ast.A_Const(isnull=True):
            return None
        case ast.A_Const(val=ast.Integer(ival=number)):
            return number
        case ast.A_Const(val=ast.Float(fval=text)) | ast.A_Const(val=ast.String(sval=text)):
            return text
        case ast.A_Const(val=ast.Boolean(boolval=truth)):
            return truth
    return _UNKNOWN
