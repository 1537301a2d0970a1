"""Says what each difference is and what probably caused it; pure, from the versions seen and the log's records.

The reference of a row is, in this order, what the log says it is; the primary's row; the row with the newest version,
in a set that keeps row versions; what most replicas hold; the first replica's. The difference says which of these it
was, and which logged transaction wrote the row last.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from adapters.changes import volatile_part
from replication.divergence.results.model import Basis, Cause, Difference, Kind, LoggedWrite, Suspect
from replication.tables.canonical import NOT_OF_TYPE
from replication.tables.endpoints import Key, LogRecord, Values

Row = dict[str, str | None]

CONFLICT_WINDOW = timedelta(seconds=10)
_DIFFERENTLY = "a logged write came out differently here:"


@dataclass(frozen=True, slots=True)
class LoggedVersion:
    """The row after one record, as far as the log still tells; `record` is None for what was before the first."""

    record: LogRecord | None
    values: Values | None  # None: no row
    whole: bool  # every column is known
    passed: Mapping[str, Any] = field(default_factory=dict)  # the values as they were passed

    @property
    def opaque(self) -> bool:
        """A statement's result, which the log does not tell."""
        return self.record is not None and self.record.opaque

    def matches(self, row: Row | None) -> bool:
        if self.opaque:
            return False
        if self.values is None or row is None:
            return self.values is None and row is None
        return all(row.get(column) == value for column, value in self.values.items() if column in row)


@dataclass(frozen=True, slots=True)
class Reference:
    values: Row | None
    holders: tuple[str, ...]
    basis: Basis


@dataclass(frozen=True, slots=True)
class RowClock:
    """The version of one row at one replica of a peer-to-peer set."""

    rank: tuple[Any, ...]  # the highest wins
    deleted: bool


@dataclass(frozen=True, slots=True)
class Twin:
    """A row that the log wrote and no replica holds; the row that is looked at has its values under another key."""

    key: Key
    record: LogRecord


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of the replicas beside the rows."""

    columns: tuple[str, ...]
    key: tuple[str, ...]
    primary: str = ""
    barrier: int | None = None  # the log number that was read at
    positions: Mapping[str, int] | None = None  # how far each replica had applied, where one was behind
    leads: Mapping[str, Sequence[LogRecord]] = field(default_factory=dict)  # own writes of the row beyond the barrier
    rejected: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # replica -> transaction -> why not applied
    log_decides: bool = True  # the log's last write of a row is what all should hold
    exactly_once: bool = False  # a replica's position is recorded in the transactions of the data
    generated: frozenset[str] = frozenset()  # columns that follow from the others
    clocks: Mapping[str, RowClock] = field(default_factory=dict)  # the row's version at each replica that has one
    direct_writes: Mapping[str, str] = field(default_factory=dict)  # replica -> writes past replication that were noted
    with_triggers: frozenset[str] = frozenset()  # replicas at which a write of the table may come out differently
    twin: Twin | None = None

    def rejected_by_all(self, tx: str) -> bool:
        return bool(self.rejected) and all(tx in rejected for rejected in self.rejected.values())


def explain(
    table: str,
    suspect: Suspect,
    records: Sequence[LogRecord],
    known: Circumstances,
    *,
    looks: int,
    steady: bool,
) -> list[Difference]:
    """One difference per replica whose row is not the reference."""
    rows = {replica: _row(version, known) for replica, version in suspect.versions.items()}
    records = [record for record in records if not known.rejected_by_all(record.tx)]
    versions = logged_versions(records, known)
    leading = {replica for replica, row in rows.items() if _leads(known.leads.get(replica, ()), row)}
    judged = {replica: row for replica, row in rows.items() if replica not in leading}
    reference = _reference(judged or rows, versions, known)
    found = []
    for replica, row in rows.items():
        if row == reference.values:
            continue
        kind = Kind.IN_FLIGHT if replica in leading else _kind(replica, row, reference, versions, known)
        found.append(
            Difference(
                table=table,
                key=suspect.key,
                bucket=suspect.bucket,
                replica=replica,
                kind=kind,
                columns=_differing(row, reference.values),
                expected=_shown(reference.values),
                actual=_shown(row),
                reference=reference.holders,
                basis=reference.basis,
                looks=looks,
                steady=steady,
                cause=_led(known.leads[replica])
                if replica in leading
                else _cause(replica, kind, row, reference, versions, known),
                logged=_last_write(versions, known),
            )
        )
    return found


def logged_versions(records: Sequence[LogRecord], known: Circumstances) -> list[LoggedVersion]:
    """The row's versions in the order of the log, up to the barrier; the one before the first record comes first."""
    within = (r for r in records if known.barrier is None or r.number <= known.barrier)
    kept = sorted(within, key=lambda r: (r.order, r.number))
    if not kept:
        return []
    # Where versions are ranked, only increments have no rank of their own: they add to whichever version wins.
    increments = [record for record in kept if not record.order and kept[-1].order]
    added = {column for record in increments for column in record.unknown}
    kept = [record for record in kept if record not in increments]
    versions: list[LoggedVersion] = []
    if kept[0].old is not None or (kept[0].new is not None and kept[0].creates):
        versions.append(LoggedVersion(None, kept[0].old, kept[0].old is None))
    for record in kept:
        last = versions[-1] if versions and not versions[-1].opaque else None
        if record.opaque:
            versions.append(LoggedVersion(record, {}, False))
            continue
        if record.new is None or (last is not None and _is_deleted(last) and not record.creates):
            versions.append(LoggedVersion(record, None, True))  # an update of a deleted row changes nothing
            continue
        unknown = added.union(record.unknown)
        before = {} if last is None or record.creates else last.passed
        passed = {c: v for c, v in {**before, **record.values}.items() if c not in unknown}
        former = record.old or ((last.values or {}) if last is not None else {})
        values = {c: v for c, v in {**former, **record.new}.items() if c not in unknown}
        versions.append(LoggedVersion(record, values, _others(known) <= set(values), passed))
    return versions


def _is_deleted(version: LoggedVersion) -> bool:
    return version.record is not None and version.values is None


def logged_row(records: Sequence[LogRecord], known: Circumstances) -> Mapping[str, Any] | None:
    """The row that the log wrote last, with the values as they were passed; None if the log does not hold all of it."""
    versions = logged_versions([record for record in records if not known.rejected_by_all(record.tx)], known)
    newest = versions[-1] if versions else None
    if newest is None or newest.opaque or newest.values is None or not newest.whole:
        return None
    return newest.passed if set(known.columns) - known.generated <= newest.passed.keys() else None


def _others(known: Circumstances) -> set[str]:
    return set(known.columns) - set(known.key) - known.generated


def _last_write(versions: Sequence[LoggedVersion], known: Circumstances) -> LoggedWrite | None:
    records = [version.record for version in versions if version.record is not None]
    if not records:
        return None if known.twin is None else LoggedWrite(known.twin.record.tx, known.twin.record.number, False)
    if known.log_decides and not versions[-1].opaque:
        return LoggedWrite(records[-1].tx, records[-1].number, True)
    told = [record for record in records if record.key] or records
    return LoggedWrite(told[-1].tx, told[-1].number, False)


def _leads(records: Sequence[LogRecord], row: Row | None) -> bool:
    """True when the row is what the replica's own newest transaction beyond the barrier made of it."""
    if not records:
        return False
    newest = records[-1]
    if newest.opaque:
        return True
    values = None if newest.new is None else {c: v for c, v in newest.new.items() if c not in newest.unknown}
    return LoggedVersion(newest, values, False).matches(row)


def _led(records: Sequence[LogRecord]) -> Cause:
    return _told("committed here and not yet at the others", records[-1])


def _row(version: Sequence[str | None] | None, known: Circumstances) -> Row | None:
    return None if version is None else dict(zip(known.columns, version, strict=True))


def _reference(rows: Mapping[str, Row | None], versions: Sequence[LoggedVersion], known: Circumstances) -> Reference:
    if versions and known.log_decides and not versions[-1].opaque:
        newest = versions[-1]
        matching = {replica: row for replica, row in rows.items() if newest.matches(row)}
        if matching:
            values = _most_common(matching)
            return Reference(values, _holders(rows, values), Basis.LOG)
        if newest.whole:
            assert newest.record is not None  # one without a record is never the newest
            logged = {**(newest.values or {}), **dict(zip(known.key, newest.record.key, strict=True))}
            values = None if newest.values is None else {c: logged[c] for c in known.columns if c in logged}
            return Reference(values, (), Basis.LOG)
    if known.primary in rows:
        return Reference(rows[known.primary], _holders(rows, rows[known.primary]), Basis.PRIMARY)
    if (by_version := _newest_version(rows, known)) is not None:
        return by_version
    counts = Counter(map(_frozen, rows.values())).most_common(2)
    values = _most_common(rows)
    if len(counts) == 1 or counts[0][1] > counts[1][1]:
        return Reference(values, _holders(rows, values), Basis.MAJORITY)
    first = next(iter(rows.values()))
    return Reference(first, _holders(rows, first), Basis.FIRST)


def _newest_version(rows: Mapping[str, Row | None], known: Circumstances) -> Reference | None:
    """The row of the replicas whose version of it is the highest, if some are lower and those agree."""
    highest = max((known.clocks[replica].rank for replica in rows if replica in known.clocks), default=None)
    newest = [r for r in rows if r in known.clocks and known.clocks[r].rank == highest]
    if not newest or len(newest) == len(rows):
        return None
    # A row that was changed past replication is not what its version says, and may not even be there.
    as_told = [rows[replica] for replica in newest if (rows[replica] is None) == known.clocks[replica].deleted]
    if not as_told or any(row != as_told[0] for row in as_told):
        return None
    return Reference(as_told[0], _holders(rows, as_told[0]), Basis.NEWEST)


def _most_common(rows: Mapping[str, Row | None]) -> Row | None:
    winner = Counter(map(_frozen, rows.values())).most_common(1)[0][0]
    return next(row for row in rows.values() if _frozen(row) == winner)


def _frozen(row: Row | None) -> tuple[tuple[str, str | None], ...] | None:
    return None if row is None else tuple(row.items())


def _holders(rows: Mapping[str, Row | None], values: Row | None) -> tuple[str, ...]:
    return tuple(replica for replica, row in rows.items() if row == values)


def _kind(
    replica: str, row: Row | None, reference: Reference, versions: Sequence[LoggedVersion], known: Circumstances
) -> Kind:
    if _explained_by_lag(replica, row, versions, known):
        return Kind.IN_FLIGHT
    if row is None:
        return Kind.MISSING
    if reference.values is None:
        deleted = bool(versions) and versions[-1].values is None
        return Kind.DELETED_ELSEWHERE if deleted else Kind.EXTRA
    if any((value or "").startswith(NOT_OF_TYPE) for value in row.values()):
        return Kind.TYPE
    if any(version.matches(row) for version in versions[:-1] if version.values is not None):
        return Kind.STALE
    return Kind.CHANGED


def _explained_by_lag(replica: str, row: Row | None, versions: Sequence[LoggedVersion], known: Circumstances) -> bool:
    """True when the row is just what the log said at the replica's own position, and newer records follow."""
    position = (known.positions or {}).get(replica)
    if position is None or not versions:
        return False
    applied = [v for v in versions if v.record is None or v.record.number <= position]
    return len(applied) < len(versions) and bool(applied) and applied[-1].matches(row)


def _differing(row: Row | None, expected: Row | None) -> tuple[str, ...]:
    if row is None or expected is None:
        return ()
    return tuple(column for column, value in row.items() if column in expected and value != expected[column])


def _shown(row: Row | None) -> Row | None:
    if row is None:
        return None
    return {c: v.replace(NOT_OF_TYPE, "(not of the column's type) ") if v else v for c, v in row.items()}


def _cause(
    replica: str,
    kind: Kind,
    row: Row | None,
    reference: Reference,
    versions: Sequence[LoggedVersion],
    known: Circumstances,
) -> Cause | None:
    """The likeliest story. Without records of the row there is none to tell."""
    records = [version.record for version in versions if version.record is not None]
    noted = known.direct_writes.get(replica)
    if not records:
        if known.twin is not None and row is not None:
            return _told(
                f"{_DIFFERENTLY} the transaction wrote the row with key {', '.join(known.twin.key)}", known.twin.record
            )
        return Cause(f"changed outside replication: {noted}") if noted else None
    newest = records[-1]
    if kind is Kind.IN_FLIGHT:
        return _told("not applied here yet", newest)
    for record in reversed(records):
        if reason := known.rejected.get(replica, {}).get(record.tx):
            return _told(f"this replica could not apply the transaction: {reason}", record)
    held = next((v for v in reversed(versions) if v.matches(row)), None)
    wanted = next((v for v in reversed(versions) if v.matches(reference.values)), None)
    if held is not None and wanted is not None and held is not wanted:
        return _diverged(held, wanted, versions, known)
    volatile = next((r for r in reversed(records) if r.statement and volatile_part(r.statement)), None)
    if volatile is not None and (held is None or held.record is None):
        return _told(f"the statement is not deterministic: {volatile_part(volatile.statement)}", volatile)
    if held is not None and held is not versions[-1]:
        return _diverged(held, versions[-1], versions, known)
    told = [record for record in records if record.key] or records
    if noted:
        return _told(f"changed outside replication: {noted}; last known write", told[-1])
    if why := _why_different(replica, row, reference, versions, known):
        return _told(f"{_DIFFERENTLY} {why}", newest if newest.opaque else told[-1])
    return _told("no transaction in the log wrote this: changed outside replication; last known write", told[-1])


def _why_different(
    replica: str, row: Row | None, reference: Reference, versions: Sequence[LoggedVersion], known: Circumstances
) -> str:
    """How the last logged write may have led to this row; empty if it can't have."""
    newest = versions[-1]
    if newest.opaque:
        return "the result of its statement is not in the log"
    assert newest.record is not None
    if row is None or newest.values is None or newest.record.is_image:  # an image is written as it is
        return ""
    wrong = [c for c in row if c in newest.values and row[c] != newest.values[c]]
    has_triggers = replica in known.with_triggers
    if wrong:
        return f"the table has triggers here, which may have changed {', '.join(wrong)}" if has_triggers else ""
    others = [c for c in _differing(row, reference.values) if c not in newest.values]
    if others and set(others) <= set(newest.record.unknown):
        return f"the log does not hold what became of {', '.join(others)}"
    if others and versions[0].record is None and versions[0].values is None:  # all of the row came from the log
        return f"it left {', '.join(others)} to a default or a trigger"
    return f"the table has triggers here, which may have changed {', '.join(others)}" if has_triggers else ""


def _diverged(
    held: LoggedVersion, wanted: LoggedVersion, versions: Sequence[LoggedVersion], known: Circumstances
) -> Cause:
    """Two versions of the log, held by two replicas."""
    own, other = held.record, wanted.record
    if own is not None and other is not None and own.site != other.site:
        apart = abs(other.committed_at - own.committed_at)
        if apart <= CONFLICT_WINDOW:
            return _told(
                f"conflicting writes without resolution: {own.site} and {other.site} wrote the row at the same time "
                "and this replica kept the former",
                other,
            )
    later = next((v.record for v in versions[versions.index(held) + 1 :] if v.record is not None), None)
    missed = later or other or own
    assert missed is not None  # only the first version has no record, and it is not both of them
    if later is not None and later.opaque:
        return _told(f"{_DIFFERENTLY} the row is as it was before the statement", later)
    if known.exactly_once:
        return _told("applied here, as its position says, and undone since: changed outside replication", missed)
    return _told("a committed transaction was not applied here", missed)


def _told(summary: str, record: LogRecord) -> Cause:
    return Cause(summary, record.tx, record.site, record.number, record.committed_at)
