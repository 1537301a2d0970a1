"""How far a replica set has come in this database: the adapter's memory of it, and the statements that record it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import asyncpg
import msgspec

from adapters.postgres.literals import BIGINT, BYTEA, array_literal, quote
from adapters.postgres.statements import Statements
from tops.changes import Member, encode_member, pack_members
from tops.parcels import parcels
from tops.ports import Position

_PARCEL_BYTES_MAX = 2**19

_NUMBER = """with changed as (
    insert into tops.applied (replica_set, number) select $1::text, n from unnest($2::bigint[]) as n
     where not exists (select from tops.position p where p.replica_set = $1 and p.prefix >= n) returning 1)
  select tops.affected($3::int, count(*)) from changed"""
_PREFIX = """with changed as (
    update tops.position set prefix = $3::bigint, at_ms = greatest(at_ms, $4::bigint)
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


@dataclass(slots=True)
class Progress:
    """The applied numbers: a prefix and some above it; `stored` is the prefix that the database has as a row."""

    stored: int
    prefix: int
    above: set[int] = field(default_factory=set)

    @classmethod
    async def load(cls, connection: "asyncpg.Connection[asyncpg.Record]", replica_set: str) -> "Progress":
        await connection.execute("insert into tops.position values ($1, 0) on conflict do nothing", replica_set)
        rows = await connection.fetch(
            "select prefix as number from tops.position where replica_set = $1 union all "
            "select number from tops.applied where replica_set = $1",
            replica_set,
        )
        stored = rows[0]["number"]
        progress = cls(stored, stored)
        progress.add(sorted(row["number"] for row in rows[1:]))
        return progress

    @property
    def position(self) -> Position:
        return Position(self.prefix, frozenset(self.above))

    def holds(self, number: int) -> bool:
        return number <= self.prefix or number in self.above

    def add(self, numbers: Sequence[int]) -> None:
        if not self.above and numbers and numbers[0] == self.prefix + 1 and numbers[-1] == self.prefix + len(numbers):
            self.prefix = numbers[-1]  # the common case: the next ones, in order
            return
        self.above.update(number for number in numbers if number > self.prefix)
        while self.prefix + 1 in self.above:
            self.prefix += 1
            self.above.remove(self.prefix)

    def after(self, numbers: Sequence[int]) -> "Progress":
        """What will be known once the log's next numbers are recorded: a longer prefix is stored as such."""
        later = Progress(self.stored, self.prefix, set(self.above))
        later.add(numbers)
        if later.prefix > self.prefix:
            later.stored = later.prefix
        return later


async def number_text(statements: Statements, replica_set: str, numbers: Sequence[int]) -> str:
    """Record numbers as rows of their own; fails if one is applied already."""
    name = await statements.named(_NUMBER)
    return f"EXECUTE {name}({quote(replica_set)},{array_literal(list(numbers), BIGINT)},{len(numbers)})"


async def prefix_text(statements: Statements, replica_set: str, before: int, after: int, at_ms: int) -> str:
    """Record a longer prefix; fails if the database has another one than we remember."""
    name = await statements.named(_PREFIX)
    return f"EXECUTE {name}({quote(replica_set)},{before},{after},{at_ms})"


async def outbox_text(statements: Statements, replica_set: str, members: Sequence[Member]) -> str:
    """Record members for publication, in commit order."""
    name = await statements.named(_OUTBOX)
    # One for all of them, unless they are so long that a publisher could not send them as one message.
    cut = list(parcels([encode_member(member) for member in members], len, _PARCEL_BYTES_MAX))
    sizes = array_literal([len(parcel) for parcel in cut], BIGINT)
    packed = array_literal([pack_members(parcel) for parcel in cut], BYTEA)
    return f"EXECUTE {name}({quote(replica_set)},{sizes},{packed})"
