"""What a client's SQL is, read with PostgreSQL's own parser: one statement, a query, what it names.

This is for clear messages, early. What holds a client's SQL are the rights of the login that runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pglast import ast, parse_sql
from pglast.enums import A_Expr_Kind, BoolExprType
from pglast.parser import ParseError, scan
from pglast.visitors import Skip, Visitor

from adapters.changes import InvalidChange, Row
from adapters.revoked import REVOKED

_WRITES = (ast.InsertStmt, ast.UpdateStmt, ast.DeleteStmt, ast.MergeStmt, ast.SelectStmt, ast.TruncateStmt)
_OWN_SCHEMA = "tops"
# A chain of operators is as deep as it is long, and the parser's bindings have no bound of their own for that: 16,000
# UNIONs end the process. A list of values is flat, however long; it costs 3 microseconds a token.
_NESTING_MAX = 16_000
_TOKENS_MAX = 200_000
_LONG = 16_000  # characters: a shorter text has fewer tokens than either bound
_TOO_LONG = (
    "pass many values as arrays: INSERT INTO t (a, b) SELECT * FROM unnest($1::int[], $2::text[]), "
    "or write fewer rows at a time"
)
_OPENING, _CLOSING, _COMMA = frozenset({"ASCII_40", "ASCII_91"}), frozenset({"ASCII_41", "ASCII_93"}), "ASCII_44"
_COMMENTS = frozenset({"SQL_COMMENT", "C_COMMENT"})
_OF_STORAGE = frozenset({"ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"})  # no column of a user's has such a name
# The last word of a command's name, if the name has several.
_OBJECTS = frozenset((
    "TABLE", "INDEX", "VIEW", "SEQUENCE", "FUNCTION", "PROCEDURE", "TRIGGER", "TYPE", "DOMAIN", "SCHEMA", "DATABASE",
    "ROLE", "USER", "GROUP", "EXTENSION", "RULE", "POLICY", "PUBLICATION", "SUBSCRIPTION", "SERVER", "AGGREGATE",
    "OPERATOR", "TABLESPACE", "STATISTICS", "SYSTEM", "PRIVILEGES", "OWNED", "TRANSACTION",
))  # fmt: skip
_SEVERAL_WORDS = frozenset({"CREATE", "ALTER", "DROP", "REFRESH", "PREPARE", "LOCK", "REASSIGN"})


@dataclass(frozen=True, slots=True)
class Parsed:
    """`functions` by their last name, `schemas` of the tables and functions that are named with one, `strings` that are
    written as literals. `relations` are tables, views and WITH queries, by schema and name, as often as they are named;
    `with_queries` those that WITH defines. `names` are all in expressions: of columns, functions, operators, types."""

    node: ast.Node
    functions: frozenset[str]
    schemas: frozenset[str]
    strings: frozenset[str]
    relations: tuple[tuple[str | None, str], ...]
    with_queries: frozenset[str]
    names: frozenset[str]

    @property
    def is_query(self) -> bool:
        node = self.node.query if isinstance(self.node, ast.ExplainStmt) else self.node
        return isinstance(node, ast.VariableShowStmt) or (isinstance(node, ast.SelectStmt) and not node.intoClause)

    @property
    def is_write(self) -> bool:
        return isinstance(self.node, _WRITES) and not getattr(self.node, "intoClause", None)


class NotParsed(InvalidChange):
    """PostgreSQL would not take this text for SQL."""


def check_query(sql: str, *, any_dialect: bool = False) -> None:
    """Reject what is no query. Of `any_dialect`, what only another database understands is left to that one."""
    parsed = _one(sql, any_dialect)
    if parsed is None:
        return
    if not parsed.is_query:
        raise InvalidChange(
            f"a read is one query (SELECT, VALUES, TABLE, EXPLAIN or SHOW), not {_command(parsed, sql)}: {sql[:200]}"
        )
    _check_functions(parsed, sql)


def check_statement(sql: str, *, any_dialect: bool = False) -> None:
    """Reject what is no statement that changes rows, and what would reach beyond its transaction."""
    parsed = _one(sql, any_dialect)
    if parsed is None:
        return
    if not parsed.is_write:
        raise InvalidChange(
            "a replicated statement is INSERT, UPDATE, DELETE, MERGE or SELECT, "
            f"not {_command(parsed, sql)}: {sql[:200]}"
        )
    _check_functions(parsed, sql)
    for name in sorted(_returned_names(parsed.node) & _OF_STORAGE):
        raise InvalidChange(
            f"{name} tells where one database keeps a row, and is another one at every replica: "
            f"return the primary key instead: {sql[:200]}"
        )
    if _OWN_SCHEMA in parsed.schemas:
        raise InvalidChange(f"schema {_OWN_SCHEMA} is the agents' memory: leave it alone: {sql[:200]}")


def _returned_names(node: ast.Node) -> set[str]:
    found = _ReturnedNames()
    if (returning := getattr(node, "returningClause", None)) is not None:
        found(returning)
    return found.names


def _command(parsed: Parsed, sql: str) -> str:
    """What a user calls the statement: ALTER TABLE, SET, SELECT INTO."""
    if getattr(parsed.node, "intoClause", None):
        return "SELECT INTO"
    words: list[str] = []
    for token in scan(sql):
        if token.name in _COMMENTS:
            continue
        words.append(sql[token.start : token.end + 1].upper())
        if words[0] not in _SEVERAL_WORDS or words[-1] in _OBJECTS or token.kind == "NO_KEYWORD":
            break
    return " ".join(words) if words[-1] in _OBJECTS else words[0]


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


def parse(sql: str) -> tuple[Parsed, ...]:
    """The statements of a text. Raises NotParsed, or InvalidChange where the text can't even be sent to a server."""
    if "\0" in sql:  # the parser would not look beyond it, and the server ends the session over it
        raise InvalidChange(f"the text holds the character NUL, which no SQL can: {sql[:200]!r}")
    return _parse(sql) if len(sql) <= _LONG else _parse_long(sql)


def _parse_uncached(sql: str) -> tuple[Parsed, ...]:
    try:
        if len(sql) > _LONG:
            _check_length(sql)
        raw = parse_sql(sql)
    except ParseError as error:
        raise NotParsed(f"{error.args[0]}: {sql[:200]}") from None
    except (UnicodeError, ValueError) as error:
        raise InvalidChange(f"the text can't be SQL: {error}") from None
    return tuple(_parsed(statement.stmt) for statement in raw)


_parse = lru_cache(maxsize=2_000)(_parse_uncached)
_parse_long = lru_cache(maxsize=4)(
    _parse_uncached
)  # a statement is looked at several times on its way; trees are large


def _check_length(sql: str) -> None:
    tokens = scan(sql)
    if len(tokens) > _TOKENS_MAX:
        raise InvalidChange(f"the text has more than {_TOKENS_MAX:,} words and signs: {_TOO_LONG}")
    if _nesting(tokens) > _NESTING_MAX:
        raise InvalidChange(f"the text may nest more than {_NESTING_MAX:,} levels deep: {_TOO_LONG}")


def _nesting(tokens: Sequence[Any]) -> int:
    """At least as much as the tree is deep.

    Of a list between two brackets only the longest element counts, since elements do not nest in each other. Keywords
    count wherever they are: `select 1, 2 union select 3, 4` nests across its commas."""
    levels: list[list[int]] = []
    keywords = element = longest = 0
    for token in tokens:
        if token.name in _OPENING:
            levels.append([keywords, element, longest])
            keywords = element = longest = 0
        elif token.name in _CLOSING and levels:
            inner = keywords + max(element, longest) + 1
            keywords, element, longest = levels.pop()
            element += inner
        elif token.name == _COMMA:
            element, longest = 0, max(element, longest)
        elif token.kind == "NO_KEYWORD":
            element += 1
        else:
            keywords += 1
    depth = keywords + max(element, longest)
    return depth + sum(outer[0] + max(outer[1], outer[2]) for outer in levels)


def _parsed(node: ast.Node | None) -> Parsed:
    assert node is not None, "the parser leaves no statement empty"
    names = _Names()
    names(node)
    return Parsed(
        node,
        frozenset(names.functions),
        frozenset(names.schemas),
        frozenset(names.strings),
        tuple(names.relations),
        frozenset(names.with_queries),
        frozenset(names.names),
    )


class _Names(Visitor):
    def __init__(self) -> None:
        self.functions: set[str] = set()
        self.schemas: set[str] = set()
        self.strings: set[str] = set()
        self.relations: list[tuple[str | None, str]] = []
        self.with_queries: set[str] = set()
        self.names: set[str] = set()

    def visit_A_Const(self, _: Any, node: ast.A_Const) -> Any:
        if isinstance(node.val, ast.String):
            self.strings.add(node.val.sval or "")
        return Skip

    def visit_String(self, _: Any, node: ast.String) -> None:
        self.names.add(node.sval or "")

    def visit_CommonTableExpr(self, _: Any, node: ast.CommonTableExpr) -> None:
        self.with_queries.add(node.ctename or "")

    def visit_FuncCall(self, _: Any, node: ast.FuncCall) -> None:
        *schemas, name = (part.sval for part in node.funcname or ())
        self.functions.add(name)
        self.schemas.update(schemas)

    def visit_RangeVar(self, _: Any, node: ast.RangeVar) -> None:
        self.relations.append((node.schemaname, node.relname or ""))
        if node.schemaname:
            self.schemas.add(node.schemaname)


class _ReturnedNames(_Names):
    def visit_TypeCast(self, _: Any, node: ast.TypeCast) -> Any:
        """`tableoid::regclass` is a partition's name, which is the same everywhere."""
        match node:
            case ast.TypeCast(
                arg=ast.ColumnRef(fields=(*_, ast.String(sval="tableoid"))),
                typeName=ast.TypeName(names=(*_, ast.String(sval="regclass")), arrayBounds=None),
            ):
                return Skip
        return None


NOT_CONSTANT = object()


def constant(node: Any, args: Sequence[Any]) -> Any:
    """The value of a parameter or a literal; NOT_CONSTANT for any other expression."""
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
    return NOT_CONSTANT


def fixed_columns(where: Any, args: Sequence[Any]) -> tuple[Row, bool]:
    """The columns that a condition says are equal to constants, and whether that is all that it says."""
    if isinstance(where, ast.BoolExpr) and where.boolop == BoolExprType.AND_EXPR:
        found: Row = {}
        parts = [fixed_columns(part, args) for part in where.args or ()]
        for part, _ in parts:
            found.update(part)
        return found, all(whole for _, whole in parts) and len(found) == sum(len(part) for part, _ in parts)
    match where:
        case ast.A_Expr(
            kind=A_Expr_Kind.AEXPR_OP,
            name=(ast.String(sval="="),),
            lexpr=ast.ColumnRef(fields=(*_, ast.String(sval=str(name)))),
            rexpr=given,
        ) if (value := constant(given, args)) is not NOT_CONSTANT and value is not None:
            return {name: value}, True
    return {}, False


def inserted_columns(insert: ast.InsertStmt, args: Sequence[Any]) -> Row | None:
    """What an INSERT gives the columns of its one row, NOT_CONSTANT where it is no constant; None if it has no such
    row."""
    source = insert.selectStmt
    if not insert.cols or not isinstance(source, ast.SelectStmt) or not source.valuesLists:
        return None
    values = source.valuesLists[0]
    if len(source.valuesLists) != 1 or len(values) != len(insert.cols):
        return None
    return {str(column.name): constant(value, args) for column, value in zip(insert.cols, values, strict=True)}
