"""Copies that a replica hands out: a snapshot of its tables, held for as long as somebody asks for pieces of it.

Chunks travel as responses to requests, at the target's pace, while writes go on everywhere. A target that was killed
finds its snapshot again if it comes back in time. A target has one copy at a time: a new one replaces the former.
"""

import asyncio
import logging
import secrets
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, assert_never

import msgspec

from adapters import PostgresAdapter
from adapters.postgres.copy.copying import PIECE_BYTES, Piece, copy_out, in_snapshot, pieces_of
from adapters.postgres.copy.schema_dump import dump_schema, sequence_values
from adapters.postgres.copy.scripts import user_tables
from adapters.postgres.sql.catalog import sql_name
from replication.rpc.calls import (
    CloseCopy,
    CopyChunk,
    CopyOpened,
    GetCopyChunk,
    GetSchema,
    OpenCopy,
    OperationDone,
    SchemaDumped,
)
from tops.model.errors import NotReachable

if TYPE_CHECKING:
    from replication.replica.agent import Agent

IDLE_MAX_S = 300.0  # a snapshot keeps the server from cleaning up: a target that no longer asks loses it
OPEN_MAX_S = 45.0  # less than a target waits for the response
COPIES_MAX = 16  # each is a connection, and one more for every piece that is being read
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


class _Stream:
    """One piece on its way. The last chunk can be had again: a response may be lost."""

    def __init__(self, chunks: AsyncGenerator[CopyChunk, None]) -> None:
        self._chunks = chunks
        self._turn = asyncio.Lock()
        self.number = -1
        self._last: CopyChunk | None = None

    @property
    def is_done(self) -> bool:
        return self._last is not None and self._last.is_last

    async def chunk(self, number: int) -> CopyChunk:
        async with self._turn:
            if number == self.number and self._last is not None:
                return self._last
            if number != self.number + 1:
                raise NotReachable(f"a piece of a copy is at chunk {self.number}, not at {number}: begin it again")
            self._last = await anext(self._chunks)
            self.number = number
            return self._last

    async def close(self) -> None:
        async with self._turn:
            await self._chunks.aclose()


class _Copy:
    """One snapshot and the pieces that are being read in it."""

    def __init__(
        self, target: str, dsn: str, stack: AsyncExitStack, exported: str, opened: CopyOpened, pieces: Sequence[Piece]
    ) -> None:
        self.target, self.opened = target, opened
        self._dsn, self._stack, self._exported, self._pieces = dsn, stack, exported, pieces
        self._streams: dict[int, _Stream] = {}
        self.asked_at = asyncio.get_running_loop().time()

    async def chunk(self, piece: int, number: int) -> CopyChunk:
        stream = self._streams.get(piece)
        if number == 0 and stream is not None and stream.number > 0:  # a target that was killed begins it again
            await self._end(piece)
            stream = None
        if stream is None:
            stream = self._streams[piece] = _Stream(self._chunks(self._pieces[piece]))
        chunk = await stream.chunk(number)
        if chunk.is_last:  # it can be asked for once more: only what was read before is let go
            for done in [other for other, found in self._streams.items() if other != piece and found.is_done]:
                await self._end(done)
        return chunk

    async def _chunks(self, piece: Piece) -> AsyncGenerator[CopyChunk, None]:
        async with in_snapshot(self._dsn, self._exported) as connection:
            async for data in copy_out(connection, piece):
                yield CopyChunk(data=data, is_last=False)
        yield CopyChunk(data=b"", is_last=True)

    async def _end(self, piece: int) -> None:
        await self._streams.pop(piece).close()

    async def close(self) -> None:
        for piece in list(self._streams):
            await self._end(piece)
        await self._stack.aclose()


class Copies:
    """The copies that one agent hands out."""

    def __init__(self, agent: "Agent", piece_bytes: int = PIECE_BYTES) -> None:
        self._agent, self.piece_bytes = agent, piece_bytes
        self._open: dict[str, _Copy] = {}
        self._opening = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def respond(
        self, request: OpenCopy | GetCopyChunk | CloseCopy | GetSchema
    ) -> CopyOpened | CopyChunk | SchemaDumped | OperationDone:
        match request:
            case GetSchema():
                return await self._schema()
            case OpenCopy(copy=copy, target=target):
                async with self._opening:
                    if copy not in self._open:
                        await self._open_new(copy, target)
                self._watch()
                return self._found(copy).opened
            case GetCopyChunk(copy=copy, piece=piece, number=number):
                return await self._found(copy).chunk(piece, number)
            case CloseCopy(copy=copy):
                await self._let_go([copy] if copy in self._open else [])
                return OperationDone(text=f"copy {copy} is closed")
        assert_never(request)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._let_go(list(self._open))

    def _found(self, copy: str) -> _Copy:
        found = self._open.get(copy)
        if found is None:
            raise NotReachable(f"copy {copy} is no longer open at replica {self._agent.replica.name}: it begins again")
        found.asked_at = asyncio.get_running_loop().time()
        return found

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._close_idle())

    async def _close_idle(self) -> None:
        while self._open:
            oldest = min(copy.asked_at for copy in self._open.values())
            await asyncio.sleep(max(0.0, oldest + IDLE_MAX_S - asyncio.get_running_loop().time()))
            limit = asyncio.get_running_loop().time() - IDLE_MAX_S
            idle = [name for name, copy in self._open.items() if copy.asked_at <= limit]
            for name in idle:
                log.warning("a copy that nobody asks for is closed", extra={"copy": name})
            await self._let_go(idle)

    async def _let_go(self, names: Sequence[str]) -> None:
        for copy in [self._open.pop(name) for name in names]:
            with suppress(Exception):  # a connection that is broken holds nothing either
                await copy.close()

    async def _open_new(self, name: str, target: str) -> None:
        await self._let_go([other for other, copy in self._open.items() if copy.target == target])
        replica = self._agent.replica.name
        if len(self._open) >= COPIES_MAX:
            raise NotReachable(
                f"replica {replica} gives {COPIES_MAX} copies already: try again when one has ended "
                f"(one that nobody asks for ends after {IDLE_MAX_S:g} s)"
            )
        try:
            async with asyncio.timeout(OPEN_MAX_S):
                self._open[name] = await self._opened(target)
        except TimeoutError:
            raise NotReachable(
                f"replica {replica} could not begin a copy within {OPEN_MAX_S:g} s: look for locks on its tables"
            ) from None

    async def _opened(self, target: str) -> _Copy:
        agent, resource = self._agent, self._agent.resource
        if not isinstance(resource, PostgresAdapter):
            raise NotReachable("only PostgreSQL replicas hand out copies")
        names = [sql_name(table) for table in await set_tables(agent)]
        async with AsyncExitStack() as stack:
            snapshot = await stack.enter_async_context(resource.snapshot(dedicated=True))
            exported = str(await snapshot.connection.fetchval("select pg_export_snapshot()"))
            pieces = await pieces_of(snapshot.connection, [*names, *OWN_TABLES], self.piece_bytes)
            opened = CopyOpened(
                replica=agent.replica.name,
                snapshot=secrets.token_hex(8),
                data=agent.starter.attempt if agent.starter is not None else "",
                pieces=msgspec.msgpack.encode(pieces),
                point=snapshot.point,
                sequences=await sequence_values(snapshot.connection),
            )
            return _Copy(target, agent.database.dsn, stack.pop_all(), exported, opened, pieces)

    async def _schema(self) -> SchemaDumped:
        dump = await dump_schema(self._agent.database.admin_dsn)
        return SchemaDumped(
            replica=self._agent.replica.name,
            pre_data=zlib.compress(dump.pre_data.encode()),
            post_data=zlib.compress(dump.post_data.encode()),
            extensions=dump.extensions,
            roles=dump.roles,
        )


async def set_tables(agent: "Agent") -> Sequence[str]:
    """The tables of an agent's set as its database has them; with a list, that list."""
    tables = agent.config.tables
    return await user_tables(agent.database.dsn) if tables == "*" else tables
