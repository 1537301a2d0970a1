"""One self-contained HTML page that a DBA can forward."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from replication.divergence.report import charts
from replication.divergence.results.model import BASES, Basis, CheckResult, Difference, Kind, TableResult

EXAMPLES_MAX = 40
COLUMNS_SHOWN = 8


def render(result: CheckResult, history: pa.Table | None = None) -> str:
    """The page; `history` is the set's earlier checks, for what changes over time."""
    environment = Environment(loader=PackageLoader("replication.divergence.report", "."), autoescape=True)
    environment.filters["visible"] = _visible
    names = [replica.name for replica in result.replicas]
    pairs = _pairs(result.tables)
    return environment.get_template("page.html.j2").render(
        result=result,
        names=names,
        rows_of=_rows_of(result.tables),
        rows_compared=sum(sum(table.rows.values()) for table in result.tables),
        differing_of={name: _differing(_kinds(result.tables, name)) for name in names},
        pairs=pairs,
        heat=_heat(pairs),
        colours=charts.COLOURS,
        kinds_found={kind for table in result.tables for kind in charts.kinds_of(table)},
        by_table=Markup(charts.bars([(t.table, charts.kinds_of(t)) for t in result.tables])),  # noqa: S704
        by_replica=Markup(charts.bars([(name, _kinds(result.tables, name)) for name in names])),  # noqa: S704
        strips=[(t, Markup(strip)) for t in result.tables if (strip := charts.heat_strip(t))],  # noqa: S704
        causes=_causes(result.tables),
        schema_differences=[d for table in result.tables for d in table.schema],
        examples=list(_examples(result.tables)),
        basis={basis.value: text for basis, text in BASES.items()},
        sources=_sources(result.tables),
        over_time=Markup(charts.lines(_series(history, "differences"), "differing rows")),  # noqa: S704
        lag=Markup(charts.lines(_lag(history), "log entries")),  # noqa: S704
    )


def _visible(value: str) -> str:
    """A value whose blanks at the ends can be seen."""
    inner = value.strip(" ")
    if not inner:
        return "␣" * len(value)
    before, _, after = value.partition(inner)
    return "␣" * len(before) + inner + "␣" * len(after)


def _rows_of(tables: Sequence[TableResult]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for table in tables:
        total.update(table.rows)
    return dict(total)


def _kinds(tables: Sequence[TableResult], replica: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for table in tables:
        total.update(table.counts.get(replica, {}))
    return {kind: total[kind] for kind in charts.COLOURS if total[kind]}


def _differing(kinds: Mapping[str, int]) -> int:
    return sum(n for kind, n in kinds.items() if kind != Kind.IN_FLIGHT)


def _pairs(tables: Sequence[TableResult]) -> dict[str, Counter[str]]:
    total: dict[str, Counter[str]] = {}
    for table in tables:
        for one, others in table.pairs.items():
            total.setdefault(one, Counter()).update(others)
    return total


def _heat(pairs: Mapping[str, Mapping[str, int]]) -> Any:
    largest = max((n for others in pairs.values() for n in others.values()), default=0)

    def colour(count: int) -> str:
        return f"rgba(192, 57, 43, {0.15 + 0.5 * count / largest:.2f})" if count else "#dcfce7"

    return colour


def _sources(tables: Sequence[TableResult]) -> list[tuple[str, int]]:
    rows: Counter[str] = Counter()
    for table in tables:
        rows.update(table.bases)
    return [(BASES[basis], rows[basis]) for basis in Basis if rows[basis]]


def _causes(tables: Sequence[TableResult]) -> list[dict[str, Any]]:
    rows: Counter[str] = Counter()
    for table in tables:
        rows.update(table.causes)
    examples = {d.cause.summary: d.cause for t in tables for d in t.examples if d.cause is not None}
    return [{"summary": s, "rows": n, "example": examples.get(s)} for s, n in rows.most_common()]


def _examples(tables: Sequence[TableResult]) -> Iterator[dict[str, Any]]:
    every = [difference for table in tables for difference in table.examples]
    for difference in every[:EXAMPLES_MAX]:
        fields = {name: getattr(difference, name) for name in difference.__struct_fields__}
        yield {
            **fields,
            "shown": _shown(difference),
            "sides": (("expected", difference.expected, "ok"), ("found", difference.actual, "off")),
        }


def _shown(difference: Difference) -> list[str]:
    """Differing columns first, then as many others as fit."""
    columns = list(difference.expected or difference.actual or {})
    others = [column for column in columns if column not in difference.columns]
    chosen = {*difference.columns, *others[: max(0, COLUMNS_SHOWN - len(difference.columns))]}
    return [column for column in columns if column in chosen]


def _series(history: pa.Table | None, column: str) -> dict[str, list[tuple[datetime, float]]]:
    sums: dict[str, Counter[datetime]] = {}
    for row in history.to_pylist() if history is not None else []:
        if row[column] is not None:
            sums.setdefault(row["replica"], Counter())[row["started_at"]] += row[column]
    return {replica: sorted(by_time.items()) for replica, by_time in sums.items()}


def _lag(history: pa.Table | None) -> dict[str, list[tuple[datetime, float]]]:
    """Log entries that each replica was behind when the check came, where there is a log."""
    found: dict[str, dict[datetime, float]] = {}
    for row in history.to_pylist() if history is not None else []:
        if row["lag_entries"] is not None:
            found.setdefault(row["replica"], {})[row["started_at"]] = row["lag_entries"]
    return {replica: sorted(by_time.items()) for replica, by_time in found.items()}
