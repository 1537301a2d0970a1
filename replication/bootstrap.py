"""A new replica gets a consistent copy of the data from another one, and goes on from that copy's position.

The copy is one snapshot of the source and one transaction at the target: it is there as a whole, with its position,
or not at all. Chunks travel as answers to questions, at the target's pace, while writes go on everywhere.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from adapters import PostgresAdapter
from adapters.postgres.copying import Loader, copy_out
from adapters.postgres.scripts import run_script, user_tables
from replication.calls import CopyChunk, CopyWanted, Located, Where
from replication.conflicts.tables import BEGAN
from replication.conversation import Caller
from tops.errors import NotReachable, TopsError

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
    tables = agent.config.tables
    names = await user_tables(agent.database.dsn) if tables == "*" else tables
    async with resource.snapshot() as snapshot:
        for table in [*names, *OWN_TABLES]:
            yield CopyChunk(table=table)
            async for data in copy_out(snapshot, table):
                yield CopyChunk(table=table, data=data)
        yield CopyChunk(table=None, point=snapshot.point)


async def copy_if_new(agent: "Agent") -> None:
    """Give a replica that was not there when the log began a copy of another one's data.

    The log alone would not do: the others may have begun with rows that were never written through it.
    """
    if agent.database.is_sqlite or (await agent.resource.applied()).prefix > 0:
        return
    told = await agent.site.ask_log(agent.log_type, timeout_s=30.0)
    if told.decided == 0:  # a set that begins: everyone starts from the data that is there
        await run_script(
            agent.database.dsn, f"insert into {BEGAN} values ('{agent.config.name}') on conflict do nothing"
        )
        return
    began = await agent.resource.read(f"select from {BEGAN} where replica_set = $1", (agent.config.name,))
    if began.rows and told.oldest <= 1:
        return
    caller = Caller(agent.site, agent.config.name, agent.site.brokers)
    await caller.start()
    for source in await _sources(agent, caller):
        try:
            await _copy_from(agent, caller, source)
        except TopsError as error:
            log.warning("a copy failed and left nothing", extra={"source": source, "reason": str(error)})
        else:
            return
    raise NotReachable(
        f"replica {agent.replica.name!r} is new, and no other replica could give it a copy: start another one first"
    )


async def _sources(agent: "Agent", caller: Caller) -> list[str]:
    """Other replicas with something to copy, the furthest first."""
    for _ in range(SOURCE_TRIES):
        answers = await caller.ask_all(Where(), ASK_S, len(agent.config.replica) - 1)
        found = [a for a in answers if isinstance(a, Located) and a.position > 0]
        if found:
            return [agent.config.site_of(a.replica) for a in sorted(found, key=lambda a: -a.position)]
        await asyncio.sleep(ASK_S / 4)
    return []


async def _copy_from(agent: "Agent", caller: Caller, source: str) -> None:
    copy = f"{agent.name}-{secrets.token_hex(6)}"
    log.info("copy begins", extra={"replica": agent.name, "source": source})
    async with Loader(agent.database.dsn, agent.config.name) as loader:
        number, total = 0, 0
        while True:
            chunk = await caller.ask(source, CopyWanted(copy=copy, number=number), CHUNK_S)
            assert isinstance(chunk, CopyChunk)
            if chunk.table is None:
                await loader.finish(chunk.point)
                break
            await loader.load(chunk.table, chunk.data)
            number, total = number + 1, total + len(chunk.data)
    await agent.resource.close()
    await agent.resource.start()
    log.info("copy complete", extra={"replica": agent.name, "bytes": total, "position": chunk.point.index})
