"""Which statements are quick, and what a client must know of one to use it."""

from collections import OrderedDict

import asyncpg
from pglast import ast

from adapters.changes import InvalidChange
from adapters.postgres.apply.session import Connection
from adapters.sql import check_query, parse
from adapters.text_values import DECODERS, ENCODERS

STATEMENTS_MAX = 2_000


class QuickStatement:
    """One text with its parameters and columns, as the server has analysed it. Until `slow_until` nothing is sent
    behind it on its session, since it has run for long. `is_large`: it has returned more than a quick read may."""

    __slots__ = (
        "bind",
        "columns",
        "is_dropped",
        "is_large",
        "name",
        "number",
        "parameters",
        "parse",
        "slow_until",
        "sql",
    )

    def __init__(
        self, number: int, sql: str, parameters: tuple[int, ...], columns: tuple[tuple[str, int], ...]
    ) -> None:
        self.number, self.sql, self.parameters, self.columns = number, sql, parameters, columns
        self.is_dropped = self.is_large = False
        self.slow_until = 0.0
        self.name = b"q%d" % number
        body = self.name + b"\0" + sql.encode() + b"\0\0\0"
        self.parse = b"P" + (len(body) + 4).to_bytes(4) + body
        self.bind = b"\0" + self.name + b"\0\0\0"  # the portal, the statement, parameters in text


class QuickStatements:
    """Those of one database, by text. One that is dropped gets another number when it is described again, since
    sessions may still have the former one."""

    def __init__(self) -> None:
        self._by_text: OrderedDict[str, QuickStatement] = OrderedDict()
        self._next = 1

    def get(self, sql: str) -> QuickStatement | None:
        return self._by_text.get(sql)

    async def describe(self, connection: Connection, sql: str) -> QuickStatement | None:
        """None if the statement is not quick: no plain query, or one with types that only the driver knows."""
        if (known := self.get(sql)) is not None:
            return known
        if not _is_select(sql):
            return None
        try:
            prepared = await connection.prepare(sql)
        except (asyncpg.DataError, asyncpg.InterfaceError):
            return None
        parameters = tuple(parameter.oid for parameter in prepared.get_parameters())
        columns = tuple((column.name, column.type.oid) for column in prepared.get_attributes())
        if not ENCODERS.keys() >= set(parameters) or not DECODERS.keys() >= {oid for _, oid in columns}:
            return None
        if not columns or len({name for name, _ in columns}) < len(columns):
            return None
        statement = self._by_text[sql] = QuickStatement(self._next, sql, parameters, columns)
        self._next += 1
        if len(self._by_text) > STATEMENTS_MAX:
            self._by_text.popitem(last=False)[1].is_dropped = True
        return statement

    def drop(self, statement: QuickStatement) -> None:
        """Its tables have changed: it must be described again."""
        statement.is_dropped = True
        if self._by_text.get(statement.sql) is statement:
            del self._by_text[statement.sql]


def _is_select(sql: str) -> bool:
    try:
        check_query(sql)
    except InvalidChange:
        return False  # the other road says why
    return isinstance(parse(sql)[0].node, ast.SelectStmt)
