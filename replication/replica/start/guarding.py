"""Keeps the guard against direct writes on all tables of a set, and tells what it noted."""

import asyncio
import logging
from collections.abc import Sequence

import asyncpg

from adapters.postgres.access import guard_triggers
from adapters.postgres.access.guard_triggers import Guard
from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.sql.catalog import sql_name
from replication.model.config import ReplicaSetConfig
from replication.tables import catalog
from replication.tables.endpoints import ReplicaEndpoint
from tops.model.errors import TopsError

LOOK_S = 2.0  # between two looks for new tables and for direct writes
SHOWN_MAX = 5
_OPTIONS = Options(lock_timeout_s=2.0, statement_timeout_s=60.0, connect_timeout_s=10.0)

log = logging.getLogger("tops.replication")


class Guarding:
    """One replica's guard. `warning` names direct writes and what keeps the guard off a table; `writes` counts them."""

    def __init__(self, config: ReplicaSetConfig, replica: str, dsn: str, admin_dsn: str, agent: str) -> None:
        """`admin_dsn` is who may change tables, `agent` the login that the guard lets through."""
        self._config, self._replica, self._dsn, self._agent = config, replica, admin_dsn, agent
        self._endpoint = ReplicaEndpoint(replica, dsn)
        self._guard = Guard(config.direct_writes)
        self._connection: Connection | None = None
        self._problem = ""
        self._noted: Sequence[asyncpg.Record] = ()

    @property
    def writes(self) -> int:
        return sum(row["writes"] for row in self._noted)

    @property
    def warning(self) -> str:
        told = [
            f"{row['table_name']}: {row['writes']:,} by {row['login']} ({row['application'] or 'unnamed'}), "
            f"last at {row['last_at']:%Y-%m-%d %H:%M:%S}"
            for row in self._noted[:SHOWN_MAX]
        ]
        more = f"; and {len(self._noted) - SHOWN_MAX} more tables" if len(self._noted) > SHOWN_MAX else ""
        direct = f"direct writes past replication: {'; '.join(told)}{more}" if told else ""
        return "; ".join(filter(None, [direct, self._problem]))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Guard what is not guarded, and see what was noted; what fails is told, and tried again at the next look."""
        try:
            connection = await self._connected()
            await guard_triggers.install(
                connection, self._config.name, await self._tables(connection), self._guard, self._agent
            )
            if self._guard is Guard.NOTE:
                await self._notice(await guard_triggers.noted(connection, self._config.name))
            self._problem = ""
        except (TopsError, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            self._problem = f"the guard against direct writes can't be looked after: {error}"

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close(timeout=2)

    async def _notice(self, noted: Sequence[asyncpg.Record]) -> None:
        before, self._noted = self.writes, noted
        if self.writes > before:
            log.error("direct writes past replication", extra={"replica": self._replica, "reason": self.warning})

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._dsn, f"replica {self._replica}", "tops-guard", _OPTIONS)
        return self._connection

    async def _tables(self, connection: Connection) -> list[str]:
        tables = self._config.tables
        names = await catalog.tables_of(self._endpoint) if tables == "*" else tables
        sql = "select name from unnest($1::text[]) as name where to_regclass(name) is not null"
        return [row["name"] for row in await connection.fetch(sql, [sql_name(name) for name in names])]
