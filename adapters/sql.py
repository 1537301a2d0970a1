"""What a client's SQL is, read with PostgreSQL's own parser: one statement, a query, what it names.

This is for clear messages, early. What holds a client's SQL are the rights of the login that runs it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pglast import ast, parse_sql
from pglast.parser import ParseError, scan
from pglast.visitors import Visitor

from adapters.postgres.revoked import REVOKED
from tops.changes import InvalidChange

_WRITES = (ast.InsertStmt, ast.UpdateStmt, ast.DeleteStmt, ast.MergeStmt, ast.SelectStmt, ast.TruncateStmt)
_OWN_SCHEMA = "tops"
# A chain of so many operators is as deep as it is long; the parser's bindings have no bound of their own for that.
_TOKENS_MAX = 16_000


@dataclass(frozen=True, slots=True)
class Parsed:
    """`functions` by their last name, `schemas` of the tables and functions that are named with one, `strings` that are
    written as literals."""

    node: ast.Node
    functions: frozenset[str]
    schemas: frozenset[str]
    strings: frozenset[str]

    @property
    def is_query(self) -> bool:
        node = self.node.query if isinstance(self.node, ast.ExplainStmt) else self.node
        return isinstance(node, ast.VariableShowStmt) or (isinstance(node, ast.SelectStmt) and not node.intoClause)

    @property
    def is_write(self) -> bool:
        return isinstance(self.node, _WRITES) and not getattr(self.node, "intoClause", None)

    @property
    def kind(self) -> str:
        return type(self.node).__name__.removesuffix("Stmt").upper()


class NotParsed(InvalidChange):
    """PostgreSQL would not take this text for SQL."""


def check_query(sql: str, *, any_dialect: bool = False) -> None:
    """Reject what is no query. Of `any_dialect`, what only another database understands is left to that one."""
    parsed = _one(sql, any_dialect)
    if parsed is None:
        return
    if not parsed.is_query:
        raise InvalidChange(
            f"a read is one query (SELECT, VALUES, TABLE, EXPLAIN or SHOW), not {parsed.kind}: {sql[:200]}"
        )
    _check_functions(parsed, sql)


def check_statement(sql: str, *, any_dialect: bool = False) -> None:
    """Reject what is no statement that changes rows, and what would reach beyond its transaction."""
    parsed = _one(sql, any_dialect)
    if parsed is None:
        return
    if not parsed.is_write:
        raise InvalidChange(
            "a replicated statement is INSERT, UPDATE, DELETE, MERGE, TRUNCATE or SELECT, "
            f"not {parsed.kind}: {sql[:200]}"
        )
    _check_functions(parsed, sql)
    if _OWN_SCHEMA in parsed.schemas:
        raise InvalidChange(f"schema {_OWN_SCHEMA} is the agents' memory: leave it alone: {sql[:200]}")


def is_truncate(sql: str) -> bool:
    """Raises NotParsed."""
    return any(isinstance(parsed.node, ast.TruncateStmt) for parsed in parse(sql))


def _check_functions(parsed: Parsed, sql: str) -> None:
    for name in sorted(parsed.functions & REVOKED):
        raise InvalidChange(f"{name}() acts on the session or server, which no transaction takes back: {sql[:200]}")


def _one(sql: str, any_dialect: bool) -> Parsed | None:
    try:
        statements = parse(sql)
    except NotParsed:
        if any_dialect:
            return None
        raise
    if len(statements) != 1:
        problem = "the statement is empty" if not statements else f"one statement at a time: {sql[:200]}"
        raise InvalidChange(problem)
    return statements[0]


@lru_cache(maxsize=2_000)
def parse(sql: str) -> tuple[Parsed, ...]:
    """The statements of a text. Raises NotParsed."""
    try:
        if len(sql) > _TOKENS_MAX and len(scan(sql)) > _TOKENS_MAX:
            raise InvalidChange(f"the text has more than {_TOKENS_MAX} words and signs: pass values as parameters")
        raw = parse_sql(sql)
    except ParseError as error:
        raise NotParsed(f"{error.args[0]}: {sql[:200]}") from None
    except (UnicodeError, ValueError) as error:
        raise NotParsed(f"the text can't be SQL: {error}") from None
    return tuple(_parsed(statement.stmt) for statement in raw)


def _parsed(node: ast.Node | None) -> Parsed:
    assert node is not None, "the parser leaves no statement empty"
    names = _Names()
    names(node)
    return Parsed(node, frozenset(names.functions), frozenset(names.schemas), frozenset(names.strings))


class _Names(Visitor):
    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.schemas: set[str] = set()
        self.strings: set[str] = set()

    def visit_A_Const(self, _: Any, node: ast.A_Const) -> None:
        if isinstance(node.val, ast.String):
            self.strings.add(node.val.sval or "")

    def visit_FuncCall(self, _: Any, node: ast.FuncCall) -> None:
        *schemas, name = (part.sval for part in node.funcname or ())
        self.functions.add(name)
        self.schemas.update(schemas)

    def visit_RangeVar(self, _: Any, node: ast.RangeVar) -> None:
        if node.schemaname:
            self.schemas.add(node.schemaname)
