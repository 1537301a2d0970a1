"""The one connection through which a replica set's data is written.

It holds the set's advisory lock for as long as it lives, so that what is left of an agent that was replaced can't
write: the lock and the right to write end together. Work is done in order, one piece at a time, and goes on when the
caller is cancelled: the server would not stop half-way either, and nobody would know what it did.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import asyncpg

from adapters.postgres.apply.meter import Meter
from adapters.postgres.apply.statements import Statements
from adapters.postgres.proof import MakeProver, Prover
from adapters.postgres.sql import schema
from adapters.postgres.sql.logins import Logins
from adapters.postgres.sql.sqlstates import ROWS_NOTICE, is_connection_loss
from tops.model.errors import AgentReplaced, ConfigError, NotReachable, OutcomeUnknown, ResourceError
from tops.runtime.in_turn import InTurn

T = TypeVar("T")
Connection = asyncpg.Connection  # of plain records


class _PlainConnection(asyncpg.Connection):
    """A driver's connection that calls no `set_config`, which is not for everyone, to switch off what is off."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server_caps = self._server_caps._replace(jit=False)  # type: ignore[has-type]
        self.meter = Meter(args[1])  # the transport

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().execute(*args, **kwargs)
        except asyncpg.InternalClientError as error:
            await self._check_alive(error)
            raise

    async def _execute(self, *args: Any, **kwargs: Any) -> Any:  # of fetch, fetchrow and fetchval
        try:
            return await super()._execute(*args, **kwargs)  # type: ignore[misc]
        except asyncpg.InternalClientError as error:
            await self._check_alive(error)
            raise

    async def _get_statement(self, *args: Any, **kwargs: Any) -> Any:  # of prepare
        try:
            return await super()._get_statement(*args, **kwargs)  # type: ignore[misc]
        except asyncpg.InternalClientError as error:
            await self._check_alive(error)
            raise

    async def _check_alive(self, error: asyncpg.InternalClientError) -> None:
        """Raise a lost connection if the session takes no other statement either.

        A server that dies tells idle sessions before it closes them. Until the end of the connection arrives the driver
        takes each statement for one beside another, or the connection for closed."""
        try:
            await super().execute("")
        except (asyncpg.InternalClientError, asyncpg.InterfaceError):
            self.terminate()
            raise asyncpg.ConnectionDoesNotExistError("the server has ended the session") from error


def meter_of(connection: Connection) -> Meter:
    """The meter of a connection that `connect` has made."""
    assert isinstance(connection, _PlainConnection)
    return connection.meter


# What is read and written must mean the same in every session of every replica, whatever its server is set to.
_SETTINGS = {
    "timezone": "UTC",
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "standard_conforming_strings": "on",
    "client_min_messages": "notice",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "idle_in_transaction_session_timeout": "0",
    "search_path": "public",
    "timezone_abbreviations": "Default",
    "default_text_search_config": "pg_catalog.simple",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    "xmloption": "content",
    "xmlbinary": "base64",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "backslash_quote": "safe_encoding",
    "quote_all_identifiers": "off",
    "row_security": "on",
    "gin_fuzzy_search_limit": "0",
    "jit": "off",
}
# Our own statements are planned once: they go by key, and to plan them for each epoch costs as much as to run them.
_PLANNED_ONCE = {"plan_cache_mode": "force_generic_plan"}
_LOCK_PATIENCE_S = 10.0
_REPLAN_AFTER_S = 5.0


class Options:
    """How a session behaves towards its server."""

    def __init__(self, *, lock_timeout_s: float, statement_timeout_s: float, connect_timeout_s: float) -> None:
        self.lock_timeout_s, self.statement_timeout_s = lock_timeout_s, statement_timeout_s
        self.connect_timeout_s = connect_timeout_s

    @property
    def command_timeout_s(self) -> float:
        """When the server should have given up by itself and has not, it is taken for dead."""
        return self.statement_timeout_s + 5.0


async def connect(
    dsn: str, where: str, application: str, options: Options, more_settings: Mapping[str, str] | None = None
) -> Connection:
    """A connection whose settings we know; what keeps us out is said in our words."""
    settings = {
        **_SETTINGS,
        **(more_settings or {}),
        "application_name": application,
        "lock_timeout": f"{options.lock_timeout_s * 1000:.0f}",
        "statement_timeout": f"{options.statement_timeout_s * 1000:.0f}",
    }
    try:
        return await asyncpg.connect(
            dsn,
            timeout=options.connect_timeout_s,
            command_timeout=options.command_timeout_s,
            server_settings=settings,
            connection_class=_PlainConnection,
        )
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise ConfigError(f"{where}: {error.message}") from error
    except asyncpg.PostgresError as error:
        raise NotReachable(f"{where}: the server turns us away: {error.message}") from error
    except (OSError, TimeoutError, asyncpg.InterfaceError) as error:
        raise NotReachable(f"{where}: no connection: {error or type(error).__name__}") from error


class Session:
    """The writing connection of one agent, made again when it breaks and nobody has taken over."""

    def __init__(
        self,
        logins: Logins,
        where: str,
        cluster: str,
        replica_set: str,
        options: Options,
        versioned: frozenset[str],
        own_statements: frozenset[str],
        prover: MakeProver = Prover,
    ) -> None:
        self.where = where
        self._logins, self._replica_set, self._options = logins, replica_set, options
        self._versioned, self._own_statements, self._prover = versioned, own_statements, prover
        digest = hashlib.sha256(f"{cluster}\0{replica_set}".encode()).hexdigest()
        self._application = f"tops-agent {digest[:24]}"
        self._turns = InTurn()
        self._connection: Connection | None = None
        self._statements: Statements | None = None
        self._backend: tuple[int, Any] | None = None  # our last connection's, in case the server still has it
        self._replaced = False
        self._rows: list[int] = []
        self._planned_at = 0.0

    async def run(self, work: Callable[[Connection, Statements], Coroutine[Any, Any, T]], what: str) -> T:
        """Do a piece of work when its turn comes; `what` names it if the connection breaks in the middle."""
        return await self._in_turn(self._run(work, what))

    async def _in_turn(self, work: Coroutine[Any, Any, T]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._turns.put(_answered(answer, work))
        return await answer

    async def _run(self, work: Callable[[Connection, Statements], Awaitable[T]], what: str) -> T:
        connection, statements = await self._connected()
        try:
            return await work(connection, statements)
        except BaseException as error:
            if not is_connection_loss(error):
                if not connection.is_closed() and connection.is_in_transaction():
                    await self._undo(connection)
                raise
            self.drop()
            raise OutcomeUnknown(what, self.where) from error

    async def take_over(self) -> None:
        """Connect for the first time: end what is left of an earlier agent, and only then look around."""
        await self._in_turn(self._taken_over())

    async def _taken_over(self) -> None:
        self._replaced = False
        await self._connected(take_over=True)

    async def close(self) -> None:
        """What was begun or asked for before is done first."""
        await self._in_turn(self._closed())
        self._turns.stop()

    async def _closed(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                await self._connection.close(timeout=2)
            self.drop()

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
        self._connection = self._statements = None

    async def send(self, connection: Connection, parts: list[str]) -> tuple[str, list[int]]:
        """Several statements in one message; the last one's tag, and the row counts told on the way."""
        self._rows = []
        now = time.monotonic()
        if now - self._planned_at > _REPLAN_AFTER_S:
            # A plan made while a table was small would read all of it for ever after.
            parts = ["DISCARD PLANS", *parts]
            self._planned_at = now
        tag = await connection.execute(";".join(parts))
        return tag, self._rows

    def _note(self, _: Any, message: Any) -> None:
        if message.sqlstate == ROWS_NOTICE:
            self._rows.append(int(message.message))

    async def _undo(self, connection: Connection) -> None:
        try:
            await connection.execute("ROLLBACK")
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            self.drop()

    async def _connected(self, *, take_over: bool = False) -> tuple[Connection, Statements]:
        if self._replaced:
            raise AgentReplaced(self.where, "another agent has taken over this replica; stop this one")
        if self._connection is not None and self._statements is not None and not self._connection.is_closed():
            return self._connection, self._statements
        connection = await connect(self._logins.agent, self.where, self._application, self._options, _PLANNED_ONCE)
        try:
            await self._end_former(connection, take_over=take_over)
            await schema.ensure(connection, self.where, self._logins.read_role)
            await self._lock(connection, take_over=take_over)
            await _work_as_origin(connection, self.where)
            self._backend = await _backend(connection)
        except BaseException as error:
            connection.terminate()
            if is_connection_loss(error):
                raise NotReachable(f"{self.where}: the connection broke while it was being set up: {error}") from error
            if isinstance(error, asyncpg.PostgresError):
                raise ResourceError(self.where, f"the session can't be set up: {error}") from error
            raise
        connection.add_log_listener(self._note)
        self._connection = connection
        self._statements = Statements(
            connection, self._versioned, self._own_statements, self._prover, write_role=self._logins.write_role
        )
        return self._connection, self._statements

    async def _end_former(self, connection: Connection, *, take_over: bool) -> None:
        if take_over:
            with suppress(asyncpg.InsufficientPrivilegeError):  # another role's agent: wait for it, then give up
                await connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1 "
                    "and datname = current_database() and pid <> pg_backend_pid()",
                    self._application,
                )
        elif self._backend is not None:
            # Our own former connection may still hold the lock when only the line to it broke.
            await connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where pid = $1 and backend_start = $2",
                *self._backend,
            )

    async def _lock(self, connection: Connection, *, take_over: bool) -> None:
        key = await schema.lock_key(connection, self._replica_set)
        deadline = asyncio.get_running_loop().time() + _LOCK_PATIENCE_S
        while not await connection.fetchval("select pg_try_advisory_lock($1)", key):
            if not take_over and await self._is_held_by_another_agent(connection, key):
                self._replaced = True
                raise AgentReplaced(self.where, "another agent has taken over this replica; stop this one")
            if asyncio.get_running_loop().time() > deadline:
                raise ResourceError(self.where, "another agent holds this replica and does not let go")
            await asyncio.sleep(0.02)

    async def _is_held_by_another_agent(self, connection: Connection, key: int) -> bool:
        former = self._backend[0] if self._backend is not None else 0
        holders = await connection.fetch(
            "select pid from pg_locks where locktype = 'advisory' and granted and objsubid = 1 "
            "and (classid::bigint << 32 | objid::bigint) = $1 "
            "and database = (select oid from pg_database where datname = current_database())",
            key,
        )
        return any(holder["pid"] != former for holder in holders)


async def _answered(answer: "asyncio.Future[T]", work: Awaitable[T]) -> None:
    """Work whose caller waits for `answer`; one that was cancelled is not told."""
    try:
        result = await work
    except Exception as error:
        if not answer.done():
            answer.set_exception(error)
    except BaseException:
        answer.cancel()
        raise
    else:
        if not answer.done():
            answer.set_result(result)


async def _work_as_origin(connection: Connection, where: str) -> None:
    """Foreign keys are checked only in the role `origin`; to ask for it when connecting takes a right that need not be
    there, since it is the default."""
    if await connection.fetchval("show session_replication_role") == "origin":
        return
    try:
        await connection.execute("set session_replication_role = origin")
    except asyncpg.InsufficientPrivilegeError as error:
        raise ConfigError(
            f"{where}: session_replication_role is set to another value than origin for this role or database: "
            f"reset it, or grant set on parameter session_replication_role to this role"
        ) from error


async def _backend(connection: Connection) -> tuple[int, Any]:
    row = await connection.fetchrow("select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()")
    assert row is not None
    return row["pid"], row["backend_start"]
