"""Databases in which an origin executes: a schema, a login for writes."""

import itertools
from collections.abc import Mapping, Sequence

import asyncpg

from adapters import EmbeddedPostgres, Logins, PostgresAdapter
from adapters.changes import Change, Member, Row, Statement
from adapters.postgres.apply.session import Options
from adapters.postgres.copy.scripts import user_tables
from adapters.postgres.origin import Executed, Origin, Rejected
from adapters.resource import MemberVote
from tests.support.logins import logins_in
from tops.model.ids import TxId

_numbers = itertools.count(1)
OPTIONS = Options(lock_timeout_s=1.0, statement_timeout_s=10.0, connect_timeout_s=10.0)
Record = asyncpg.Record


class OriginDatabase:
    def __init__(self, server: EmbeddedPostgres, name: str) -> None:
        self._server, self.name = server, name
        self.dsn = server.dsn_for(name)  # the superuser's, for whoever goes past everything
        self.logins: Logins
        self.origin: Origin
        self.adapter: PostgresAdapter
        self._open: list[Origin | PostgresAdapter] = []

    @classmethod
    async def make(cls, server: EmbeddedPostgres) -> "OriginDatabase":
        database = cls(server, f"origin{next(_numbers)}")
        connection = await asyncpg.connect(server.dsn)
        try:
            await connection.execute(f'create database "{database.name}"')
        finally:
            await connection.close()
        return database

    async def set_up(self, schema: str) -> None:
        """Make the schema and the logins."""
        await self.sql(schema)
        self.logins = await logins_in(self._server, self.name)

    async def begin(self, schema: str = "") -> None:
        """Make the schema unless that is done, and be ready to execute and to apply."""
        if schema:
            await self.set_up(schema)
        self.adapter = PostgresAdapter(self.logins, cluster="test", replica_set="shop")
        self._open.append(self.adapter)
        await self.adapter.start()
        self.origin = await self.another_origin()

    async def another_origin(self, options: Options = OPTIONS) -> Origin:
        origin = Origin(self.logins.write, self.logins.agent, "the origin", await user_tables(self.dsn), options)
        self._open.append(origin)
        await origin.start()
        return origin

    async def sql(self, script: str) -> None:
        """Past everything."""
        connection = await asyncpg.connect(self.dsn)
        try:
            await connection.execute(script)
        finally:
            await connection.close()

    async def close(self) -> None:
        while self._open:
            await self._open.pop().close()

    async def execute(self, *changes: Change | str) -> Executed | Rejected:
        """One transaction, executed and rolled back."""
        (outcome,) = await self.execute_all(changes)
        return outcome

    async def execute_all(self, *requests: Sequence[Change | str]) -> list[Executed | Rejected]:
        """Transactions that came together."""
        left = [tuple(Statement(one) if isinstance(one, str) else one for one in request) for request in requests]
        outcomes: list[Executed | Rejected] = []
        while left:
            outcomes += await self.origin.execute(left)
            left = left[len(outcomes) - len(requests) :] if len(outcomes) < len(requests) else []
        return outcomes

    async def apply(self, tx: str, executed: Executed) -> MemberVote:
        """Commit the write set here, as a replica does."""
        (vote,) = await self.apply_all(tx, [executed])
        return vote

    async def apply_all(self, tx: str, executed: Sequence[Executed]) -> list[MemberVote]:
        """Commit write sets in one batch."""
        members = [
            Member(TxId(f"{tx}.{number}"), one.write_set.changes, origin="r1", sequences=one.write_set.sequences)
            for number, one in enumerate(executed)
        ]
        return await self.adapter.write_all_local(members)


async def rows_of(
    connection: "asyncpg.Connection[Record]", tables: Sequence[str], columns: Mapping[str, str] | None = None
) -> dict[str, list[Row]]:
    """Everything in the tables, or in some columns of them, in one order."""
    found = {}
    for table in tables:
        wanted = f"row({columns[table]})" if columns and table in columns else "t"
        rows = await connection.fetch(f"select {wanted}::text as row from {table} as t order by 1")
        found[table] = [dict(row) for row in rows]
    return found
