"""Three replicas with the same rows and everything else made different on purpose, and what a change does to them."""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

import asyncpg

from adapters import EmbeddedPostgres, Logins, PostgresAdapter
from adapters.changes import Change
from adapters.postgres.proof import MakeProver, Prover
from adapters.resource import Exclusion, MemberVote
from tests.contract.harness import attempt, epoch, member

NAMES = ("r1", "r2", "r3")
# What a DBA may have set for one database and not for another. The sessions of the adapter pin all that matters.
SETTINGS = {
    "r1": {},
    "r2": {
        "timezone": "'Asia/Tokyo'",
        "datestyle": "German",
        "intervalstyle": "sql_standard",
        "default_text_search_config": "'pg_catalog.german'",
        "array_nulls": "off",
        "extra_float_digits": "-10",
        "bytea_output": "escape",
        "search_path": "elsewhere, public",
        "enable_seqscan": "off",
        "xmloption": "document",
    },
    "r3": {
        "timezone": "'America/New_York'",
        "datestyle": "SQL, MDY",
        "transform_null_equals": "on",
        "session_replication_role": "replica",
        "lc_monetary": "'POSIX'",
        "standard_conforming_strings": "off",
        "default_transaction_isolation": "'repeatable read'",
        "enable_indexscan": "off",
        "enable_bitmapscan": "off",
        "synchronize_seqscans": "off",
        "quote_all_identifiers": "on",
    },
}
_COMPARED = {
    "timezone": "UTC",
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "quote_all_identifiers": "off",
}
READING = {**_COMPARED, "search_path": "public"}
_TABLES = """
select format('%I.%I', n.nspname, c.relname) as name, c.relkind::text as kind,
       (select quote_ident(a.attname) from pg_attribute a where a.attrelid = c.oid and a.attnum > 0
           and not a.attisdropped and a.attgenerated = '' and a.attidentity = ''
         order by a.attnum limit 1) as some_column,
       exists (select from pg_rewrite r where r.ev_class = c.oid) as has_rules
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'p') and c.relpersistence <> 't' and n.nspname !~ '^pg_'
   and n.nspname not in ('information_schema', 'tops') order by 1
"""
_SEQUENCES = "select format('%I.%I', schemaname, sequencename) from pg_sequences where schemaname <> 'tops'"
_numbers = itertools.count(1)


class World:
    """`async with World(server, schema)`; `run` carries a change out on all three and says what came of it."""

    def __init__(self, server: EmbeddedPostgres, schema: str, prover: MakeProver = Prover) -> None:
        self._server, self._schema, self._prover = server, schema, prover
        self._number = next(_numbers)
        self._index = 0
        self._open = AsyncExitStack()
        self._adapters: list[PostgresAdapter] = []
        self._readers: list[asyncpg.Connection] = []

    def _database(self, name: str) -> str:
        return f"world_{self._number}_{name}"

    async def __aenter__(self) -> Self:
        maintenance = await asyncpg.connect(self._server.dsn)
        for name in NAMES:
            await maintenance.execute(f"create database {self._database(name)}")
        for place, name in enumerate(NAMES):
            dsn = self._server.dsn_for(self._database(name))
            await self._make(dsn, place)
            for key, value in SETTINGS[name].items():
                await maintenance.execute(f"alter database {self._database(name)} set {key} = {value}")
            adapter = PostgresAdapter(
                Logins.alone(dsn), cluster=self._database(name), replica_set="s", name=name, prover=self._prover
            )
            self._adapters.append(await self._open.enter_async_context(adapter))
            self._readers.append(await asyncpg.connect(dsn, server_settings=READING))
        await maintenance.close()
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            await reader.close()
        for adapter in self._adapters:
            for doubt in await adapter.recover():
                await adapter.rollback(doubt.attempt)
        await self._open.aclose()
        maintenance = await asyncpg.connect(self._server.dsn)
        for name in NAMES:
            await maintenance.execute(f"drop database {self._database(name)} with (force)")
        await maintenance.close()

    async def _make(self, dsn: str, place: int) -> None:
        connection = await asyncpg.connect(dsn, server_settings=_COMPARED)
        try:
            await connection.execute(self._schema)
            await make_different(connection, place)
        finally:
            await connection.close()

    async def run(self, *changes: Change) -> "Outcome":
        """One transaction."""
        return (await self.run_together([changes]))[0]

    async def run_together(self, transactions: Sequence[Sequence[Change]]) -> "list[Outcome]":
        """All replicas prepare and commit the same epoch, with a member for each transaction."""
        self._index += 1
        members = [member(f"t{self._index}.{place}", *changes) for place, changes in enumerate(transactions)]
        work = epoch(self._index, *members)
        answers = await asyncio.gather(*(adapter.prepare(work) for adapter in self._adapters))
        await asyncio.gather(*(adapter.commit(attempt(self._index)) for adapter in self._adapters))
        return [Outcome(votes) for votes in zip(*(answer.votes for answer in answers), strict=True)]

    async def difference(self) -> str:
        """What is not equal on all replicas; empty if all is."""
        return first_difference(await asyncio.gather(*map(contents_of, self._readers)))


async def make_different(connection: asyncpg.Connection, place: int, *, sequences: bool = True) -> None:
    """The same rows, in another physical order, with sequences further on; the first replica stays as it is."""
    if place == 0:
        return
    await connection.execute("set session_replication_role = replica")
    for table in await connection.fetch(_TABLES):
        if table["kind"] != "r" or table["has_rules"] or table["some_column"] is None:
            continue
        # Every second or every third row moves to the end of the table.
        await connection.execute(
            f"update {table['name']} set {table['some_column']} = {table['some_column']} where ctid in (select "
            f"ctid from (select ctid, row_number() over () as n from {table['name']}) x where n % $1 = 0)",
            place + 1,
        )
        await connection.execute(f"vacuum {'full' if place == 2 else ''} {table['name']}")
    for sequence in await connection.fetch(_SEQUENCES) if sequences else ():
        await connection.execute(f"select nextval('{sequence[0]}') from generate_series(1, {place * 7})")


Contents = dict[str, list[str]]


def first_difference(contents: Sequence[Contents]) -> str:
    for name, other in zip(NAMES[1:], contents[1:], strict=True):
        for table in sorted(contents[0].keys() | other.keys()):
            here, there = contents[0].get(table, []), other.get(table, [])
            if here != there:
                only_here = [row for row in here if row not in there][:3]
                only_there = [row for row in there if row not in here][:3]
                return f"{table}: r1 has {only_here}, {name} has {only_there} ({len(here)}, {len(there)} rows)"
    return ""


class Outcome:
    """What the replicas said of one member."""

    def __init__(self, votes: Sequence[MemberVote]) -> None:
        self._votes = votes

    @property
    def is_executed(self) -> bool:
        return all(vote.excluded is None for vote in self._votes)

    @property
    def agree(self) -> bool:
        """All did the same, or none did anything. Of two errors in two rows, the first to be met may be either."""
        return all(vote.excluded is not None for vote in self._votes) or self.described == "executed"

    @property
    def described(self) -> str:
        """In the corpus's words; replicas that do not agree are told apart."""
        told = {_described(vote.excluded) for vote in self._votes}
        if len(told) > 1:
            return f"votes differ: {', '.join(sorted(told))}"
        rows = {vote.rows for vote in self._votes}
        returned = {str([sorted(map(str, some)) for some in vote.returned]) for vote in self._votes}
        return told.pop() if len(rows) == len(returned) == 1 else f"results differ: {rows} {returned}"


def _described(excluded: Exclusion | None) -> str:
    if excluded is None:
        return "executed"
    if excluded.proof:
        return f"rejected {excluded.proof}"
    return f"failed {excluded.sqlstate or excluded.why.value}"


async def contents_of(reader: asyncpg.Connection) -> Contents:
    """All rows as text, in the order of their bytes. A table may be gone in between: then it has none."""
    tables = [row["name"] for row in await reader.fetch(_TABLES)]
    queries = [
        f"select '{name}' as name, array(select whole_row::text from only {name} whole_row) as rows" for name in tables
    ]
    found = await reader.fetch(" union all ".join(queries)) if queries else []
    return {row["name"]: sorted(row["rows"]) for row in found}
