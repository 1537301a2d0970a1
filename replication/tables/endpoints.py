"""What the divergence layer needs from outside, as protocols.

A running replica set has its barrier (`set_barrier.py`, published into the stream), its log (`set_log.py`) and its
repairs as replicated transactions (`set_repair.py`); `snapshots.py`, `logs.py` and `writer.py` are what plain databases
can have.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from tops.model.errors import ConfigError

if TYPE_CHECKING:
    from replication.tables.schema import CommonTable

Key = tuple[str, ...]
"""A row's key as canonical text, one part per key column."""

Values = Mapping[str, str | None]
"""A row as canonical text by column; None is NULL."""


class Engine(Enum):
    """The kind of database behind an endpoint."""

    POSTGRES = "postgresql"
    SQLITE = "sqlite"


@dataclass(frozen=True, slots=True)
class ReplicaEndpoint:
    """One replica's database: `postgresql://…` or `sqlite:///path`."""

    name: str
    dsn: str

    @property
    def engine(self) -> Engine:
        if self.dsn.startswith(("postgresql://", "postgres://")):
            return Engine.POSTGRES
        if self.dsn.startswith("sqlite:///"):
            return Engine.SQLITE
        scheme = self.dsn.partition("://")[0]
        raise ConfigError(f"replica {self.name}: {scheme!r} is no known database; use postgresql://… or sqlite:///path")

    @property
    def path(self) -> str:
        """The file of an SQLite endpoint."""
        return self.dsn.removeprefix("sqlite:///")


@dataclass(frozen=True, slots=True)
class SnapshotHandle:
    """One replica's state, readable from any number of connections until the barrier is released."""

    replica: str
    dsn: str  # where to read: the replica itself, or the copy that is the snapshot
    snapshot: str | None  # what SET TRANSACTION SNAPSHOT takes; None where the dsn is the snapshot
    position: int | None  # the log number up to which exactly the replica had applied; None without a log
    taken_at: datetime
    lag_entries: int | None = None  # how far behind the log's end the replica was when it was asked


class Barrier(Protocol):
    """Reads of several replicas at one logical point.

    `open` returns when every replica has a snapshot taken as it had applied exactly up to the same log number; the
    replicas go on applying right after, and no writer waits. A replica that can't be reached is absent from the answer.
    """

    absent: dict[str, str]  # replicas that gave no snapshot, with the reason

    async def open(self, endpoints: Sequence[ReplicaEndpoint]) -> Mapping[str, SnapshotHandle]: ...

    async def alive(self) -> None:
        """Raise `SnapshotLost` or `NotReachable` when a snapshot can no longer be read."""

    async def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One row change of one committed transaction, as the log keeps it."""

    number: int  # gap-free position of the transaction in the set's log
    tx: str
    site: str
    committed_at: datetime
    table: str
    key: Key
    old: Values | None  # None: there was no row (an insert), or the log does not keep old values
    new: Values | None  # None: the row was deleted; otherwise the columns that were written
    statement: str = ""  # the SQL, where the write was one; without `new`, what it did to the row is not known
    order: tuple[Any, ...] = ()  # which of a row's versions wins, where that is not the one with the larger number
    unknown: tuple[str, ...] = ()  # columns that the write changed to something the log does not tell
    creates: bool = True  # there may have been no row before
    values: Mapping[str, Any] = field(default_factory=dict)  # `new` as it was passed, with the key: a repair writes it
    is_image: bool = False  # captured at an origin: what defaults and triggers made of the row is in it

    @property
    def opaque(self) -> bool:
        return bool(self.statement) and self.new is None


class TransactionLog(Protocol):
    """Committed transactions, by the rows that they wrote."""

    async def records_of(
        self, table: "CommonTable", keys: Collection[Key], upto: int | None
    ) -> Mapping[Key, Sequence[LogRecord]]:
        """What is still retained about these rows, in the order of the log, up to a log index."""

    async def inserted(self, table: "CommonTable", upto: int | None) -> Collection[Key]:
        """Keys of rows that were inserted by the newest retained transactions and not deleted since; some at most."""


@dataclass(frozen=True, slots=True)
class RowChange:
    """One planned write: make this replica's row what the reference says it is."""

    replica: str
    table: str
    key: Key
    seen: Values | None  # the row as the check saw it; the write happens only while that is still so
    wanted: Values | None  # None: delete the row
    source: str | None  # the replica that the wanted row is copied from; None: a delete, or a row from the log
    basis: str = ""  # what the wanted row relies on: a `Basis`


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a batch of row changes."""

    written: int
    transactions: tuple[str, ...]  # ids to look up in the log, or in the database where there is no log


class RepairWriter(Protocol):
    """Applies planned changes; in a replica set as replicated transactions, ordered with live writes."""

    async def apply(self, changes: Sequence[RowChange]) -> Applied:
        """All of the batch or nothing; raises `RowMoved` when a row is no longer as the check saw it."""
