"""A new replica gets a consistent copy of another one's schema, rows and sequences, and goes on from its position.

The copy is one snapshot of the source and one transaction at the target: it is there as a whole, with its position,
or not at all. Chunks travel as answers to questions, at the target's pace, while writes go on everywhere. Rows come
between the two halves of the schema, so that indexes are built once. A seed is the same before the set has started.
"""

import asyncio
import logging
import secrets
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from adapters import PostgresAdapter
from adapters.postgres.copying import Loader, copy_out
from adapters.postgres.literals import quote
from adapters.postgres.schema_dump import dump_schema, missing_extensions, sequence_values
from adapters.postgres.scripts import filled_tables, missing_tables, user_tables
from replication.calls import CopyChunk, CopyWanted, GetSchema, Located, SchemaDumped, Where
from replication.conversation import Caller
from replication.start.decisions import TakeCopy
from replication.start.fingerprint import Progress
from tops.errors import NotReachable, ResourceError, TopsError

if TYPE_CHECKING:
    from replication.agent import Agent

ASK_S = 2.0
SOURCE_TRIES = 15
CHUNK_S = 60.0
IDLE_MAX_S = 120.0
OWN_TABLES = (
    "tops.row_clocks",
    "tops.row_sums",
    "tops.write_sets",
    "tops.idempotency_keys",
    "tops.known_ids",
    "tops.logged_keys",
    "tops.row_versions",
    "tops.conflicts",
)
# About how many: a table that was never analysed counts as nothing.
_ROWS = """
select coalesce(sum(greatest(c.reltuples, 0)), 0)::int8 from pg_class c
 where c.oid in (select relid from unnest($1::text[]) as name, pg_partition_tree(to_regclass(name))
                 union select to_regclass(name) from unnest($1::text[]) as name)
"""

log = logging.getLogger("tops.replication")


class Copies:
    """The source's side: copies that are being handed out."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[AsyncGenerator[CopyChunk, None], int, CopyChunk | None]] = {}
        self._asked_at: dict[str, float] = {}

    async def chunk(self, agent: "Agent", copy: str, number: int) -> CopyChunk:
        """Chunk `number` of a copy; the one before it may be asked for again."""
        await self._drop_idle()
        if number == 0 and copy not in self._open:
            self._open[copy] = (_chunks(agent), -1, None)
        self._asked_at[copy] = time.monotonic()
        known = self._open.get(copy)
        if known is None:
            raise NotReachable(f"copy {copy} is not open here any more: begin a new one")
        chunks, last, chunk = known
        if number == last and chunk is not None:
            return chunk
        if number != last + 1:
            raise NotReachable(f"copy {copy} is at chunk {last}, not at {number}: begin a new one")
        chunk = await anext(chunks)
        self._open[copy] = (chunks, number, chunk)
        if chunk.table is None:
            await self._drop(copy)
        return chunk

    async def _drop_idle(self) -> None:
        """Whoever no longer asks must not keep a snapshot open for ever."""
        for copy, asked_at in list(self._asked_at.items()):
            if time.monotonic() - asked_at > IDLE_MAX_S:
                await self._drop(copy)

    async def _drop(self, copy: str) -> None:
        self._asked_at.pop(copy, None)
        known = self._open.pop(copy, None)
        if known is not None:
            await known[0].aclose()

    async def close(self) -> None:
        for copy in list(self._open):
            await self._drop(copy)


async def _chunks(agent: "Agent") -> AsyncGenerator[CopyChunk, None]:
    resource = agent.resource
    if not isinstance(resource, PostgresAdapter):
        raise NotReachable("only PostgreSQL replicas hand out copies")
    names = await _tables(agent)
    async with resource.snapshot() as snapshot:
        rows = await snapshot.connection.fetchval(_ROWS, names)
        for table in [*names, *OWN_TABLES]:
            yield CopyChunk(table=table, rows=rows)
            async for data in copy_out(snapshot, table):
                yield CopyChunk(table=table, data=data)
        sequences = await sequence_values(snapshot.connection)
        yield CopyChunk(table=None, point=snapshot.point, sequences=sequences)


async def _tables(agent: "Agent") -> Sequence[str]:
    tables = agent.config.tables
    return await user_tables(agent.database.dsn) if tables == "*" else tables


async def dumped(agent: "Agent") -> SchemaDumped:
    """The source's schema."""
    dump = await dump_schema(agent.database.admin_dsn)
    return SchemaDumped(
        replica=agent.replica.name,
        pre_data=zlib.compress(dump.pre_data.encode()),
        post_data=zlib.compress(dump.post_data.encode()),
        extensions=dump.extensions,
    )


class Newcomer:
    """The target's side: takes what a replica begins with from another one. `progress` tells how far that is."""

    def __init__(self, agent: "Agent", *, overwrite: bool) -> None:
        self._agent, self._overwrite = agent, overwrite
        self.progress: Progress | None = None
        self.source = ""

    async def may_replace(self) -> bool:
        """Whether a copy takes nothing away: no table of the set holds a row here, or the operator wants it so."""
        return self._overwrite or not await self._filled()

    async def take_copy(self, wanted: TakeCopy) -> None:
        """Give a replica that the set has begun without a copy of another one's data.

        The log alone would not do: the others may have begun with rows that were never written through it.
        """
        await self._check_replaceable(wanted.replaceable)
        caller = await self._caller()
        problems = []
        for source in await self._sources(caller):
            try:
                await self._copy_from(caller, source, "started", seeded=False)
            except TopsError as error:
                problems.append(f"{source}: {error}")
                log.warning("a copy failed and left nothing", extra={"source": source, "reason": str(error)})
            else:
                return
        raise NotReachable(
            f"replica {self._agent.replica.name!r} is new, and no other replica could give it a copy: "
            f"{'; '.join(problems) or 'start another one first'}"
        )

    async def take_seed(self, *, replaceable: bool) -> None:
        """Take schema and rows from the seed, before the set has started."""
        await self._check_replaceable(replaceable)
        await self._copy_from(await self._caller(), self._agent.config.seed or "", "new", seeded=True)

    async def _filled(self) -> list[str]:
        return await filled_tables(self._agent.database.admin_dsn, await _tables(self._agent))

    async def _check_replaceable(self, replaceable: bool) -> None:
        filled = [] if replaceable or self._overwrite else await self._filled()
        if filled:
            name = f"{self._agent.config.name}/{self._agent.replica.name}"
            raise ResourceError(
                f"replica {self._agent.replica.name}",
                f"table {filled[0]} holds rows that are no copy of this set, and a copy would replace them: "
                f"empty it, or run `tops replica run --name {name} --overwrite`",
            )

    async def _caller(self) -> Caller:
        agent = self._agent
        caller = Caller(agent.site, agent.config.name, agent.site.brokers)
        await caller.start()
        return caller

    async def _sources(self, caller: Caller) -> list[str]:
        """Other replicas that take part in the set, the furthest first."""
        for _ in range(SOURCE_TRIES):
            answers = await caller.ask_all(Where(), ASK_S, len(self._agent.config.replica) - 1)
            found = [a for a in answers if isinstance(a, Located)]
            if found:
                return [a.replica for a in sorted(found, key=lambda a: -a.position)]
            await asyncio.sleep(ASK_S / 4)
        return []

    async def _copy_from(self, caller: Caller, source: str, state: str, *, seeded: bool) -> None:
        agent, site = self._agent, self._agent.config.site_of(source)
        schema = await self._schema(caller, site)
        log.info("copy begins", extra={"replica": agent.replica.name, "source": source})
        self.progress, self.source = Progress(), source
        try:
            async with Loader(agent.database.admin_dsn, agent.config.name) as loader:
                if schema is not None:
                    await self._check_extensions(loader, schema)
                    await loader.execute(zlib.decompress(schema.pre_data).decode())
                last = await self._load(caller, site, loader)
                if schema is not None:
                    await loader.execute(zlib.decompress(schema.post_data).decode())
                await loader.set_sequences(last.sequences)
                await loader.execute(
                    f"insert into tops.start (replica_set, state, seeded) values ({quote(agent.config.name)}, "
                    f"{quote(state)}, {seeded}) on conflict (replica_set) do update set state = excluded.state, "
                    "attempt = '', basis = '', fingerprint = null, seeded = excluded.seeded"
                )
                await loader.finish(last.point)
        finally:
            self.progress = None
        await agent.database.set_up()  # with the rights to new tables
        await agent.resource.close()
        await agent.resource.start()
        log.info("copy complete", extra={"replica": agent.replica.name, "position": last.point.index})

    async def _schema(self, caller: Caller, source: str) -> SchemaDumped | None:
        """The source's, for a database that has none of the set's tables; one that has some keeps them."""
        tables, dsn = self._agent.config.tables, self._agent.database.admin_dsn
        missing = await missing_tables(dsn, tables) if tables != "*" else []
        if (tables != "*" and len(missing) < len(tables)) or (tables == "*" and await user_tables(dsn)):
            if missing:
                raise ResourceError(
                    f"replica {self._agent.replica.name}",
                    f"table {missing[0]} is missing and others exist: create it, or drop the others",
                )
            return None
        dumped = await caller.ask(source, GetSchema(), CHUNK_S)
        assert isinstance(dumped, SchemaDumped)
        return dumped

    async def _check_extensions(self, loader: Loader, schema: SchemaDumped) -> None:
        missing = await missing_extensions(loader.connection, schema.extensions)
        if missing:
            raise ResourceError(
                f"replica {self._agent.replica.name}",
                f"its server lacks the extension {', '.join(missing)}: install it, then the copy is taken",
            )

    async def _load(self, caller: Caller, source: str, loader: Loader) -> CopyChunk:
        """All tables; the chunk that ends the copy."""
        copy, number = f"{self._agent.name}-{secrets.token_hex(6)}", 0
        while True:
            chunk = await caller.ask(source, CopyWanted(copy=copy, number=number), CHUNK_S)
            assert isinstance(chunk, CopyChunk)
            if chunk.table is None:
                return chunk
            await loader.load(chunk.table, chunk.data)
            number += 1
            if self.progress is not None:
                self.progress.total = max(self.progress.total, chunk.rows)
                self.progress.rows += chunk.data.count(b"\n")
