"""What the runtime needs from outside: a database as a transactional resource.

A resource carries out what it is told and remembers, in the same database transaction as the data, how far it has
come. It decides nothing: whether an epoch commits is the coordinator's word, in which order is the log's.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Protocol

import msgspec

from adapters.changes import Member, Row, Value, decode_member
from tops.model.ids import NodeId, TxId
from tops.model.log_points import BEGINNING, NO_DIGESTS, Digests, LogPoint
from tops.model.sizes import LOCAL_TX_BYTES_MAX


class Attempt(msgspec.Struct, frozen=True, gc=False, array_like=True, order=True):
    """Which try, of which coordinator's life, at which number of the log."""

    number: int
    incarnation: int
    attempt: int
    coordinator: NodeId
    note: str = ""  # kept with the promise for whoever made it: letters, digits, dots and dashes

    def __str__(self) -> str:
        return f"number {self.number}, attempt {self.attempt} of {self.coordinator}.{self.incarnation}"


class Epoch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Transactions that are prepared together, in serial order."""

    attempt: Attempt
    members: tuple[Member, ...]
    digest: str
    at_ms: int  # the coordinator's clock, never going back: all replicas measure the life of idempotency keys by it
    before: LogPoint = BEGINNING  # what the database must hold of the log


class Entry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One number of the log with what was committed under it; no members: a void number."""

    number: int
    members: tuple[Member, ...]
    at_ms: int = 0


# Writers' clocks differ by minutes, so an entry may be older, by its clock, than the one before it. Whether a key is
# still alive must not depend on when a replica has deleted expired ones: they stay longer than clocks may differ.
KEPT_BEYOND_MS = 900_000


class Why(Enum):
    """Why a member can't be part of the epoch; the same on every replica in the same state."""

    INVALID = "invalid"  # unknown table or column, no primary key, not deterministic
    CONSTRAINT = "constraint"  # check, unique, foreign key, not null, exclusion
    VERSION = "version"  # the row is not the one that the writer had seen
    DUPLICATE = "duplicate"  # its idempotency key has been committed with the same content
    KEY_REUSED = "key-reused"  # its idempotency key has been committed with other content
    CONFLICT = "conflict"  # a row of a captured write set is not the one that its origin had found: execute again
    TOO_LARGE = "too-large"  # longer than what can be published
    ERROR = "error"  # anything else that the database objects to


class Exclusion(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Why a member is left out: `message` is for people, everything else for programs."""

    why: Why
    sqlstate: str
    message: str
    first_tx: TxId | None = None  # for a duplicate: the transaction that was committed with the key, and its number
    first_number: int | None = None
    proof: str = ""  # of a change that is not proved deterministic: the code of the proof's reason


def too_large(size: int) -> Exclusion:
    """Why a member that takes so many bytes can't be published, and so must not be committed here first."""
    message = (
        f"it takes {size} bytes as it is published, over the limit of {LOCAL_TX_BYTES_MAX} for a transaction that "
        "commits at a replica first: split it"
    )
    return Exclusion(Why.TOO_LARGE, "", message)


class MemberVote(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What became of one member here: the rows that each of its changes affected, or why it is left out."""

    tx: TxId
    rows: tuple[int, ...] = ()
    excluded: Exclusion | None = None
    returned: tuple[tuple[Row, ...], ...] = ()  # per change, for statements that return rows; empty if none does


class Prepared(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A promise that survives crashes: all members but the excluded ones commit when told to."""

    attempt: Attempt
    digest: str
    votes: tuple[MemberVote, ...]
    log_digest: str = ""  # recorded with the work: of the log with all members that are not excluded


class EntryFailed(msgspec.Struct, frozen=True, gc=False, array_like=True):
    number: int
    tx: TxId
    reason: Exclusion


class Applied(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How an `apply` went: everything before `failed` is committed, it and everything after it is not."""

    position: int
    failed: EntryFailed | None = None


class Position(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The longest applied-or-void prefix of the log, and what is applied beyond it."""

    prefix: int
    above: frozenset[int] = frozenset()

    def holds(self, number: int) -> bool:
        return number <= self.prefix or number in self.above


class InDoubt(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A promise found in the database that waits for the coordinator's word."""

    attempt: Attempt
    age_s: float


class ReadResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    rows: list[Row]
    position: Position | None = None  # of the very snapshot that was read, if asked for


class OutboxEntry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Transactions committed here together that are still to be published, each as it was encoded then; ids grow in
    commit order."""

    id: int
    encoded: list[bytes]

    @property
    def members(self) -> list[Member]:
        return [decode_member(one) for one in self.encoded]


class Health(msgspec.Struct, frozen=True, gc=False, array_like=True):
    position: Position
    prepared: int
    oldest_prepared_s: float
    lag: int | None = None  # numbers behind the head, if the head was given
    unpublished: int = 0


class SharedSnapshot(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How other processes read the same state: by the name of a snapshot that PostgreSQL has exported, or in a copy of
    the file."""

    name: str = ""
    path: str = ""


class Snapshot(Protocol):
    """One consistent state of the whole database, with its position, for as long as it is open."""

    @property
    def position(self) -> Position: ...

    @property
    def point(self) -> LogPoint: ...

    def rows(self, table: str, *, chunk: int = 10_000) -> AsyncIterator[list[Row]]:
        """All rows in key order; values in a form that an `Insert` takes back exactly."""
        ...

    async def share(self) -> SharedSnapshot:
        """Let other processes read the same state, until this snapshot is closed."""
        ...


class Resource(Protocol):
    """One replica set's part of one database.

    All calls are safe to repeat. A call that is cancelled or cut off raises `OutcomeUnknown` or `CancelledError`, and
    what it began may still happen: ask `applied()` and `recover()`.
    """

    has_own_schema: bool  # True: agents can keep tables and functions of their own, apart from what sets replicate
    compensatable: bool  # True: `prepare` commits early, and `rollback` takes back

    async def start(self) -> None:
        """Connect, take over from any earlier agent, make the bookkeeping tables; refuse a database that can't do."""

    async def close(self) -> None: ...

    async def recover(self) -> list[InDoubt]:
        """The promises found in the database, oldest number first; they stay until commit or rollback."""

    async def prepare(self, epoch: Epoch) -> Prepared:
        """Promise an epoch; other attempts of its number are rolled back first. Raises ResourceRejected for a NO."""

    async def commit(self, attempt: Attempt) -> LogPoint:
        """Commit what is prepared; returns what the database holds then. Raises PreparedWorkLost when nothing is
        prepared and the number is not applied either."""

    async def rollback(self, attempt: Attempt) -> None:
        """Drop the promise; an unknown one is dropped already."""

    async def apply(
        self, entries: Sequence[Entry], *, durable: bool = True, history: str = "", digests: Digests = NO_DIGESTS
    ) -> Applied:
        """Commit entries of the log in order, exactly once, with the digests; known numbers are skipped.

        Not durable: a crash of the database may take back the newest ones together with their position.
        """

    async def applied(self) -> Position: ...

    async def point(self) -> LogPoint:
        """The applied prefix, and which log it is a prefix of."""

    async def compact(self) -> None:
        """Keep the applied prefix as one row, and forget idempotency keys whose time is over."""

    async def write_local(self, member: Member) -> MemberVote:
        """Commit a transaction here and, with it, the record that it is to be published. Raises MemberRejected."""

    async def write_all_local(self, members: Sequence[Member]) -> list[MemberVote]:
        """The same for several at once, each by itself: what becomes of one means nothing to the others."""

    async def unpublished(self, limit: int = 1_000, after: int = 0) -> list[OutboxEntry]:
        """The oldest entries beyond the id `after`, in commit order; none appears later with a smaller id than one
        seen."""

    async def count_unpublished(self, after: int = 0) -> int:
        """How many transactions are recorded beyond the id `after`."""

    async def mark_published(self, up_to: int) -> None: ...

    async def read(
        self, sql: str, args: Sequence[Value] = (), *, with_position: bool = False, who: str = ""
    ) -> ReadResult:
        """One query of a client's in one read-only snapshot, with no more rights than a client has. `who` is the
        identity whose share of the database it takes. Raises ResultTooLarge."""

    async def read_own(self, sql: str, args: Sequence[Value] = ()) -> ReadResult:
        """One query of the agent's own, which may look into its tables; never a client's."""

    async def version(self, table: str, key: Row) -> int:
        """The number that last changed the row, for tables that track versions; 0 if none is known."""

    def snapshot(self) -> AbstractAsyncContextManager[Snapshot]: ...

    async def run_own_script(self, script: str) -> None:
        """Make tables and functions of the agents' own, which no set replicates. Raises ConfigError without
        `has_own_schema`."""

    async def apply_quarantined(self, member: Member, delete_sql: str) -> MemberVote:
        """Carry out a member outside of the log, here alone, and in the same transaction the statement that forgets it
        (with its id as `$1`). Raises ConfigError without `has_own_schema`."""

    async def health(self, head: int | None = None) -> Health: ...
