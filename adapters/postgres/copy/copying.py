"""A consistent copy of tables between two databases, piece by piece, in PostgreSQL's own formats.

A piece is a table, a partition, or some blocks of one: pieces are read side by side in one snapshot and written by
transactions of their own. Rows travel as they come out of COPY and are not looked into: in the binary format where both
databases understand the same bytes, as text otherwise.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

import asyncpg
import msgspec

from adapters.postgres.apply.session import Connection, Options, connect
from adapters.postgres.sql.literals import identifier, quote
from tops.model.errors import NotReachable, ResourceError

PIECE_BYTES = 16 * 2**20  # of a table's pages: each worker loses at most one piece of a copy that is interrupted
PIECES_MAX = 1000  # of one table
CHUNK_BYTES = 512 * 1024
_QUEUE_MAX = 4
_OPTIONS = Options(lock_timeout_s=30.0, statement_timeout_s=24 * 3600.0, connect_timeout_s=10.0)
# Tables by the names that changes give them, each with its partitions that hold rows, as far as they may be read. The
# binary format has the numbers of types in arrays and records, which are a database's own: types of users, but for
# enums and domains, travel as text; so do names of objects (regclass, ...) and types without a binary form.
_RELATIONS = """
with named as (
    select name, ordinality, to_regclass(name) as oid
      from unnest($1::text[]) with ordinality as names (name, ordinality)
), leaves as (
    select n.*, t.relid, has_table_privilege(t.relid, 'select') as readable
      from named n, lateral pg_partition_tree(n.oid) t where t.isleaf and t.relid <> n.oid
), relations as (
    select n.ordinality, n.name as root, c.oid from named n join pg_class c on c.oid = n.oid
     where not exists (select from leaves l where l.oid = n.oid)
        or not (select bool_and(readable) from leaves l where l.oid = n.oid)
    union all
    select l.ordinality, l.name, l.relid from leaves l
     where (select bool_and(readable) from leaves a where a.oid = l.oid)
)
select r.root, format('%I.%I', n.nspname, c.relname) as name, c.relkind = 'p' as partitioned,
       greatest(c.reltuples, 0)::int8 as rows, pg_relation_size(c.oid) as bytes,
       pg_relation_size(c.oid) / current_setting('block_size')::int as blocks, columns.names,
       coalesce(columns.is_binary, true) as is_binary
  from relations r join pg_class c on c.oid = r.oid join pg_namespace n on n.oid = c.relnamespace,
       lateral (select coalesce(array_agg(a.attname::text order by a.attnum), '{}') as names,
                       bool_and(b.typsend <> 0 and b.typreceive <> 0 and b.typtype not in ('c', 'p')
                                and (b.typtype = 'e' or (b.oid < 16384 and b.typelem < 16384
                                     and b.oid::regtype::text not like 'reg%'))) as is_binary
                  from pg_attribute a join pg_type t on t.oid = a.atttypid
                  -- A domain over a domain is not followed: it is a type of its user, and travels as text.
                  join pg_type b on b.oid = case t.typtype when 'd' then t.typbasetype else t.oid end
                 where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = '') as columns
 order by r.ordinality, c.oid
"""
_CAN_BE_EMPTIED = """
select c.relkind = 'r' and not exists (select from pg_constraint where confrelid = c.oid and contype = 'f')
       and has_table_privilege(c.oid, 'truncate') from pg_class c where c.oid = to_regclass($1)
"""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of a set's table `root`: those of `relation`, the table itself or a partition of it.

    Of several pieces of a relation each has its blocks; the last one has no end. `rows` and `bytes` are estimates.
    """

    root: str
    relation: str
    columns: tuple[str, ...]
    is_binary: bool
    number: int
    count: int
    first_block: int
    end_block: int | None
    rows: int
    bytes: int

    @property
    def format(self) -> Literal["binary", "text"]:
        return "binary" if self.is_binary else "text"


async def pieces_of(connection: Connection, tables: Sequence[str], piece_bytes: int) -> list[Piece]:
    """What is to be copied of some tables, given by SQL names; those that do not exist are left out.

    The tables are locked against being rewritten until the transaction ends: blocks keep their rows meanwhile."""
    found = await connection.fetch(_RELATIONS, list(tables))
    if found:
        names = ", ".join(row["name"] for row in found)
        await connection.execute(f"lock table {names} in access share mode")
    return [piece for row in await connection.fetch(_RELATIONS, list(tables)) for piece in _cut(row, piece_bytes)]


def _cut(row: asyncpg.Record, piece_bytes: int) -> list[Piece]:
    count = 1 if row["partitioned"] else min(max(1, round(row["bytes"] / piece_bytes)), PIECES_MAX)
    borders = [row["blocks"] * number // count for number in range(count)]
    return [
        Piece(
            row["root"],
            row["name"],
            tuple(row["names"]),
            row["is_binary"],
            number,
            count,
            border,
            borders[number + 1] if number + 1 < count else None,
            row["rows"] // count,
            row["bytes"] // count,
        )
        for number, border in enumerate(borders)
    ]


@asynccontextmanager
async def in_snapshot(dsn: str, snapshot: str) -> AsyncIterator[Connection]:
    """Another connection that sees what the one that exported the snapshot sees."""
    connection = await connect(dsn, "the source", "tops-copy", _OPTIONS)
    try:
        await connection.execute(
            f"begin isolation level repeatable read read only; set transaction snapshot {quote(snapshot)}"
        )
        yield connection
    finally:
        connection.terminate()


async def copy_out(connection: Connection, piece: Piece) -> AsyncIterator[bytes]:
    """A piece's rows as the connection's snapshot sees them."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_MAX)

    async def copy() -> None:
        pending = bytearray()

        async def take(data: bytes) -> None:
            pending.extend(data)
            while len(pending) >= CHUNK_BYTES:  # rows can be longer than a message may be: they are cut anywhere
                await queue.put(bytes(pending[:CHUNK_BYTES]))
                del pending[:CHUNK_BYTES]

        try:
            await connection.copy_from_query(_query(piece), output=take, format=piece.format)
            if pending:
                await queue.put(bytes(pending))
        finally:
            await queue.put(None)

    task = asyncio.ensure_future(copy())
    try:
        while (data := await queue.get()) is not None:
            yield data
        await task
    finally:
        task.cancel()


def _query(piece: Piece) -> str:
    columns = ", ".join(map(identifier, piece.columns))
    limits = [f"ctid >= '({piece.first_block},0)'"] if piece.first_block else []
    limits += [f"ctid < '({piece.end_block},0)'"] if piece.end_block is not None else []
    return f"select {columns} from {piece.relation}{' where ' + ' and '.join(limits) if limits else ''}"


@asynccontextmanager
async def loading(dsn: str) -> AsyncIterator[Connection]:
    """A connection that fills tables. Keys between tables hold again at the end: until then nothing checks them."""
    connection = await connect(dsn, "the new replica", "tops-copy", _OPTIONS)
    try:
        with suppress(asyncpg.InsufficientPrivilegeError):  # then the order of the tables must do
            await connection.execute("set session_replication_role = replica")
        # A piece that a crash of the server takes back is not recorded as loaded either.
        await connection.execute("set synchronous_commit = off")
        yield connection
    finally:
        connection.terminate()


async def load(connection: Connection, piece: Piece, chunks: AsyncIterator[bytes]) -> int:
    """Write a piece's rows inside the connection's transaction; how many they are.

    A relation that is one piece is emptied here once more: rows that came into a table with it are frozen, so that
    reading them for the first time writes nothing."""
    relation = await _relation(connection, piece)
    schema, table = await _names(connection, relation)
    frozen = piece.count == 1 and bool(await connection.fetchval(_CAN_BE_EMPTIED, relation))
    try:
        if frozen:
            await connection.execute(f"truncate only {relation}")
        tag = await connection.copy_to_table(
            table, schema_name=schema, columns=piece.columns, source=chunks, format=piece.format, freeze=frozen
        )
    except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError) as error:
        raise NotReachable(f"the connection broke while a copy was loaded: {error}") from error
    except asyncpg.PostgresError as error:
        raise ResourceError("the new replica", f"table {piece.root} does not take the copy: {error}") from error
    return int(tag.rpartition(" ")[2])


async def _relation(connection: Connection, piece: Piece) -> str:
    """Where the rows go: to the source's partition if it is one of the table's here, too, and else to the table."""
    sql = "select exists (select from pg_partition_tree(to_regclass($1)) where relid = to_regclass($2) and isleaf)"
    return piece.relation if await connection.fetchval(sql, piece.root, piece.relation) else piece.root


async def _names(connection: Connection, relation: str) -> tuple[str, str]:
    row = await connection.fetchrow(
        "select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace "
        "where c.oid = to_regclass($1)",
        relation,
    )
    if row is None:
        raise ResourceError("the new replica", f"table {relation} is missing: the copy can't be taken")
    return row["nspname"], row["relname"]


async def empty(connection: Connection, tables: Sequence[str]) -> None:
    """Take all rows out of tables (SQL names) inside the connection's transaction."""
    sql = "select name from unnest($1::text[]) as name where to_regclass(name) is not null"
    names = [row["name"] for row in await connection.fetch(sql, list(tables))]
    if not names:
        return
    try:
        async with connection.transaction():
            await connection.execute(f"truncate {', '.join(names)}")
    except (asyncpg.FeatureNotSupportedError, asyncpg.InsufficientPrivilegeError):
        # Another table refers to one of them, or the right is missing.
        await connection.execute("set local session_replication_role = replica")
        for name in names:
            await connection.execute(f"delete from {name}")
