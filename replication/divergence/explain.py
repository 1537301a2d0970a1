"""Says what each difference is and what probably caused it; pure, from the versions seen and the log's records.

The reference of a row is what the log says it is; without a log, the primary's row, else what most replicas hold, else
the first replica's (and the difference says which of these it was).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from replication.divergence.canonical import NOT_OF_TYPE
from replication.divergence.model import Basis, Cause, Difference, Kind, Suspect
from replication.divergence.ports import LogRecord, Values
from tops.changes import volatile_part

Row = dict[str, str | None]

CONFLICT_WINDOW = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class LoggedVersion:
    """The row after one record, as far as the log still tells; `record` is None for what was before the first."""

    record: LogRecord | None
    values: Values | None  # None: no row
    whole: bool  # every column is known

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
class Circumstances:
    """What is known of the replicas beside the rows."""

    columns: tuple[str, ...]
    key: tuple[str, ...]
    primary: str = ""
    barrier: int | None = None  # the log number that was read at
    positions: Mapping[str, int] | None = None  # how far each replica had applied, where one was behind
    leads: Mapping[str, Sequence[LogRecord]] = field(default_factory=dict)  # own writes of the row beyond the barrier
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # replica -> transaction -> why not applied
    log_decides: bool = True  # the log's last write of a row is what all should hold
    exactly_once: bool = False  # a replica's position is recorded in the transactions of the data

    def refused_by_all(self, tx: str) -> bool:
        return bool(self.refused) and all(tx in refused for refused in self.refused.values())


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
    records = [record for record in records if not known.refused_by_all(record.tx)]
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
            )
        )
    return found


def logged_versions(records: Sequence[LogRecord], known: Circumstances) -> list[LoggedVersion]:
    """The row's versions in the order of the log, up to the barrier; the one before the first record comes first."""
    within = (r for r in records if known.barrier is None or r.number <= known.barrier)
    kept = sorted(within, key=lambda r: (r.order, r.number))
    if not kept:
        return []
    versions = []
    if kept[0].old is not None or (kept[0].new is not None and kept[0].creates):
        versions.append(LoggedVersion(None, kept[0].old, kept[0].old is None))
    for record in kept:
        before = versions[-1].values if versions and not versions[-1].opaque else None
        if record.opaque:
            versions.append(LoggedVersion(record, {}, False))
            continue
        values = None if record.new is None else {**(record.old or before or {}), **record.new}
        if values is not None:
            values = {column: value for column, value in values.items() if column not in record.unknown}
        versions.append(LoggedVersion(record, values, values is None or _others(known) <= set(values)))
    return versions


def _others(known: Circumstances) -> set[str]:
    return set(known.columns) - set(known.key)


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
            keyed = dict(zip(known.key, _key_values(rows, known), strict=True))
            values = None if newest.values is None else {c: {**newest.values, **keyed}.get(c) for c in known.columns}
            return Reference(values, (), Basis.LOG)
    if known.primary in rows:
        return Reference(rows[known.primary], _holders(rows, rows[known.primary]), Basis.PRIMARY)
    counts = Counter(map(_frozen, rows.values())).most_common(2)
    values = _most_common(rows)
    if len(counts) == 1 or counts[0][1] > counts[1][1]:
        return Reference(values, _holders(rows, values), Basis.MAJORITY)
    first = next(iter(rows.values()))
    return Reference(first, _holders(rows, first), Basis.FIRST)


def _key_values(rows: Mapping[str, Row | None], known: Circumstances) -> tuple[str | None, ...]:
    some = next(row for row in rows.values() if row is not None)
    return tuple(some[column] for column in known.key)


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
    return tuple(column for column, value in row.items() if value != expected.get(column))


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
    if not records:
        return None
    newest = records[-1]
    if kind is Kind.IN_FLIGHT:
        return _told("not applied here yet", newest)
    for record in reversed(records):
        if reason := known.refused.get(replica, {}).get(record.tx):
            return _told(f"this replica could not apply the transaction: {_plain(reason)}", record)
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
    return _told("no transaction in the log wrote this: changed outside replication; last known write", told[-1])


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
    if known.exactly_once:
        return _told("applied here, as its position says, and undone since: changed outside replication", missed)
    return _told("a committed transaction was not applied here", missed)


def _plain(reason: str) -> str:
    return reason.strip('[]"')


def _told(summary: str, record: LogRecord) -> Cause:
    return Cause(summary, record.tx, record.site, record.number, record.committed_at)
