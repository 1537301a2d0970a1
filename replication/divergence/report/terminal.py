"""The summary that a check prints."""

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replication.divergence.results.model import BASES, Basis, CheckResult, Difference, Kind, TableResult, Verdict

_STYLES = {Verdict.EQUAL: "bold green", Verdict.DIFFERENT: "bold red", Verdict.PARTIAL: "bold yellow"}
EXAMPLES_SHOWN = 10


def summary(result: CheckResult) -> RenderableType:
    parts: list[RenderableType] = [Text(result.headline, style=_STYLES[result.verdict])]
    parts += [Text(f"  not seen: {limit.reason}", style="yellow") for limit in result.limits]
    parts.append(_by_table(result))
    for table in result.tables:
        parts += [
            Text(f"{table.table}.{d.column}: " + ", ".join(f"{r} {t}" for r, t in d.definitions.items()), style="red")
            for d in table.schema
        ]
        parts += [Text(_line(d)) for d in table.examples[:EXAMPLES_SHOWN]]
    if bases := _bases(result):
        told = ", ".join(f"{BASES[basis]} {bases[basis]:,}" for basis in Basis if bases[basis])
        parts.append(Text(f"right by: {told} row(s)"))
    for cause, rows in _causes(result).most_common():
        parts.append(Text(f"{rows:>8,} row(s): {cause}"))
    parts.append(
        Text(
            f"{result.seconds['total']:.1f} s, Spark up after {result.seconds.get('spark start', 0):.1f} s, "
            f"peak memory {result.peak_memory_mb:,.0f} MB",
            style="dim",
        )
    )
    return Group(*parts)


def _by_table(result: CheckResult) -> Table:
    kinds = [kind for kind in Kind if any(_count(t, kind) for t in result.tables)]
    table = Table("table", "rows", "checksums", "buckets differing")
    for kind in kinds:
        table.add_column(kind.value, justify="right")
    for checked in result.tables:
        table.add_row(
            checked.table,
            f"{max(checked.rows.values(), default=0):,}",
            checked.method,
            f"{len(checked.buckets_differing):,} of {checked.buckets:,}",
            *(f"{_count(checked, kind):,}" for kind in kinds),
        )
    return table


def _count(table: TableResult, kind: Kind) -> int:
    return sum(kinds.get(kind.value, 0) for kinds in table.counts.values())


def _line(difference: Difference) -> str:
    key = ", ".join(difference.key)
    columns = f" ({', '.join(difference.columns)})" if difference.columns else ""
    return f"  {difference.table} [{key}] on {difference.replica}: {difference.kind.value}{columns}"


def _bases(result: CheckResult) -> Counter[str]:
    total: Counter[str] = Counter()
    for table in result.tables:
        total.update(table.bases)
    return total


def _causes(result: CheckResult) -> Counter[str]:
    total: Counter[str] = Counter()
    for table in result.tables:
        total.update(table.causes)
    return total
