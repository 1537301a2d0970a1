"""A real replica set, and a plain PostgreSQL beside it: what a case of the corpus does to both.

Three replicas have the same rows, and everything else is made different on purpose. Two plain databases execute the
same statements: what differs between those two is not determined by the statement (clocks, random values, the order of
rows), and everything else must be the same in the set.
"""

import asyncio
import itertools
import json
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import asyncpg

from adapters import EmbeddedPostgres
from adapters.changes import InvalidChange, Statement
from adapters.postgres.apply.reading import plain_rows
from adapters.postgres.apply.session import Options, connect
from adapters.postgres.apply.transactions import command_count
from replication import ReplicaSet
from replication.client.writes import WriteResult
from replication.model.values import pack_rows, unpack_rows
from replication.rpc.rejections import ChangeNotProved, WriteRejected
from tests.corpus.cases import Case, Feature
from tests.corpus.comparison import named, split, unlike
from tests.corpus.worlds import NAMES, READING, SETTINGS, Contents, contents_of, first_difference, make_different
from tests.integration.origin.policies import POLICIES
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.logins import logins_in
from tops.model.errors import TopsError, error_code

# Why a set does not execute what PostgreSQL would; the first that is found in the error's text.
REASONS = {
    "not-a-row-statement": r"a replicated statement is INSERT",
    "rule": r"has a rule with which PostgreSQL carries out no row change",
    "several": r"one statement at a time",
    "parameters": r"the statement takes \d+ parameter",
    "session-function": r"acts on the session or server|permission denied for function",
    "own-schema": r"agents' memory|permission denied for (table|schema) (tops|position)",
    "truncate": r"use DELETE FROM",
    "definition": r"changes the catalogue|permission denied for schema public",
    "lock": r"takes a lock on",
    "no-key": r"has no primary key",
    "outside": r"no table of the replica set",
    "unfit": r"which (has row security|is not logged|is inherited from|inherits|has a (key )?column)|also fires where",
    "not-captured": r"changed without being captured",
    "claim": r"have other values when they are computed again",
    "driver": r"driver does not understand|the statement returns",
}
_OPTIONS = Options(lock_timeout_s=5.0, statement_timeout_s=20.0, connect_timeout_s=10.0)
_START_S = 60.0
_EQUAL_S = 15.0
_LOOK_S = 0.02
# Databases are used again, and a cast belongs to no schema.
_DROP_CASTS = """
do $$ declare one record; begin
    for one in select castsource::regtype as source, casttarget::regtype as target from pg_cast where oid >= 16384 loop
        execute format('drop cast (%s as %s)', one.source, one.target);
    end loop;
end $$"""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Result:
    """What a case did: in the corpus's words, with counts, returned rows and the text of an error; `message` is what
    PostgreSQL itself has said."""

    described: str
    rows: tuple[int, ...] = ()
    returned: tuple[tuple[dict[str, Any], ...], ...] = ()
    text: str = ""
    message: str = ""

    @property
    def is_executed(self) -> bool:
        return self.described == "executed"


class CorpusSet:
    """`async with CorpusSet(server, folder, policy, feature)`; `run` executes a case, and says what is wrong."""

    def __init__(self, server: EmbeddedPostgres, folder: Path, policy: str, feature: Feature) -> None:
        self._server, self._folder, self._policy, self._feature = server, folder, policy, feature
        self._open = AsyncExitStack()
        self.cluster: SmallCluster
        self.shop: ReplicaSet
        self.readers: list[asyncpg.Connection] = []
        self._plain: list[Plain] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            keys, schema = POLICIES[self._policy], self._feature.schema
            self.cluster = await stack.enter_async_context(
                small_cluster(self._server, self._folder, keys, schema=schema, running=False)
            )
            stack.push_async_callback(self._forget_settings)
            maintenance = await asyncpg.connect(self._server.dsn)
            stack.push_async_callback(maintenance.close)
            for place, name in enumerate(NAMES):
                database = self.cluster.databases[name]
                reader = await asyncpg.connect(self._server.dsn_for(database), server_settings=READING)
                stack.push_async_callback(reader.close)
                await make_different(reader, place)
                await reader.execute("reset session_replication_role")
                self.readers.append(reader)
                for key, value in SETTINGS[name].items():
                    await maintenance.execute(f"alter database {database} set {key} = {value}")
            for place in range(2):
                self._plain.append(await stack.enter_async_context(Plain(self._server, schema, place)))
            await self._start()
            self.shop = await stack.enter_async_context(self.cluster.connect(prefer="r1"))
            await self.shop.wait_in_sync()
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def _start(self) -> None:
        try:
            await asyncio.wait_for(self.cluster.start(*NAMES), _START_S)
        except TimeoutError:
            reasons = {name: agent.not_started for name, agent in self.cluster.agents.items()}
            raise AssertionError(f"{self._feature.name} does not start under {self._policy}: {reasons}") from None

    async def _forget_settings(self) -> None:
        maintenance = await asyncpg.connect(self._server.dsn)
        for database in self.cluster.databases.values():
            await maintenance.execute(f"alter database {database} reset all")
            connection = await asyncpg.connect(self._server.dsn_for(database))
            await connection.execute(f"drop schema if exists other cascade; {_DROP_CASTS}")
            await connection.close()
        await maintenance.close()

    async def restart(self, replica: str) -> None:
        """The agent of a replica begins again; its set is in sync afterwards."""
        await self.shop.wait_in_sync()
        await self.cluster.stop(replica)
        await self.cluster.start(replica)
        await self.shop.wait_in_sync()

    async def run(self, case: Case) -> tuple[Result, str]:
        """What the case did in the set, and what is wrong with that; empty if replicas are equal, and if plain
        PostgreSQL did the same or the set has rejected it with a reason."""
        result = await self._write(case)
        contents = await self._equal_contents()
        if isinstance(contents, str):
            return result, f"replicas differ: {contents}"
        if result.described.startswith("rejected") or not all(isinstance(one, Statement) for one in case.changes):
            await self._hand_over(contents)
            return result, ""
        plain = [await one.run(case, keep=result.is_executed) for one in self._plain]
        problem = await self._against_plain(case, result, contents, plain)
        await self._hand_over(contents)
        return result, problem

    async def _hand_over(self, contents: Contents) -> None:
        for plain in self._plain:
            await plain.take_over(self.readers[0], contents)

    async def difference(self) -> str:
        """Between replicas; empty if they are equal."""
        found = await self._equal_contents()
        return found if isinstance(found, str) else ""

    async def _write(self, case: Case) -> Result:
        try:
            if case.is_transaction:
                async with self.shop.transaction() as tx:
                    for change in case.changes:
                        assert isinstance(change, Statement)
                        await tx.execute(change.sql, *change.args)
                assert tx.result is not None
                done = tx.result
            else:
                done = await self.shop.write(case.changes)
        except TopsError as error:
            said = error.database if isinstance(error, WriteRejected) else None
            return Result(describe(error), text=str(error), message=said.message if said is not None else "")
        await self._reached(done)
        return Result("executed", done.rows, tuple(tuple(rows) for rows in done.returned))

    async def _reached(self, done: WriteResult) -> None:
        if done.position is not None:
            for agent in self.cluster.agents.values():
                await agent.participant.wait_for(done.position, _EQUAL_S)

    async def _equal_contents(self) -> Contents | str:
        """Of all replicas; the difference if they do not become equal."""
        deadline = asyncio.get_running_loop().time() + _EQUAL_S
        while True:
            found = await asyncio.gather(*map(contents_of, self.readers))
            difference = first_difference(found)
            if not difference:
                return found[0]
            if asyncio.get_running_loop().time() > deadline:
                return difference
            await asyncio.sleep(_LOOK_S)

    async def _against_plain(self, case: Case, result: Result, contents: Contents, plain: "list[Result]") -> str:
        if any(one.described != result.described for one in plain):
            if case.varies:
                return ""
            return f"plain PostgreSQL: {plain[0].described} {plain[0].text}, the set: {result.described} {result.text}"
        one, other = plain
        if result.message and one.message == other.message != result.message:
            return f"plain PostgreSQL says {one.message!r}, the set {result.message!r}"
        if not result.is_executed or case.varies:
            return ""
        if result.rows != one.rows and one.rows == other.rows:
            return f"plain PostgreSQL changes {one.rows} rows, the set {result.rows}"
        returned = [[row for rows in each.returned for row in rows] for each in (result, one, other)]
        if problem := unlike("returned rows", *map(named, returned)):
            return problem
        first, second = [await each.contents() for each in self._plain]
        for table, rows in contents.items():
            if problem := unlike(table, *map(split, (rows, first.get(table, []), second.get(table, [])))):
                return problem
        return ""


def describe(error: TopsError) -> str:
    """In the corpus's words: failed as the database failed, or rejected with a reason."""
    for reason, said in REASONS.items():
        if re.search(said, str(error)):
            return f"rejected {reason}"
    if isinstance(error, ChangeNotProved):
        return f"rejected {error.reason}"
    if isinstance(error, WriteRejected) and error.sqlstate:
        return f"failed {error.sqlstate}"
    if isinstance(error, InvalidChange) or (
        isinstance(error, WriteRejected) and error.why == error_code(InvalidChange.__name__)
    ):
        return "rejected invalid"
    return f"rejected {error.why}" if isinstance(error, WriteRejected) else f"broken {type(error).__name__}"


class Plain:
    """One database with the schema, no replication, and a client whose login may write its tables."""

    def __init__(self, server: EmbeddedPostgres, schema: str, place: int) -> None:
        self._server, self._schema, self._place = server, schema, place
        self._name = f"plain_{next(_numbers)}"
        self._connection: asyncpg.Connection
        self._reader: asyncpg.Connection

    async def __aenter__(self) -> Self:
        await self._maintain(f"create database {self._name}")
        dsn = self._server.dsn_for(self._name)
        self._reader = await asyncpg.connect(dsn, server_settings=READING)
        await self._reader.execute(self._schema)
        await make_different(self._reader, self._place, sequences=False)
        logins = await logins_in(self._server, self._name, harden=False)
        self._connection = await connect(logins.write, "plain PostgreSQL", "plain", _OPTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._reader.close()
        await self._connection.close()
        await self._maintain(f"drop database {self._name} with (force)")

    async def _maintain(self, sql: str) -> None:
        connection = await asyncpg.connect(self._server.dsn)
        await connection.execute(sql)
        await connection.close()

    async def contents(self) -> Contents:
        return await contents_of(self._reader)

    async def run(self, case: Case, *, keep: bool) -> Result:
        """Commit if `keep`, and roll back otherwise."""
        counts: list[int] = []
        returned: list[tuple[dict[str, Any], ...]] = []
        transaction = self._connection.transaction()
        await transaction.start()
        try:
            for change in case.changes:
                assert isinstance(change, Statement)
                count, rows = await self._execute(change)
                counts.append(count)
                returned.append(rows)
            await self._connection.execute("set constraints all immediate")
        except asyncpg.PostgresError as error:
            await transaction.rollback()
            return Result(f"failed {error.sqlstate}", text=str(error), message=error.args[0])
        await (transaction.commit() if keep else transaction.rollback())
        return Result("executed", tuple(counts), tuple(returned))

    async def _execute(self, statement: Statement) -> tuple[int, tuple[dict[str, Any], ...]]:
        sql = statement.sql
        if statement.args:
            name = f"case_{next(_numbers)}"
            await self._connection.execute(f"prepare {name} as {sql}")
            sql = f"execute {name}({', '.join(map(_literal, statement.args))})"
        prepared = await self._connection.prepare(sql)
        records = await prepared.fetch()
        rows = tuple(unpack_rows(pack_rows(plain_rows(records))))
        return command_count(prepared.get_statusmsg() or ""), rows

    async def take_over(self, source: asyncpg.Connection, contents: Contents) -> None:
        """The rows and sequences of the set, wherever they differ: the next case begins with the same ones. An origin
        advances sequences also for what is rejected then."""
        for row in await source.fetch(_SEQUENCES):
            await self._reader.execute(f"select setval('{row['name']}', {row['value']})")
        mine = await self.contents()
        differing = [table for table in contents if mine.get(table, []) != contents[table]]
        if not differing:
            return
        await self._reader.execute("begin; set local session_replication_role = replica")
        for table in differing:
            columns = [row["name"] for row in await source.fetch(_WRITTEN, table)]
            names = ", ".join(columns)
            rows = await source.fetch(f"select {', '.join(f'{name}::text' for name in columns)} from only {table}")
            await self._reader.execute(f"delete from only {table}")
            values = [f"({', '.join(map(_literal, row))})" for row in rows]
            if values:
                override = "overriding system value"
                await self._reader.execute(f"insert into {table} ({names}) {override} values {', '.join(values)}")
        await self._reader.execute("commit")


_SEQUENCES = """
select format('%I.%I', schemaname, sequencename) as name, last_value as value from pg_sequences
 where last_value is not null and schemaname <> 'tops'
"""
_WRITTEN = """
select quote_ident(attname) as name from pg_attribute
 where attrelid = $1::text::regclass and attnum > 0 and not attisdropped and attgenerated = '' order by attnum
"""


def _literal(value: Any) -> str:
    """A value as an untyped constant: the place where it stands gives it its type."""
    if value is None:
        return "null"
    if isinstance(value, list):
        value = "{" + ",".join("NULL" if one is None else json.dumps(one) for one in value) + "}"
    text = json.dumps(value) if isinstance(value, (dict, bool)) else str(value)
    return "'" + text.replace("'", "''") + "'"
