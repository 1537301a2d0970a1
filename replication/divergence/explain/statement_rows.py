"""What a shipped statement did to one row, where its text alone tells: as the row change that does the same.

Only statements about one row by its whole key, with values that are constants or parameters. A column that gets any
other expression is known to have changed, and not to what.
"""

from collections.abc import Sequence
from typing import Any

from pglast import ast

from adapters.changes import Delete, Insert, InvalidChange, Row, RowChange, Statement, Update, joined_table_name
from adapters.sql import NOT_CONSTANT, constant, fixed_columns, inserted_columns, parse


def as_row_change(statement: Statement, key: frozenset[str]) -> RowChange | None:
    """None where the statement may do something else, or to other rows. `add` names the columns that are not known."""
    try:
        parsed = parse(statement.sql)
    except InvalidChange:
        return None
    if len(parsed) != 1:
        return None
    match parsed[0].node:
        case ast.UpdateStmt(withClause=None, fromClause=None) as update:
            found, whole = fixed_columns(update.whereClause, statement.args)
            given = _assigned(update.targetList, statement.args)
            if not whole or found.keys() != key or given is None or not key.isdisjoint(given):
                return None
            values = {name: value for name, value in given.items() if value is not NOT_CONSTANT}
            return Update(_name(update.relation), found, values, dict.fromkeys(given.keys() - values.keys()))
        case ast.DeleteStmt(withClause=None, usingClause=None) as delete:
            found, whole = fixed_columns(delete.whereClause, statement.args)
            return Delete(_name(delete.relation), found) if whole and found.keys() == key else None
        case ast.InsertStmt(withClause=None, onConflictClause=None) as insert:
            return _insert(insert, statement.args, key)
    return None


def _insert(insert: ast.InsertStmt, args: Sequence[Any], key: frozenset[str]) -> Insert | None:
    given = inserted_columns(insert, args)
    if given is None or not key <= given.keys() or any(value is NOT_CONSTANT for value in given.values()):
        return None
    return Insert(_name(insert.relation), given)


def _name(relation: ast.RangeVar | None) -> str:
    assert relation is not None  # every such statement names a table
    return joined_table_name(relation.schemaname or "public", str(relation.relname))


def _assigned(targets: Sequence[Any] | None, args: Sequence[Any]) -> Row | None:
    given: Row = {}
    for target in targets or ():
        if not isinstance(target, ast.ResTarget) or target.indirection or isinstance(target.val, ast.MultiAssignRef):
            return None
        given[str(target.name)] = constant(target.val, args)
    return given
