"""Statements that the server knows by name: prepared once per connection, then called with literals.

A message such as `BEGIN; EXECUTE …; EXECUTE …; PREPARE TRANSACTION …` carries a whole epoch in one round trip, with
plans that are kept. Each call reports or checks how many rows it affected through `tops.affected`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import asyncpg
from asyncpg.prepared_stmt import PreparedStatement

from adapters.changes import (
    Change,
    Insert,
    InvalidChange,
    Member,
    NotDeterministic,
    RowChange,
    Statement,
    Value,
    is_captured,
)
from adapters.postgres.apply.replica_mode import Checks, ReplicaMode
from adapters.postgres.proof import MakeProver, NotProved, Prover, Verdict
from adapters.postgres.sql.catalog import Table, find_table, find_types, sql_name
from adapters.postgres.sql.literals import SqlType, array_literal, identifier, literal
from adapters.postgres.sql.row_sql import Part, Sql, check_versions_sql, row_change_sql, write_versions_sql
from adapters.postgres.sql.sqlstates import exclusion, is_connection_loss, is_transient
from adapters.postgres.sql.stamps import Stamps, expect_sql
from adapters.postgres.sql.steps import Shape, Step, Traits, check, traits_of
from adapters.resource import Exclusion
from adapters.sql import NotParsed, check_statement

_LATE_TRIGGERS = """
select exists (select from pg_trigger where not tgisinternal and tginitdeferred and tgenabled <> 'D')
"""
_OIDS = "select coalesce(array_agg(to_regclass(name)::oid), '{}') from unnest($1::text[]) as name"
_KEPT_MAX = 500
_LEARN_AGAIN_S = 5.0
_CONTRADICTORY = ""  # the stamp of no table
AS_AGENT = "SET LOCAL ROLE NONE"
TELL = -1  # as the expected number of rows: tell it


@dataclass(frozen=True, slots=True)
class Call:
    """A prepared statement over arrays of rows: its name, and what of a step's changes fills which array.

    `counted`: it checks or tells how many rows it affected; one that is not affects one row for each or fails.
    """

    name: str
    parts: tuple[Part, ...]
    counted: bool

    def text(self, step: Step, expected: int) -> str:
        captured = is_captured(step.changes[0])  # and so are the others of its shape
        literals = [array_literal(_column(step, part), part.sql_type, captured=captured) for part in self.parts]
        arrays = ",".join(literals)
        if self.counted:
            return f"EXECUTE {self.name}({arrays},{expected})"
        told = f";SELECT tops.affected({TELL},{len(step.changes)})" if expected == TELL else ""
        return f"EXECUTE {self.name}({arrays}){told}"


def _column(step: Step, part: Part) -> list[Value]:
    match part.source:
        case "values":
            return [change.values[part.column] for change in step.changes]  # type: ignore[union-attr]
        case "key":
            return [change.key[part.column] for change in step.changes]  # type: ignore[union-attr]
        case "add":
            return [change.add[part.column] for change in step.changes]  # type: ignore[union-attr]
        case "expected version":
            return [change.expect_version for change in step.changes]  # type: ignore[union-attr]
        case "expected row":
            return [change.expect_row for change in step.changes]  # type: ignore[union-attr]
        case "sum key":
            return [change.sum_key for change in step.changes]  # type: ignore[union-attr]
        case "number":
            return step.numbers


@dataclass(frozen=True, slots=True)
class UserCall:
    """A user's statement; `counted`: wrapped so that it reports its rows; else it must be run by itself."""

    name: str
    types: tuple[SqlType, ...]
    counted: bool
    statement: "PreparedStatement[asyncpg.Record]"
    as_client: str | None  # what gives it a client's rights; None: it has the agent's

    def text(self, args: Sequence[Value]) -> str:
        if len(args) != len(self.types):
            raise InvalidChange(f"the statement takes {len(self.types)} parameter(s), not {len(args)}")
        literals = [literal(value, sql_type) for value, sql_type in zip(args, self.types, strict=True)]
        return f"EXECUTE {self.name}({','.join(literals)})" if literals else f"EXECUTE {self.name}"

    def texts(self, args: Sequence[Value]) -> list[str]:
        """With what goes before and after it; the agent's rights are back when the next statement begins."""
        text = self.text(args)
        return [text] if self.as_client is None else [self.as_client, text, AS_AGENT]


class Statements:
    """The statements of one connection, and what is known of its tables."""

    def __init__(
        self,
        connection: "asyncpg.Connection[asyncpg.Record]",
        versioned: frozenset[str],
        own_statements: frozenset[str] = frozenset(),
        prover: MakeProver = Prover,
        *,
        write_role: str | None = None,
    ) -> None:
        """`own_statements` need no proof and run with the agent's rights; all others run as `write_role`."""
        self._connection = connection
        self._versioned, self._own_statements = versioned, own_statements
        self._as_client = f"SET LOCAL ROLE {identifier(write_role)}" if write_role is not None else None
        self._prover = prover(connection)
        self.replica_mode = ReplicaMode(connection)
        self.tables: dict[str, Table] = {}
        self.known: dict[Shape, Traits] = {}
        self._former: dict[str, Table] = {}  # tables as the calls were made for them
        self._late_triggers: bool | None = None
        self._versioned_oids: frozenset[int] | None = None
        self.under_way: asyncio.Future[Any] | None = None  # a message whose answer somebody else waits for
        self._own: dict[str, str] = {}
        self._unchanged: dict[tuple[int, str], str] = {}  # by oid and stamp
        self._own_kept: list[PreparedStatement[asyncpg.Record]] = []
        self._calls: dict[Shape, tuple[Call, ...]] = {}
        self._user_calls: dict[str, UserCall | Exclusion] = {}
        self._names = 0
        self._learned_at = time.monotonic()
        self._kept: list[PreparedStatement[asyncpg.Record]] = []  # asyncpg drops a statement that nobody refers to

    def refresh(self) -> None:
        """Before a message is composed: look at the tables again now and then, and let go of old statements.

        Each message checks the stamps of its tables; what these do not cover (domains, collations) is looked up again
        after a few seconds at the latest.
        """
        if len(self._kept) > _KEPT_MAX:
            self.forget()
            self._kept.clear()
        elif time.monotonic() - self._learned_at > _LEARN_AGAIN_S:
            self.look_again()

    def look_again(self) -> None:
        """Ask the database about tables and statements before they are used next; what has not changed is kept."""
        self.tables.clear()
        self.known.clear()
        self._prover.forget()
        self.replica_mode.forget()
        self._late_triggers = self._versioned_oids = None
        self._learned_at = time.monotonic()

    def forget(self) -> None:
        """The schema may have changed."""
        self.look_again()
        self._calls.clear()
        self._user_calls.clear()
        self._unchanged.clear()

    async def late_triggers(self) -> bool:
        """Whether the database has triggers of its user's that wait for the end of the transaction."""
        if self._late_triggers is None:
            await self._line_free()
            self._late_triggers = bool(await self._connection.fetchval(_LATE_TRIGGERS))
        return self._late_triggers

    async def _is_versioned(self, table: Table) -> bool:
        if not self._versioned:
            return False
        if self._versioned_oids is None:
            names = [sql_name(name) for name in self._versioned]
            self._versioned_oids = frozenset(await self._connection.fetchval(_OIDS, names))
        return table.oid in self._versioned_oids

    async def _look_up(self, name: str) -> Table:
        table = self.tables[name] = await find_table(self._connection, name)
        if self._former.get(name) != table:
            self._former[name] = table
            for shape in [shape for shape in self.known if shape[1] == name]:
                del self.known[shape]
            for shape in [shape for shape in self._calls if shape[1] == name]:
                del self._calls[shape]
            self._prover.forget()
            self.replica_mode.forget()
        return table

    async def traits(self, change: Change, shape: Shape) -> Traits:
        """What the plan must know of the change; InvalidChange if it can't ever be carried out."""
        await self._line_free()
        if isinstance(change, Statement):
            self._user_calls[change.sql], stamps = await self._prepare_user_statement(change.sql)
            found = traits_of(change, shape, None, stamps)
        else:
            table = self.tables.get(change.table)
            try:
                if table is None:
                    raise InvalidChange("not looked up yet")
                check(change, table)
            except InvalidChange:
                # Unknown, or known from before a column came.
                table = await self._look_up(change.table)
                check(change, table)
            found = traits_of(change, shape, table, await self._proved(change, table))
        self.known[shape] = found
        return found

    async def _proved(self, change: RowChange, table: Table) -> Stamps:
        """The stamps of the tables for which the change is proved; NotDeterministic if it is not."""
        stamps: Stamps = {table.oid: table.stamp}
        if is_captured(change):  # what triggers and defaults made of it is in the write set
            if isinstance(change, Insert) and not table.columns.keys() <= change.values.keys():
                _require(await self._prover.defaults(change, table.oid))
                stamps = self._prover.stamps
        else:
            _require(await self._prover.row_change(change, table.oid))
            stamps = self._prover.stamps
        if table.sql_name.startswith("tops."):
            return {}  # nobody changes these while the set runs
        # The table and what the proof knows of it may have been looked up at different times.
        agree = stamps.get(table.oid, table.stamp) == table.stamp
        return {**stamps, table.oid: table.stamp if agree else _CONTRADICTORY}

    async def unchanged_texts(self, stamps: Stamps) -> list[str]:
        """They fail if one of the tables is not the one for which the message was written. They come behind the
        changes, whose locks keep definitions as they are until the end of the transaction."""
        return [self._unchanged.get(known) or await self._prepare_unchanged(*known) for known in stamps.items()]

    async def _prepare_unchanged(self, oid: int, stamp: str) -> str:
        await self._line_free()
        name = await self._connection.fetchval("select $1::oid::regclass::text", oid)
        text = self._unchanged[oid, stamp] = f"EXECUTE {await self._keep(expect_sql(oid, name, stamp))}"
        return text

    async def checks_of(self, member: Member) -> Checks | None:
        """What must be checked by query where a captured write set is applied in replica mode; None: it need not be."""
        names = dict.fromkeys(change.table for change in member.changes if is_captured(change))
        if not member.origin or not names:
            return None
        await self._line_free()
        tables = {name: self.tables.get(name) or await self._look_up(name) for name in names}
        if not await self.replica_mode.is_needed(list(tables.values()), member.changes):
            return None
        return await self.replica_mode.checks(tables, member.changes)

    def user_call(self, change: Statement) -> UserCall | Exclusion:
        return self._user_calls[change.sql]

    async def named(self, sql: str) -> str:
        """The name of one of our own statements."""
        name = self._own.get(sql)
        if name is None:
            await self._line_free()
            self._names += 1
            name = f"tops_{self._names}"
            self._own_kept.append(await self._connection.prepare(sql, name=name))
            self._own[sql] = name
        return name

    async def _line_free(self) -> None:
        """While a message is under way, the connection takes no other."""
        if self.under_way is not None:
            await asyncio.wait([self.under_way])

    async def calls_for(self, step: Step) -> tuple[Call, ...]:
        """The statements of one step: versions to check, the change itself, versions to write."""
        shape = step.traits.shape
        calls = self._calls.get(shape)
        if calls is None:
            calls = self._calls[shape] = await self._prepare_step(step.changes[0], step.traits.table)
        return calls

    async def _prepare_step(self, example: Change, table: Table | None) -> tuple[Call, ...]:
        assert table is not None
        assert not isinstance(example, Statement)
        await self._line_free()
        async with self._as_applied(example, table):
            calls = [await self._prepare(row_change_sql(example, table))]
        versioned = await self._is_versioned(table)
        if getattr(example, "expect_version", None) is not None:
            if not versioned:
                raise InvalidChange(f"table {example.table!r} does not track row versions: name it as versioned")
            calls.insert(0, await self._prepare(check_versions_sql(example, table)))
        if versioned:
            calls.append(await self._prepare(write_versions_sql(example, table)))
        return tuple(calls)

    @asynccontextmanager
    async def _as_applied(self, example: Change, table: Table) -> AsyncIterator[None]:
        """In the mode in which a captured change is applied. Rules rewrite a statement when it is prepared, and one
        that counts its rows can not be rewritten into several."""
        if not is_captured(example) or not (await self.replica_mode.ties(table)).has_triggers:
            yield
            return
        before = await self._connection.fetchval("SHOW session_replication_role")
        await self._connection.execute("SET session_replication_role TO replica")
        try:
            yield
        finally:
            with suppress(asyncpg.InFailedSQLTransactionError):  # which takes the setting back by itself
                await self._connection.execute(f"SET session_replication_role TO {before}")

    async def _prepare(self, sql: Sql) -> Call:
        return Call(await self._keep(sql.text), sql.parts, sql.counted)

    async def _keep(self, sql: str) -> str:
        self._names += 1
        name = f"tops_{self._names}"
        self._kept.append(await self._connection.prepare(sql, name=name))
        return name

    async def _prepare_user_statement(self, sql: str) -> tuple[UserCall | Exclusion, Stamps]:
        """A statement that is not understood or not proved is rejected for good, for every member that brings it."""
        own = sql in self._own_statements
        stamps: Stamps = {}
        try:
            if not own:
                with suppress(NotParsed):  # what is no SQL is for the server to say
                    check_statement(sql)
                verdict = await self._prover.statement(sql)
                stamps = self._prover.stamps
                _require(verdict)
            return await self._proved_call(sql, None if own else self._as_client), stamps
        except (InvalidChange, asyncpg.PostgresError) as error:
            if is_connection_loss(error) or is_transient(error):
                raise
            return exclusion(error), stamps

    async def _proved_call(self, sql: str, as_client: str | None) -> UserCall:
        try:
            return await self._user_call(sql, as_client, counted=True)
        except asyncpg.PostgresError:
            # One that returns rows can't be a part of another; it runs by itself.
            return await self._user_call(sql, as_client, counted=False)

    async def _user_call(self, sql: str, as_client: str | None, *, counted: bool) -> UserCall:
        if counted:
            bare = sql.rstrip().rstrip(";")
            sql = f"with changed as (\n{bare}\nreturning 1) select tops.affected({TELL}, count(*)) from changed"
        try:
            name = await self._keep(sql)
        except asyncpg.InternalClientError as error:  # the driver's, about a type; the connection is as good as before
            raise InvalidChange(f"the statement returns what no client can read: {error}") from error
        statement = self._kept[-1]
        types = await find_types(self._connection, [parameter.oid for parameter in statement.get_parameters()])
        return UserCall(name, tuple(types), counted, statement, as_client)


def _require(verdict: Verdict) -> None:
    if isinstance(verdict, NotProved):
        raise NotDeterministic(verdict.reason, verdict.sentence)
