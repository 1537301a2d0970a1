"""Says what each difference is and what probably caused it; pure, from the versions seen and the log's records.

The reference of a row is what the log says it is; without a log, the primary's row, else what most replicas hold, else
the first replica's (and the difference says which of these it was).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from replication.divergence.canonical import NOT_OF_TYPE
from replication.divergence.model import Basis, Cause, Difference, Kind, Suspect
from replication.divergence.ports import LogRecord, Values

Row = dict[str, str | None]

CONFLICT_WINDOW = timedelta(seconds=10)
NOT_DETERMINISTIC = re.compile(
    r"\b(now|random|clock_timestamp|statement_timestamp|transaction_timestamp|timeofday|gen_random_uuid|uuidv[47]"
    r"|uuid_generate_v[14]|nextval|txid_current|pg_backend_pid|inet_server_addr)\s*\("
    r"|\bcurrent_(timestamp|date|time)\b|\blocaltime(stamp)?\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class LoggedVersion:
    """The row after one record, as far as the log still tells; `record` is None for what was before the first."""

    record: LogRecord | None
    values: Values | None  # None: no row
    whole: bool  # every column is known

    def matches(self, row: Row | None) -> bool:
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
    versions = logged_versions(records, known)
    reference = _reference(rows, versions, known)
    found = []
    for replica, row in rows.items():
        if row == reference.values:
            continue
        kind = _kind(replica, row, reference, versions, known)
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
                cause=_cause(replica, kind, row, versions),
            )
        )
    return found


def logged_versions(records: Sequence[LogRecord], known: Circumstances) -> list[LoggedVersion]:
    """The row's versions in the order of the log, up to the barrier; the one before the first record comes first."""
    kept = sorted((r for r in records if known.barrier is None or r.number <= known.barrier), key=lambda r: r.number)
    if not kept:
        return []
    versions = []
    if kept[0].old is not None or kept[0].new is not None:
        versions.append(LoggedVersion(None, kept[0].old, kept[0].old is None))
    for record in kept:
        before = versions[-1].values if versions else None
        values = None if record.new is None else {**(record.old or before or {}), **record.new}
        whole = values is None or set(known.columns) - set(known.key) <= set(values)
        versions.append(LoggedVersion(record, values, whole))
    return versions


def _row(version: Sequence[str | None] | None, known: Circumstances) -> Row | None:
    return None if version is None else dict(zip(known.columns, version, strict=True))


def _reference(rows: Mapping[str, Row | None], versions: Sequence[LoggedVersion], known: Circumstances) -> Reference:
    if versions:
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


def _cause(replica: str, kind: Kind, row: Row | None, versions: Sequence[LoggedVersion]) -> Cause | None:
    """The likeliest story. Without records of the row there is none to tell."""
    records = [version.record for version in versions if version.record is not None]
    if not records:
        return None
    newest = records[-1]
    if kind is Kind.IN_FLIGHT:
        return _told("not applied here yet", newest)
    held = next((i for i, version in reversed(list(enumerate(versions))) if version.matches(row)), None)
    if held is not None and held + 1 < len(versions):
        missed = versions[held + 1].record
        own = versions[held].record
        assert missed is not None  # only the first version has no record
        if own is not None and own.site != missed.site and missed.committed_at - own.committed_at <= CONFLICT_WINDOW:
            return _told(
                f"conflicting writes without resolution: {own.site} and {missed.site} wrote the row at the same time "
                "and this replica kept the former",
                missed,
            )
        return _told("a committed transaction was not applied here", missed)
    if match := NOT_DETERMINISTIC.search(newest.statement):
        return _told(f"the statement is not deterministic: {match[0].rstrip('(').strip()}", newest)
    return _told("no transaction in the log wrote this: changed outside replication; last known write", newest)


def _told(summary: str, record: LogRecord) -> Cause:
    return Cause(summary, record.tx, record.site, record.number, record.committed_at)
