"""How fingerprints of one set differ, said so that a DBA can act on it."""

from collections.abc import Mapping, Sequence

import msgspec

from replication.replica.start.fingerprint import NO_CHECKSUM, Fingerprint, TableDetail

SHOWN_MAX = 5  # differences that a reason names; the rest is counted
LINES_MAX = 3
CURE = "make them equal, or empty all but one and name that one as `seed`"


class Difference(msgspec.Struct, frozen=True, order=True):
    """`table` is empty for what concerns the servers."""

    table: str
    kind: str  # server, missing, schema, rows, data
    text: str


def differences(found: Mapping[str, Fingerprint], tables: Sequence[str] = ()) -> list[Difference]:
    """All differences between replicas, by their names; `tables` must exist everywhere even if no replica has them."""
    names = sorted(found)
    differing = [_server(fact, found, names) for fact in sorted({fact for f in found.values() for fact in f.server})]
    for table in sorted({*tables, *(table for f in found.values() for table in f.tables)}):
        differing.append(_table(table, found, names))
    return [difference for difference in differing if difference is not None]


def _server(fact: str, found: Mapping[str, Fingerprint], names: Sequence[str]) -> Difference | None:
    values = {name: found[name].server.get(fact, "") for name in names}
    if len(set(values.values())) == 1:
        return None
    return Difference("", "server", f"the servers differ in {fact}: {_by_value(values)}")


def _table(table: str, found: Mapping[str, Fingerprint], names: Sequence[str]) -> Difference | None:
    lacking = [name for name in names if table not in found[name].tables]
    if lacking:
        where = f" and exists on {', '.join(n for n in names if n not in lacking)}" if len(lacking) < len(names) else ""
        return Difference(table, "missing", f"table {table} is missing on {', '.join(lacking)}{where}")
    digests = {name: found[name].tables[table] for name in names}
    if len({digest.schema for digest in digests.values()}) > 1:
        groups = _by_value({name: digest.schema for name, digest in digests.items()}, shown=False)
        return Difference(table, "schema", f"table {table} is defined differently on {groups}")
    if len({digest.rows for digest in digests.values()}) > 1:
        counts = ", ".join(f"{digests[name].rows:,} on {name}" for name in names)
        return Difference(table, "rows", f"table {table} has different numbers of rows: {counts}")
    data = {name: digest.data for name, digest in digests.items() if digest.data != NO_CHECKSUM}
    if len(set(data.values())) > 1:
        groups = _by_value(data, shown=False)
        rows = digests[names[0]].rows
        return Difference(table, "data", f"table {table} has {rows:,} rows everywhere, but different ones on {groups}")
    return None


def _by_value(values: Mapping[str, str], *, shown: bool = True) -> str:
    """Replicas with the same value together: `16 on r1, r2; 15 on r3`, or `r1, r2 and r3`."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    if shown:
        return "; ".join(f"{value} on {', '.join(members)}" for value, members in groups.items())
    return " and ".join(", ".join(members) for members in groups.values())


def warnings(found: Mapping[str, Fingerprint]) -> list[str]:
    """What may make results differ later, though the data are equal."""
    told = []
    for fact in sorted({fact for f in found.values() for fact in f.libraries}):
        values = {name: found[name].libraries.get(fact, "") for name in sorted(found)}
        if len(set(values.values())) > 1:
            told.append(f"the servers differ in {fact}: {_by_value(values)}")
    return told


def explained(difference: Difference, details: Mapping[str, TableDetail]) -> str:
    """The difference with what its table's details add: the lines of the schema, or the first keys that differ."""
    if len(details) < 2:
        return difference.text
    match difference.kind:
        case "schema":
            return f"{difference.text}: {_lines(details)}"
        case "rows" | "data":
            return f"{difference.text}{_first_range(details)}"
    return difference.text


def _lines(details: Mapping[str, TableDetail]) -> str:
    shared = set.intersection(*(set(detail.lines) for detail in details.values()))
    odd = [
        f"{name} has {'; '.join(own[:LINES_MAX])}{' …' if len(own) > LINES_MAX else ''}"
        for name, detail in sorted(details.items())
        if (own := [line for line in detail.lines if line not in shared])
    ]
    return ", ".join(odd) or "the same lines in another order"


def _first_range(details: Mapping[str, TableDetail]) -> str:
    """Where integer keys begin to differ; nothing for other keys, whose buckets say nothing to a reader."""
    shifts = {detail.shift for detail in details.values()}
    if len(shifts) != 1 or None in shifts:
        return ""
    shift = next(iter(shifts)) or 0
    for bucket in sorted({bucket for detail in details.values() for bucket in detail.buckets}):
        sums = {name: detail.buckets.get(bucket, (0, "")) for name, detail in sorted(details.items())}
        if len(set(sums.values())) > 1:
            counts = ", ".join(f"{rows:,} on {name}" for name, (rows, _) in sums.items())
            keys = f"keys {bucket << shift} to {((bucket + 1) << shift) - 1}"
            return f"; the first difference is within {keys} ({counts})"
    return ""


def reason(texts: Sequence[str], seed: str | None = None) -> str:
    """Some differences in one sentence, with what to do."""
    cure = f"empty those that shall be a copy of the seed {seed}, or run them with --overwrite" if seed else CURE
    more = f"; and {len(texts) - SHOWN_MAX} more" if len(texts) > SHOWN_MAX else ""
    return f"the databases differ: {'; '.join(texts[:SHOWN_MAX])}{more}: {cure}"
