"""What an adapter remembers of its database between two calls, and how a call's failure is told.

The memory is a copy: it is loaded through the writing connection, and loaded again whenever that one is new.
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import asyncpg

from adapters.postgres.apply.global_ids import parse
from adapters.postgres.apply.progress import Progress
from adapters.postgres.apply.session import Connection, Session
from adapters.postgres.apply.statements import Statements
from adapters.postgres.sql.sqlstates import is_transient, sqlstate
from adapters.resource import Attempt, InDoubt
from tops.model.errors import ResourceError, ResourceRejected

T = TypeVar("T")
Work = Callable[[Connection, Statements], Coroutine[Any, Any, T]]

_OWN_PREPARED = """
select gid, extract(epoch from clock_timestamp() - prepared)::float8 as age_s
  from pg_prepared_xacts where database = current_database() and owner = current_user
"""


class Book:
    def __init__(self, session: Session, cluster: str, replica_set: str) -> None:
        self.session, self.cluster, self.replica_set = session, cluster, replica_set
        self.where = session.where
        self.progress = Progress(0, 0)
        self.prepared: set[Attempt] = set()
        self.at_ms = 0  # the latest time that an epoch or the log brought
        self.compacted_ms = 0  # its value when what was over was last forgotten
        self._loaded_through: Connection | None = None

    async def run(self, work: Work[T], what: str) -> T:
        """Work on the writing connection; the database's complaints leave as errors of ours."""

        async def prepared_work(connection: Connection, statements: Statements) -> T:
            if connection is not self._loaded_through:
                await self.load(connection)
            try:
                return await work(connection, statements)
            except BaseException:
                self._loaded_through = None  # whatever was done or not, the database knows better
                raise

        try:
            return await self.session.run(prepared_work, what)
        except asyncpg.PostgresError as error:
            problem = f"{what}: {getattr(error, 'message', None) or error} (SQLSTATE {sqlstate(error)})"
            if is_transient(error):
                raise ResourceRejected(self.where, problem) from error
            raise ResourceError(self.where, problem) from error

    async def load(self, connection: Connection) -> list[InDoubt]:
        self.progress = await Progress.load(connection, self.replica_set)
        doubts = []
        for row in await connection.fetch(_OWN_PREPARED):
            attempt = parse(row["gid"], self.cluster, self.replica_set)
            if attempt is not None:
                doubts.append(InDoubt(attempt, max(0.0, row["age_s"])))
        self.prepared = {doubt.attempt for doubt in doubts}
        self._loaded_through = connection
        return sorted(doubts, key=lambda doubt: doubt.attempt)
