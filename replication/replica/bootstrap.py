"""A new replica gets a consistent copy of another one's schema, rows and sequences, and goes on from its position.

The copy is one snapshot of the source, loaded piece by piece and side by side. Every piece is a transaction that
records itself: a target that is killed goes on with the pieces that are missing, as long as the source holds the
snapshot, or its rows have not changed. Rows come between the two halves of the schema, so that indexes are built once.
Direct writes are rejected from the first piece on. A seed is the same before the set has started.
"""

import asyncio
import hashlib
import logging
import secrets
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import asyncpg

from adapters.postgres.access import guard_triggers
from adapters.postgres.access.guard_triggers import Guard
from adapters.postgres.access.privileges import missing_for_schema
from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.copy import copying
from adapters.postgres.copy.copying import Piece
from adapters.postgres.copy.schema_dump import makes_schemas, missing_objects, set_sequences
from adapters.postgres.copy.scripts import filled_tables, missing_tables, run_own_script, user_tables
from adapters.postgres.sql.logins import user_of
from replication.replica.copies import OWN_TABLES, set_tables
from replication.replica.start import copy_record
from replication.replica.start.copy_record import CopyRecord
from replication.replica.start.decisions import TakeCopy
from replication.replica.start.fingerprint import Progress
from replication.rpc.calls import (
    CloseCopy,
    CopyChunk,
    GetCopyChunk,
    GetSchema,
    Located,
    OpenCopy,
    SchemaDumped,
    Where,
)
from replication.rpc.conversation import Caller
from tops.model.errors import NotReachable, ResourceError, TopsError

if TYPE_CHECKING:
    from replication.replica.agent import Agent

REQUEST_S = 2.0
SOURCE_TRIES = 15
CHUNK_S = 60.0
WORKERS = 4  # pieces that are under way at the same time
TELL_S = 10.0  # between two reports of a copy in the log
INDEX_MEMORY_KB = 256 * 1024
_OPTIONS = Options(lock_timeout_s=30.0, statement_timeout_s=24 * 3600.0, connect_timeout_s=10.0)
_INDEX_MEMORY = "select setting::int from pg_settings where name = 'maintenance_work_mem'"
_LACKING = "select exists (select from unnest($1::text[]) as name where to_regclass(name) is null)"
_VIEWS = """
select c.oid::regclass::text as name, pg_has_role(c.relowner, 'usage') as is_ours from pg_class c
 where c.relkind = 'm' order by c.oid
"""

log = logging.getLogger("tops.replication")


class Newcomer:
    """The target's side: takes what a replica begins with from another one. `progress` tells how far that is."""

    def __init__(self, agent: "Agent", *, overwrite: bool) -> None:
        self._agent, self._overwrite = agent, overwrite
        self._set = agent.config.name
        self.progress: Progress | None = None
        self.source = ""

    async def may_replace(self) -> bool:
        """Whether a copy takes nothing away: no table of the set holds a row here, or the operator wants it so."""
        return self._overwrite or not await self._filled()

    async def is_unfinished(self) -> bool:
        """Whether a copy has begun here and not ended."""
        return await self._known() is not None

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

    # ------------------------------------------------------------------------------------------------- what is known

    async def _filled(self) -> list[str]:
        return await filled_tables(self._agent.database.admin_dsn, await set_tables(self._agent))

    async def _known(self) -> CopyRecord | None:
        async with self._admin() as connection:
            return await copy_record.load(connection, self._set)

    async def _check_replaceable(self, replaceable: bool) -> None:
        may = replaceable or self._overwrite or await self.is_unfinished()
        filled = [] if may else await self._filled()
        if filled:
            name = f"{self._set}/{self._agent.replica.name}"
            raise ResourceError(
                f"replica {self._agent.replica.name}",
                f"table {filled[0]} holds rows that are no copy of this set, and a copy would replace them: "
                f"empty it, or run `tops replica run --name {name} --overwrite`",
            )

    async def _caller(self) -> Caller:
        agent = self._agent
        caller = Caller(agent.site, self._set, agent.site.brokers)
        await caller.start()
        return caller

    async def _sources(self, caller: Caller) -> list[str]:
        """Other replicas that take part in the set: the one of which some is here first, then by position."""
        known = await self._known()
        begun = known.source if known is not None else ""
        for _ in range(SOURCE_TRIES):
            responses = await caller.request_all(Where(), REQUEST_S, len(self._agent.config.replica) - 1)
            found = [a for a in responses if isinstance(a, Located)]
            if found:
                return [a.replica for a in sorted(found, key=lambda a: (a.replica != begun, -a.position))]
            await asyncio.sleep(REQUEST_S / 4)
        return []

    # ---------------------------------------------------------------------------------------------------------- a copy

    async def _copy_from(self, caller: Caller, source: str, state: str, *, seeded: bool) -> None:
        agent, site = self._agent, self._agent.config.site_of(source)
        self.progress, self.source = Progress(), source
        telling = asyncio.ensure_future(self._tell())
        try:
            known = await self._known()
            record = await self._go_on(caller, site, known) if known is not None and known.source == source else None
            if record is None:
                record = await self._begin(caller, site, source, known)
            await self._load(caller, site, record)
            await self._close(caller, site, record.copy)
            self.progress.stage = "all rows are copied, indexes and constraints are being made"
            await self._finish(record, state, seeded=seeded)
        except TopsError as error:
            log.warning("a copy was interrupted", extra={"source": source, "reason": str(error)})
            raise
        finally:
            telling.cancel()
            progress, self.progress = self.progress, None
        await agent.database.set_up()  # with the rights to new tables
        await agent.resource.close()
        await agent.resource.start()
        figures = {"rows": progress.rows, "position": record.opened.point.index}
        if progress.bytes:  # none if all rows were there from an earlier try
            figures["bytes"] = progress.bytes
        log.info("copy complete", extra={"replica": agent.replica.name, "source": source, **figures})

    @staticmethod
    async def _close(caller: Caller, site: str, copy: str) -> None:
        with suppress(TopsError):  # else its source closes it after a while
            await caller.request(site, CloseCopy(copy=copy), REQUEST_S)

    async def _tell(self) -> None:
        """Report a long copy now and then."""
        while True:
            await asyncio.sleep(TELL_S)
            if self.progress is not None and (text := self.progress.text("copied")):
                left = self.progress.left_s
                figures = {
                    "rows": self.progress.rows,
                    "bytes": self.progress.bytes,
                    "rows_per_s": round(self.progress.rows_per_s),
                    "left_s": round(left) if left is not None else None,
                }
                log.info(f"copying: {text}", extra={"replica": self._agent.replica.name, **figures})

    async def _go_on(self, caller: Caller, site: str, known: CopyRecord) -> CopyRecord | None:
        """What is here of a copy, if it can be completed: None if the source's rows may have changed since."""
        if not known.missing:
            return known
        opened = await caller.request(site, OpenCopy(copy=known.copy, target=self._agent.name), CHUNK_S)
        extra = {"replica": self._agent.replica.name, "source": known.source}
        if opened.snapshot == known.opened.snapshot:
            log.info("copy goes on", extra={**extra, "pieces": len(known.missing)})
            return known
        if not opened.data or opened.data != known.opened.data:
            return None
        record = known.gone_on_with(opened, known.whole_relations())
        async with self._admin() as connection, connection.transaction():
            if await connection.fetchval(_LACKING, [piece.relation for piece in known.pieces]):
                return None  # some rows went to a table instead of its partition
            await self._empty(connection, record, sorted({piece.relation for _, piece in record.missing}))
            await copy_record.store(connection, self._set, record)
        log.info("copy goes on with the tables that are not complete", extra={**extra, "pieces": len(record.missing)})
        return record

    async def _begin(self, caller: Caller, site: str, source: str, known: CopyRecord | None) -> CopyRecord:
        """The schema, empty tables, and the record of the copy, in one transaction."""
        agent = self._agent
        schema = await self._schema(caller, site, known)
        copy = f"{agent.name}-{secrets.token_hex(6)}"
        log.info("copy begins", extra={"replica": agent.replica.name, "source": source})
        await run_own_script(agent.database.admin_dsn, copy_record.DDL)
        try:
            async with self._admin() as connection:
                if schema is not None:
                    await self._check_server(connection, schema)
                opened = await caller.request(site, OpenCopy(copy=copy, target=agent.name), CHUNK_S)
                digest = _digest(schema) if schema is not None else ""
                record = CopyRecord(copy, source, opened, digest, schema.post_data if schema is not None else None)
                async with connection.transaction():
                    if schema is not None and (known is None or not known.schema_digest):
                        await self._execute(connection, zlib.decompress(schema.pre_data).decode())
                    await self._empty(connection, record, [*{p.root for p in record.pieces}, *OWN_TABLES])
                    await copy_record.store(connection, self._set, record)
        except TopsError:
            await self._close(caller, site, copy)  # nothing is recorded: it is not gone on with
            raise
        await agent.database.set_up()  # the agent's login loads the rows
        return record

    async def _empty(self, connection: Connection, record: CopyRecord, relations: list[str]) -> None:
        """Take out what was there, and let nothing in but the copy from now on."""
        sql = "select name from unnest($1::text[]) as name where to_regclass(name) is not null"
        users = [p.root for p in record.pieces if not p.root.startswith("tops.")]
        tables = [row["name"] for row in await connection.fetch(sql, sorted(set(users)))]
        agent = user_of(self._agent.database.logins.agent)
        await guard_triggers.install(connection, self._set, tables, Guard.NONE, agent)
        await copying.empty(connection, relations)
        await guard_triggers.install(connection, self._set, tables, Guard.REJECT, agent)

    async def _schema(self, caller: Caller, source: str, known: CopyRecord | None) -> SchemaDumped | None:
        """The source's, for a database that has none of the set's tables; one that has some keeps them."""
        tables, dsn = self._agent.config.tables, self._agent.database.admin_dsn
        is_copied = known is not None and bool(known.schema_digest)
        if not is_copied:
            missing = await missing_tables(dsn, tables) if tables != "*" else []
            if (tables != "*" and len(missing) < len(tables)) or (tables == "*" and await user_tables(dsn)):
                if missing:
                    raise ResourceError(
                        f"replica {self._agent.replica.name}",
                        f"table {missing[0]} is missing and others exist: create it, or drop the others",
                    )
                return None
        dumped = await caller.request(source, GetSchema(), CHUNK_S)
        if known is not None and is_copied and known.schema_digest != _digest(dumped):
            raise ResourceError(
                f"replica {self._agent.replica.name}",
                f"the schema of {dumped.replica} has changed since the copy began: empty this database "
                "(drop its tables, types and functions), then the copy begins again",
            )
        return dumped

    async def _check_server(self, connection: Connection, schema: SchemaDumped) -> None:
        lacking = await missing_objects(connection, schema.extensions, schema.roles)
        if lacking:
            raise ResourceError(
                f"replica {self._agent.replica.name}",
                f"its server lacks what the schema of {schema.replica} needs: {', '.join(lacking)}; "
                "install or create it, then the copy is taken",
            )
        pre_data = zlib.decompress(schema.pre_data).decode()
        schemas = await makes_schemas(connection, pre_data, schema.extensions)
        missing = await missing_for_schema(connection, schemas=schemas, in_public=" public." in pre_data)
        if missing:
            raise ResourceError(
                f"replica {self._agent.replica.name}",
                f"{' and '.join(right.text for right in missing)}, which the schema of {schema.replica} needs: "
                f"run `{'; '.join(right.grant for right in missing)}` there as a superuser ({self._grants}), "
                "then the copy is taken",
            )

    # ------------------------------------------------------------------------------------------------------------ rows

    async def _load(self, caller: Caller, site: str, record: CopyRecord) -> None:
        """The pieces that are missing, the largest tables first."""
        sizes: dict[str, int] = {}
        for piece in record.pieces:
            sizes[piece.relation] = sizes.get(piece.relation, 0) + piece.bytes
        there = sum(record.finished.values())
        todo = sorted(record.missing, key=lambda work: (-sizes[work[1].relation], work[1].relation, work[1].number))
        self.progress = progress = Progress(there, there + sum(piece.rows for _, piece in todo))

        async def work() -> None:
            async with copying.loading(self._agent.database.dsn) as connection:
                while todo:
                    number, piece = todo.pop(0)
                    async with connection.transaction():
                        await self._load_piece(connection, self._chunks(caller, site, record.copy, number), piece)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(WORKERS, len(todo))):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise _first(failed) from failed
        progress.total = progress.rows

    async def _load_piece(self, connection: Connection, chunks: AsyncIterator[bytes], piece: Piece) -> None:
        progress, guessed = self.progress, 0
        assert progress is not None

        async def counted() -> AsyncIterator[bytes]:
            nonlocal guessed
            received = 0
            async for data in chunks:
                received += len(data)
                progress.bytes += len(data)
                # Rows are not looked into: how many came is known at the end of the piece.
                now = min(piece.rows, piece.rows * received // max(piece.bytes, 1))
                progress.rows, guessed = progress.rows + now - guessed, now
                yield data

        rows = await copying.load(connection, piece, counted())
        await copy_record.finished(connection, self._set, piece.relation, piece.number, rows)
        progress.rows += rows - guessed
        progress.total = max(progress.total + rows - piece.rows, progress.rows)

    async def _chunks(self, caller: Caller, site: str, copy: str, piece: int) -> AsyncIterator[bytes]:
        """A piece's rows; the next ones are asked for while these are written."""
        number, ahead = 0, self._request(caller, site, copy, piece, 0)
        try:
            while not (chunk := await ahead).is_last:
                number += 1
                ahead = self._request(caller, site, copy, piece, number)
                yield chunk.data
        finally:
            ahead.cancel()

    @staticmethod
    def _request(caller: Caller, site: str, copy: str, piece: int, number: int) -> "asyncio.Task[CopyChunk]":
        async def request() -> CopyChunk:
            return await caller.request(site, GetCopyChunk(copy=copy, piece=piece, number=number), CHUNK_S)

        return asyncio.ensure_future(request())

    # ---------------------------------------------------------------------------------------------------------- the end

    async def _finish(self, record: CopyRecord, state: str, *, seeded: bool) -> None:
        """What comes after the rows, and the position: with this transaction the copy counts."""
        point = record.opened.point
        async with self._admin() as connection, connection.transaction():
            if record.post_data is not None:
                memory = await connection.fetchval(_INDEX_MEMORY)
                await connection.execute(f"set local maintenance_work_mem = {max(memory, INDEX_MEMORY_KB)}")
                await self._execute(connection, zlib.decompress(record.post_data).decode())
                if grants := self._agent.database.grants_on_new_tables():
                    await self._execute(connection, grants)
            await self._refresh_views(connection)
            await set_sequences(connection, record.opened.sequences)
            await copy_record.set_start(connection, self._set, state, seeded=seeded)
            await connection.execute(
                "insert into tops.position (replica_set, prefix, history, digest) values ($1, $2, $3, $4) "
                "on conflict (replica_set) do update "
                "set prefix = excluded.prefix, history = excluded.history, digest = excluded.digest",
                self._set,
                point.index,
                point.history,
                point.digest,
            )
            await connection.execute("delete from tops.applied where replica_set = $1", self._set)
            await copy_record.forget(connection, self._set)

    async def _refresh_views(self, connection: Connection) -> None:
        """Materialized views show the rows of the copy, where the login may refresh them."""
        for view in await connection.fetch(_VIEWS):
            if view["is_ours"]:
                await self._execute(connection, f"refresh materialized view {view['name']}")
            else:
                extra = {"replica": self._agent.replica.name, "view": view["name"]}
                log.warning("a materialized view is its owner's to refresh after the copy", extra=extra)

    @property
    def _grants(self) -> str:
        return f"`tops doctor {self._set} --print-grants` prints the grants that copies need"

    async def _execute(self, connection: Connection, script: str) -> None:
        try:
            await connection.execute(script)
        except asyncpg.PostgresConnectionError:
            raise
        except asyncpg.InsufficientPrivilegeError as error:
            text = f"it does not take the schema of the copy: {error}: give its agent that right ({self._grants})"
            raise ResourceError("the new replica", text) from error
        except asyncpg.PostgresError as error:
            raise ResourceError("the new replica", f"it does not take the schema of the copy: {error}") from error

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[Connection]:
        """A connection of whoever may change the schema; what breaks is tried again by the caller."""
        connection = await connect(self._agent.database.admin_dsn, "the new replica", "tops-copy", _OPTIONS)
        try:
            yield connection
        except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError) as error:
            raise NotReachable(f"the connection broke while a copy was taken: {error}") from error
        except asyncpg.PostgresError as error:
            raise ResourceError("the new replica", f"it does not take the copy: {error}") from error
        finally:
            connection.terminate()


def _digest(schema: SchemaDumped) -> str:
    return hashlib.blake2b(schema.pre_data + schema.post_data, digest_size=16).hexdigest()


def _first(failed: ExceptionGroup) -> Exception:
    """One reason is enough: what fails together has mostly one cause."""
    error = failed.exceptions[0]
    if isinstance(error, ExceptionGroup):
        return _first(error)
    if isinstance(error, OSError | asyncpg.PostgresConnectionError | asyncpg.InterfaceError):
        return NotReachable(f"the connection broke while a copy was loaded: {error}")
    if isinstance(error, asyncpg.PostgresError):
        return ResourceError("the new replica", f"it does not take the copy: {error}")
    return error
