"""How far the copy that a replica takes has come, in its own database: what is loaded is not loaded again.

Every piece is recorded in the transaction that writes its rows. A record ends with the copy, in the transaction that
makes the copy count.
"""

from collections.abc import Collection

import asyncpg
import msgspec

from adapters.postgres.copy.copying import Piece
from replication.rpc.calls import CopyOpened

DDL = """
create table if not exists tops.copies (
    replica_set text primary key, copy text not null, source text not null, opened bytea not null,
    schema_digest text not null, post_data bytea);
create table if not exists tops.copied (
    replica_set text not null, relation text not null, number int not null, rows bigint not null,
    primary key (replica_set, relation, number));
"""
_opened = msgspec.msgpack.Decoder(CopyOpened)
_pieces = msgspec.msgpack.Decoder(list[Piece])


class CopyRecord(msgspec.Struct, frozen=True):
    """A copy that has begun. `finished` has rows by piece; `post_data` is there if the schema is copied, too."""

    copy: str
    source: str
    opened: CopyOpened
    schema_digest: str = ""
    post_data: bytes | None = None
    finished: dict[tuple[str, int], int] = {}

    @property
    def pieces(self) -> list[Piece]:
        return _pieces.decode(self.opened.pieces)

    @property
    def missing(self) -> list[tuple[int, Piece]]:
        """Pieces that are not loaded, with their numbers at the source."""
        return [(n, p) for n, p in enumerate(self.pieces) if (p.relation, p.number) not in self.finished]

    def whole_relations(self) -> set[str]:
        """Tables and partitions of the user of which no piece is missing."""
        return {p.relation for p in self.pieces if not p.root.startswith("tops.")} - {
            p.relation for _, p in self.missing
        }

    def gone_on_with(self, opened: CopyOpened, kept: Collection[str]) -> "CopyRecord":
        """The same copy by another snapshot of the same rows: these relations are kept."""
        record = msgspec.structs.replace(self, opened=opened, finished={})
        numbers = {(p.relation, p.number): p.rows for p in record.pieces if p.relation in kept}
        return msgspec.structs.replace(record, finished=numbers)


async def load(connection: asyncpg.Connection, replica_set: str) -> CopyRecord | None:
    """The copy that has begun here and not ended."""
    if await connection.fetchval("select to_regclass('tops.copies')") is None:
        return None
    found = await connection.fetchrow("select * from tops.copies where replica_set = $1", replica_set)
    if found is None:
        return None
    finished = await connection.fetch("select * from tops.copied where replica_set = $1", replica_set)
    return CopyRecord(
        found["copy"],
        found["source"],
        _opened.decode(found["opened"]),
        found["schema_digest"],
        found["post_data"],
        {(row["relation"], row["number"]): row["rows"] for row in finished},
    )


async def store(connection: asyncpg.Connection, replica_set: str, record: CopyRecord) -> None:
    """The copy begins, or goes on with what is kept of it. Until it ends the replica is not further than that."""
    await forget(connection, replica_set)
    await connection.execute(
        "insert into tops.copies values ($1, $2, $3, $4, $5, $6)",
        replica_set,
        record.copy,
        record.source,
        msgspec.msgpack.encode(record.opened),
        record.schema_digest,
        record.post_data,
    )
    for (relation, number), rows in record.finished.items():
        await finished(connection, replica_set, relation, number, rows)
    await set_start(connection, replica_set, "new", seeded=True)


async def finished(connection: asyncpg.Connection, replica_set: str, relation: str, number: int, rows: int) -> None:
    """A piece is loaded, by the transaction that the connection is in."""
    await connection.execute("insert into tops.copied values ($1, $2, $3, $4)", replica_set, relation, number, rows)


async def forget(connection: asyncpg.Connection, replica_set: str) -> None:
    await connection.execute("delete from tops.copied where replica_set = $1", replica_set)
    await connection.execute("delete from tops.copies where replica_set = $1", replica_set)


async def set_start(connection: asyncpg.Connection, replica_set: str, state: str, *, seeded: bool) -> None:
    """What the start of the set makes of this replica from now on (`replication.replica.start.record`)."""
    await connection.execute(
        "insert into tops.start (replica_set, state, seeded) values ($1, $2, $3) on conflict (replica_set) do update "
        "set state = excluded.state, attempt = '', basis = '', fingerprint = null, seeded = excluded.seeded",
        replica_set,
        state,
        seeded,
    )
