"""A connection of the write login in which an origin executes transactions, and the agent's beside it.

The first one is registered in `tops.sessions`, which only the agent's login can write, so that its changes are
captured. Whatever its SQL has done to its settings ends with each transaction.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import asyncpg
from asyncpg.prepared_stmt import PreparedStatement

from adapters.changes import CLOCK_STRINGS, Insert, InvalidChange, Row, RowChange, Statement
from adapters.postgres.apply.reading import BEYOND_PYTHON, RESULT_BYTES_MAX, plain_rows
from adapters.postgres.apply.session import Connection, Options, connect, meter_of
from adapters.postgres.apply.statements import TELL, Call
from adapters.postgres.apply.transactions import command_count
from adapters.postgres.sql.catalog import Table, find_types
from adapters.postgres.sql.literals import SqlType, literal
from adapters.postgres.sql.row_sql import row_change_sql
from adapters.postgres.sql.sqlstates import CAPTURED_NOTICE, ROWS_NOTICE, is_connection_loss
from adapters.postgres.sql.steps import Step, check, shape_of, traits_of
from adapters.sql import NotParsed, check_statement, is_truncate, parse
from tops.model.errors import ConfigError, ResultTooLarge

Prepared = PreparedStatement  # of plain records
# What one client's transaction leaves in a session that the next one has: settings, and what currval and lastval give.
CLEAN = "RESET ALL;DISCARD SEQUENCES"
_TRUNCATE = (
    "TRUNCATE takes rows away without naming them, so that other replicas could not follow: use DELETE FROM, or "
    "TRUNCATE every database while the set is stopped"
)
_RULES = (
    "table {table!r} has a rule with which PostgreSQL carries out no row change ({reason}): send the change as a "
    "statement, or drop the rule and do its work with a trigger or in the application"
)
_KEPT_MAX = 200
_FORGET_ENDED = """
delete from tops.sessions s
 where not exists (select from pg_stat_activity a where a.pid = s.pid and a.backend_start = s.backend_start)
"""
_REGISTER = """
insert into tops.sessions (pid, backend_start, server_start)
select pid, backend_start, pg_postmaster_start_time() from pg_stat_activity where pid = $1
    on conflict (pid) do update set backend_start = excluded.backend_start, server_start = excluded.server_start
"""


class ForbiddenByRule(InvalidChange):
    """A rule of the table stands in the way of a row change; the transaction has failed."""


class MemberResult(NamedTuple):
    """What the server has told about one member of a message."""

    rows: int
    notices: tuple[str, ...]
    last_key: int


class OriginSession:
    """One connection and its prepared statements; used by one chain at a time."""

    def __init__(self, connection: Connection, pid: int, unlock: str) -> None:
        self.connection, self.pid = connection, pid
        self.notices: list[str] = []
        self.last_captured = 0  # the id of the last key that was read; later ones are greater
        self.captured_so_far = 0  # the id of the last key that was noted, as of the end of the last member
        self._rows: list[int] = []
        self._results: list[MemberResult] = []
        self._counted: dict[str, tuple[Prepared, list[SqlType]] | None] = {}
        self._unlock = unlock
        self._prepared: dict[str, Prepared] = {}
        connection.add_log_listener(self._note)

    @classmethod
    async def open(cls, dsn: str, where: str, options: Options, agent: Connection) -> "OriginSession":
        connection = await connect(dsn, where, "tops-origin", options)
        try:
            pid = connection.get_server_pid()
            if await connection.fetchval("show track_counts") != "on":
                raise ConfigError(
                    f"{where}: track_counts is off, so nobody knows what a transaction changed: turn it on"
                )
            can_unlock = await connection.fetchval(
                "select has_function_privilege('pg_catalog.pg_advisory_unlock_all()', 'execute')"
            )
            await agent.execute(_FORGET_ENDED)
            await agent.execute(_REGISTER, pid)
            return cls(connection, pid, ";select pg_catalog.pg_advisory_unlock_all()" if can_unlock else "")
        except BaseException:
            connection.terminate()
            raise

    def _note(self, _: Any, message: Any) -> None:
        if message.sqlstate == ROWS_NOTICE:
            self._rows.append(int(message.message))
        elif message.sqlstate == CAPTURED_NOTICE:
            self.captured_so_far = int(message.message)
            self._results.append(MemberResult(sum(self._rows), tuple(self.notices), self.captured_so_far))
            self._rows.clear()
            self.notices.clear()
        else:
            self.notices.append(f"{message.severity}: {message.message}")

    async def roll_back(self) -> None:
        """Confirmed by the server: nothing of the transaction is left, nor a lock of the session."""
        await self.connection.execute(f"ROLLBACK;{CLEAN}{self._unlock}")
        if len(self._prepared) > _KEPT_MAX:
            self._prepared.clear()
        if len(self._counted) > _KEPT_MAX:
            self._counted.clear()

    def forget(self) -> None:
        """Prepare statements again: their parameters have the types that columns had."""
        self._prepared.clear()
        self._counted.clear()

    async def run(self, statement: Statement) -> tuple[int, tuple[Row, ...]]:
        """Execute one statement: rows affected, and rows returned."""
        with suppress(NotParsed):  # what is no SQL is for the server to say
            check_statement(statement.sql)
            if is_truncate(statement.sql):
                raise InvalidChange(_TRUNCATE)
        prepared = await self._statement(statement.sql)
        try:
            with meter_of(self.connection).bounded(RESULT_BYTES_MAX):
                records = await self._fetch(prepared, statement)
        except (ValueError, OverflowError) as error:
            if isinstance(error, asyncpg.PostgresError):
                raise
            raise InvalidChange(f"the statement returns {BEYOND_PYTHON}: {error}") from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            if meter_of(self.connection).exceeded:
                raise ResultTooLarge("the statement", RESULT_BYTES_MAX) from error
            raise
        return records

    async def learn(self, statement: Statement) -> None:
        """Be able to write the statement down as part of a message, if that is possible; outside a transaction, which a
        statement that can't be prepared would end."""
        if statement.sql in self._counted or _holds_clock(statement.sql):
            return
        try:
            check_statement(statement.sql)
        except InvalidChange:
            self._counted[statement.sql] = None  # rejected when its turn comes: the others of the chain go on
            return
        bare = statement.sql.rstrip().rstrip(";")
        counted = f"with changed as (\n{bare}\nreturning 1) select tops.affected({TELL}, count(*)) from changed"
        try:
            prepared = await self.connection.prepare(counted)
        except (asyncpg.PostgresError, asyncpg.InternalClientError) as error:
            if isinstance(error, asyncpg.PostgresError) and is_connection_loss(error):
                raise
            self._counted[statement.sql] = None  # it returns rows, or is wrong: it runs by itself
            return
        types = await find_types(self.connection, [parameter.oid for parameter in prepared.get_parameters()])
        self._counted[statement.sql] = prepared, types

    def text(self, statement: Statement) -> str | None:
        """The statement as part of a message, which tells how many rows it affects; None: it must run by itself."""
        known = self._counted.get(statement.sql)
        if known is None or len(known[1]) != len(statement.args):
            return None
        prepared, types = known
        literals = _literals(statement.args, types)
        return f"EXECUTE {prepared.get_name()}({literals})" if literals else f"EXECUTE {prepared.get_name()}"

    async def send(self, texts: list[str]) -> list[MemberResult]:
        """Statements in one message: what each member of it has told, up to where its keys end."""
        self._results, self._rows = [], []
        self.notices.clear()
        await self.connection.execute(";".join(texts))
        return self._results

    async def _statement(self, sql: str) -> Prepared:
        prepared = self._prepared.get(sql)
        if prepared is None:
            try:
                prepared = await self.connection.prepare(sql)
            except asyncpg.InternalClientError as error:  # a type that the driver can't look up, such as anyarray
                raise InvalidChange(f"the driver does not understand the statement: {error}") from error
            if not _holds_clock(sql):
                self._prepared[sql] = prepared
        return prepared

    async def _fetch(self, prepared: Prepared, statement: Statement) -> tuple[int, tuple[Row, ...]]:
        try:
            records = await prepared.fetch(*statement.args)
        except (asyncpg.DataError, asyncpg.InterfaceError) as error:
            # The server's complaints have a class of their own below DataError; these are the driver's about arguments.
            if type(error) not in (asyncpg.DataError, asyncpg.InterfaceError) or self.connection.is_closed():
                raise
        else:
            return command_count(prepared.get_statusmsg() or ""), tuple(plain_rows(records))
        types = await find_types(self.connection, [parameter.oid for parameter in prepared.get_parameters()])
        if len(types) != len(statement.args):
            raise InvalidChange(f"the statement takes {len(types)} parameter(s), not {len(statement.args)}")
        literals = _literals(statement.args, types)
        executed = await self.connection.prepare(f"EXECUTE {prepared.get_name()}({literals})")
        records = await executed.fetch()
        return command_count(executed.get_statusmsg() or ""), tuple(plain_rows(records))

    async def change(self, change: RowChange, table: Table) -> int:
        """Carry out a row change, whose columns may be left to any default: rows affected."""
        if isinstance(change, Insert):  # whose key may be left to a default as well
            for name in change.values:
                table.column(name)
        else:
            check(change, table)
        sql = row_change_sql(change, table)
        try:
            prepared = await self._statement(sql.text)
        except asyncpg.FeatureNotSupportedError as error:
            # PostgreSQL rewrites by the table's rules here, and what is rewritten can't tell how many rows it affects.
            raise ForbiddenByRule(_RULES.format(table=change.table, reason=error)) from error
        step = Step(traits_of(change, shape_of(change), table, {}), [change], [0])
        self._rows.clear()
        await self.connection.execute(Call(prepared.get_name(), sql.parts, sql.counted).text(step, TELL))
        return sum(self._rows)


def _holds_clock(sql: str) -> bool:
    """Whether a literal may stand for a time that the server reads when it prepares the statement: 'now', 'today'."""
    try:
        return any(word in text.lower() for one in parse(sql) for text in one.strings for word in CLOCK_STRINGS)
    except InvalidChange:
        return True


def _literals(args: Sequence[Any], types: Sequence[SqlType]) -> str:
    """Parameters of EXECUTE; this session alone reads them."""
    return ",".join(literal(value, kind, read_once=True) for value, kind in zip(args, types, strict=True))
