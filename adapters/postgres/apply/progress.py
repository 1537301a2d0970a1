"""How far a replica set has come in this database: the adapter's memory of it, and the statements that record it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import asyncpg
import msgspec

from adapters.changes import Member, pack_members
from adapters.parcels import parcels
from adapters.postgres.apply.statements import Statements
from adapters.postgres.sql.literals import BIGINT, BYTEA, TEXT, array_literal, quote
from adapters.resource import Position
from tops.model.log_points import NO_DIGEST, LogPoint

_PARCEL_BYTES_MAX = 2**19

_NUMBER = """with changed as (
    insert into tops.applied (replica_set, number, history, digest)
    select $1::text, n, $4::text, d from unnest($2::bigint[], $5::text[]) as s(n, d)
     where not exists (select from tops.position p where p.replica_set = $1 and p.prefix >= n) returning 1)
  select tops.affected($3::int, count(*)) from changed"""
_PREFIX = """with changed as (
    update tops.position set prefix = $3::bigint, at_ms = greatest(at_ms, $4::bigint), history = $5::text,
           digest = $6::text
     where replica_set = $1::text and prefix = $2::bigint returning 1)
  select tops.affected(1, count(*)) from changed"""
# Ids must grow in commit order: only the session that holds the set's lock draws some, one transaction at a time.
_OUTBOX = """insert into tops.outbox (replica_set, id, size, members)
  select $1::text, nextval('tops.outbox_ids'), s.size, s.members
    from unnest($2::int[], $3::bytea[]) as s(size, members)"""


class Job(msgspec.Struct, frozen=True, gc=False):
    """A member with the number and time of the log under which it runs."""

    number: int
    at_ms: int
    member: Member


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A number of the log as it is recorded: of which history, and the digest of everything up to it."""

    number: int
    history: str = ""
    digest: str = NO_DIGEST


_NOTHING = Mark(0)


@dataclass(slots=True)
class Progress:
    """The applied numbers: a prefix and some above it; `stored` is the prefix that the database has as a row."""

    stored: int
    prefix: int
    last: Mark = _NOTHING  # what is recorded for the prefix
    above: dict[int, Mark] = field(default_factory=dict)

    @classmethod
    async def load(cls, connection: "asyncpg.Connection[asyncpg.Record]", replica_set: str) -> "Progress":
        await connection.execute("insert into tops.position values ($1, 0) on conflict do nothing", replica_set)
        return await cls.read(connection, replica_set)

    @classmethod
    async def read(cls, connection: "asyncpg.Connection[asyncpg.Record]", replica_set: str) -> "Progress":
        """As the connection's transaction sees it."""
        rows = await connection.fetch(
            "select prefix as number, history, digest from tops.position where replica_set = $1 union all "
            "select number, history, digest from tops.applied where replica_set = $1",
            replica_set,
        )
        marks = [Mark(row["number"], row["history"], row["digest"]) for row in rows]
        first, *others = marks or [_NOTHING]
        progress = cls(first.number, first.number, first)
        progress.add(sorted(others, key=lambda mark: mark.number))
        return progress

    @property
    def point(self) -> LogPoint:
        return LogPoint(self.last.history, self.prefix, self.last.digest)

    @property
    def position(self) -> Position:
        return Position(self.prefix, frozenset(self.above))

    def holds(self, number: int) -> bool:
        return number <= self.prefix or number in self.above

    def add(self, marks: Sequence[Mark]) -> None:
        follows = bool(marks) and not self.above and marks[0].number == self.prefix + 1
        if follows and marks[-1].number == self.prefix + len(marks):
            self.last, self.prefix = marks[-1], marks[-1].number  # the common case: the next ones, in order
            return
        self.above.update((mark.number, mark) for mark in marks if mark.number > self.prefix)
        while (mark := self.above.pop(self.prefix + 1, None)) is not None:
            self.last, self.prefix = mark, mark.number

    def after(self, marks: Sequence[Mark]) -> "Progress":
        """What will be known once the log's next numbers are recorded: a longer prefix is stored as such."""
        later = Progress(self.stored, self.prefix, self.last, dict(self.above))
        later.add(marks)
        if later.prefix > self.prefix:
            later.stored = later.prefix
        return later


async def number_text(statements: Statements, replica_set: str, marks: Sequence[Mark]) -> str:
    """Record numbers of one history as rows of their own; fails if one is applied already."""
    name = await statements.named(_NUMBER)
    numbers = array_literal([mark.number for mark in marks], BIGINT)
    digests = array_literal([mark.digest for mark in marks], TEXT)
    history = quote(marks[0].history)
    return f"EXECUTE {name}({quote(replica_set)},{numbers},{len(marks)},{history},{digests})"


async def prefix_text(statements: Statements, replica_set: str, before: int, after: Mark, at_ms: int) -> str:
    """Record a longer prefix; fails if the database has another one than we remember."""
    name = await statements.named(_PREFIX)
    recorded = f"{quote(after.history)},{quote(after.digest)}"
    return f"EXECUTE {name}({quote(replica_set)},{before},{after.number},{at_ms},{recorded})"


async def outbox_text(statements: Statements, replica_set: str, encoded: Sequence[bytes]) -> str:
    """Record encoded members for publication, in commit order."""
    name = await statements.named(_OUTBOX)
    # One for all of them, unless they are so long that a publisher could not send them as one message.
    cut = list(parcels(encoded, len, _PARCEL_BYTES_MAX))
    sizes = array_literal([len(parcel) for parcel in cut], BIGINT)
    packed = array_literal([pack_members(parcel) for parcel in cut], BYTEA)
    return f"EXECUTE {name}({quote(replica_set)},{sizes},{packed})"
