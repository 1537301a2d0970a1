"""What a check finds, as data: differences, limits, one result per table and one per run.

The one rule that lives here: a run that was limited in any way is PARTIAL, and no caller can get "equal" out of it.
"""

from datetime import datetime
from enum import StrEnum

import msgspec

from replication.tables.endpoints import Key
from replication.tables.schema import SchemaDifference


class Kind(StrEnum):
    """What a replica's row is, measured against the reference row."""

    MISSING = "missing"  # the row is not there
    EXTRA = "extra"  # a row that should not be there
    CHANGED = "changed"  # there, with other values
    STALE = "stale"  # equals an older version that the log still has
    IN_FLIGHT = "in flight"  # log entries that the replica has not applied yet explain it
    DELETED_ELSEWHERE = "deleted elsewhere"  # the log deleted it, this replica kept it
    TYPE = "type"  # the value is not of the column's type
    SCHEMA = "schema"  # the table itself differs


class Verdict(StrEnum):
    EQUAL = "EQUAL"
    DIFFERENT = "DIFFERENT"
    PARTIAL = "PARTIAL"


class Basis(StrEnum):
    """Why the reference row counts as right."""

    LOG = "log"  # what the last logged transaction wrote
    PRIMARY = "primary"
    NEWEST = "newest"  # the highest row version of a peer-to-peer set
    MAJORITY = "majority"
    FIRST = "first"  # no better reason: two versions, equally many replicas; the first replica named


BASES = {
    Basis.LOG: "the log",
    Basis.PRIMARY: "the primary",
    Basis.NEWEST: "the newest version",
    Basis.MAJORITY: "the majority",
    Basis.FIRST: "the first named; no majority",
}


class LimitKind(StrEnum):
    UNREACHABLE = "unreachable"
    CAPPED = "capped"
    SKIPPED = "skipped"


class Limit(msgspec.Struct, frozen=True):
    """Why a run did not see everything."""

    kind: LimitKind
    what: str  # the replica or the table
    reason: str


class Cause(msgspec.Struct, frozen=True):
    """The likeliest explanation of one difference, from the transaction log."""

    summary: str
    tx: str = ""
    site: str = ""
    number: int | None = None
    committed_at: datetime | None = None


class LoggedWrite(msgspec.Struct, frozen=True):
    """The last acknowledged transaction that wrote a row, or may have written it, as far as the log is retained."""

    tx: str
    number: int  # its log index
    known: bool  # the log holds what it wrote; False: a statement whose result is not in the log


class Suspect(msgspec.Struct, frozen=True):
    """One key whose row was not the same on all replicas, as one look saw it."""

    key: Key
    bucket: int
    versions: dict[str, tuple[str | None, ...] | None]  # by replica, in the order of the columns; None: no row


class Difference(msgspec.Struct, frozen=True):
    """One row on one replica that is not what the reference says."""

    table: str
    key: Key
    bucket: int
    replica: str
    kind: Kind
    columns: tuple[str, ...]  # the columns that differ; empty when the whole row is missing or extra
    expected: dict[str, str | None] | None
    actual: dict[str, str | None] | None
    reference: tuple[str, ...]  # the replicas that hold the expected version
    basis: Basis
    looks: int  # how often the row was read before it was reported
    steady: bool  # the same versions every time; False: it differed every time, but moved
    cause: Cause | None = None
    logged: LoggedWrite | None = None  # the same for all replicas; None: the log says nothing about the row


class BucketDifference(msgspec.Struct, frozen=True):
    """How many differing rows one bucket has; what the heat map shows."""

    bucket: int
    rows: int
    differences: int


class TableResult(msgspec.Struct, kw_only=True):
    """One table over all compared replicas."""

    table: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    rows: dict[str, int]  # by replica
    method: str  # "native" or "canonical" checksums
    buckets: int
    buckets_differing: list[BucketDifference]
    bucket_ends: tuple[int, ...] = ()  # the first and the last; none in an empty table
    rows_read: int  # rows fetched one by one, over all replicas
    settled: int  # rows that differed at first and no longer when looked at again
    counts: dict[str, dict[str, int]]  # replica -> kind -> rows
    pairs: dict[str, dict[str, int]]  # replica -> other replica -> rows that differ between the two
    columns_differing: dict[str, int]
    causes: dict[str, int]  # summary -> rows
    bases: dict[str, int] = {}  # what the reference of a differing row relies on -> rows
    schema: list[SchemaDifference]
    examples: list[Difference]
    seconds: float

    @property
    def differences(self) -> int:
        """What the log explains by itself is on its way, and no difference."""
        return sum(n for kinds in self.counts.values() for kind, n in kinds.items() if kind != Kind.IN_FLIGHT)

    def found_at(self, replica: str) -> str:
        """How the table of one replica differs, in words; empty if it does not."""
        rows = sum(n for kind, n in self.counts.get(replica, {}).items() if kind != Kind.IN_FLIGHT)
        columns = len(self.schema)
        return _found(rows, columns) if rows or columns else ""

    @property
    def in_flight(self) -> int:
        return sum(kinds.get(Kind.IN_FLIGHT, 0) for kinds in self.counts.values())


class ReplicaState(msgspec.Struct, kw_only=True):
    """A replica as this run saw it."""

    name: str
    engine: str
    version: str
    reachable: bool
    position: int | None = None
    lag_entries: int | None = None
    snapshot_at: datetime | None = None


class CheckResult(msgspec.Struct, kw_only=True):
    """One run over one replica set."""

    id: str
    set_name: str
    policy: str
    started_at: datetime
    finished_at: datetime
    replicas: list[ReplicaState]
    tables: list[TableResult]
    limits: list[Limit]
    resumed: int  # how often the run was stopped and taken up again
    seconds: dict[str, float]  # by phase
    peak_memory_mb: float

    @property
    def differences(self) -> int:
        return sum(table.differences for table in self.tables)

    @property
    def schema_differences(self) -> int:
        return sum(len(table.schema) for table in self.tables)

    @property
    def verdict(self) -> Verdict:
        if self.limits:
            return Verdict.PARTIAL
        return Verdict.DIFFERENT if self.differences or self.schema_differences else Verdict.EQUAL

    @property
    def headline(self) -> str:
        """The verdict in one line; a limited run says so first."""
        found = _found(self.differences, self.schema_differences)
        match self.verdict:
            case Verdict.EQUAL:
                rows = max((sum(t.rows.values()) for t in self.tables), default=0)
                moving = sum(table.in_flight for table in self.tables)
                also = f"; {moving:,} row(s) in flight, as the log explains" if moving else ""
                return f"EQUAL: no difference in {len(self.tables)} table(s), {rows:,} rows read by checksum{also}"
            case Verdict.DIFFERENT:
                return f"DIFFERENT: {found}"
            case Verdict.PARTIAL:
                return f"PARTIAL: {found} in what could be compared ({'; '.join(x.reason for x in self.limits)})"

    @property
    def exit_code(self) -> int:
        if self.differences or self.schema_differences:
            return 1
        if not self.limits:
            return 0
        return 3 if any(limit.kind is LimitKind.UNREACHABLE for limit in self.limits) else 2


def _found(rows: int, columns: int) -> str:
    parts = [f"{rows:,} differing row(s)"] if rows or not columns else []
    if columns:
        parts.append(f"{columns} column(s) defined differently")
    return " and ".join(parts)
