"""The terminal's view of a record: one table of rows, one of figures, and what is missing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.report.shortfalls import shortfalls
from bench.results import Result

# Rows of different benchmarks hold different quantities: a column is shown when some row has it.
COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "tps": ("tps", lambda value: f"{value:,.0f}"),
    "tps_low": ("low", lambda value: f"{value:,.0f}"),
    "tps_high": ("high", lambda value: f"{value:,.0f}"),
    "p50_ms": ("p50 ms", lambda value: f"{value:.2f}"),
    "p95_ms": ("p95 ms", lambda value: f"{value:.2f}"),
    "p99_ms": ("p99 ms", lambda value: f"{value:.2f}"),
    "applied_tps": ("applied/s", lambda value: f"{value:,.0f}"),
    "aborted": ("aborted", str),
    "errors": ("errors", str),
    "fsyncs_per_tx": ("fsyncs/tx", lambda value: f"{value:.2f}"),
    "messages_per_tx": ("msg/tx", lambda value: f"{value:.2f}"),
    "bytes_per_tx": ("bytes/tx", lambda value: f"{value:,.0f}"),
    "settle_s": ("lag s", lambda value: f"{value:.2f}"),
    "cpu_cores": ("cores", lambda value: f"{sum(value.values()):.2f}"),
    "others_cores": ("others", lambda value: f"{value:.2f}"),
    "entries": ("entries", lambda value: f"{value:.1f}"),
    "deviation": ("deviation", lambda value: f"{value:.1f}"),
    "rows": ("rows", lambda value: f"{value:,}"),
    "seconds": ("seconds", lambda value: f"{value:.2f}"),
    "rows_per_s": ("rows/s", lambda value: f"{value:,}"),
    "peak_memory_mb": ("memory MB", lambda value: f"{value:,.0f}"),
    "runs": ("runs", str),
}
# Given up one after the other where a terminal is too narrow; the JSON and the page have them all.
EXPENDABLE = (
    "runs", "tps_high", "tps_low", "bytes_per_tx", "messages_per_tx", "cpu_cores", "applied_tps", "settle_s",
    "fsyncs_per_tx", "p99_ms", "others_cores",
)  # fmt: skip
WIDTH_WITHOUT_TERMINAL = 160


def print_table(record: Result) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_WITHOUT_TERMINAL)
    console.print(render(record, console))


def render(record: Result, console: Console) -> RenderableType:
    """Everything a reader needs to judge the figures, top down, as wide as the console allows."""
    parts: list[RenderableType] = [_rows_that_fit(record, console)]
    if record["figures"]:
        parts.append(_figures(record["figures"]))
        parts += [Text(f"not reached: {paragraph}", style="red") for paragraph in shortfalls(record)]
    for name, measure in record.get("measures", {}).items():
        parts.append(Text(f"{name}: {measure['median']:,.0f} ({measure['low']:,.0f}–{measure['high']:,.0f})"))
    for system, reason in record.get("missing", {}).items():
        parts.append(Text(f"not measured: {system}: {reason.splitlines()[0]}", style="yellow"))
    if record.get("left_out"):
        parts.append(Text("left out: " + "; ".join(record["left_out"]), style="yellow"))
    return Group(*parts)


def _rows_that_fit(record: Result, console: Console) -> Table:
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in record["rows"])]
    for key in (*EXPENDABLE, None):
        table = _rows(record, shown)
        if (
            key is None
            or console.measure(table, options=console.options.update(max_width=1000)).maximum <= console.width
        ):
            break
        shown = [other for other in shown if other != key]
    return table


def _rows(record: Result, shown: Sequence[str]) -> Table:
    rows, machine = record["rows"], record["machine"]
    caption = (
        f"{machine['cores']} cores, fdatasync {machine['fdatasync_us']} µs, load average {machine['load_average']}"
    )
    table = Table(title=f"tops bench {record['name']}", caption=caption)
    table.add_column("system", no_wrap=True)
    if len({row.get("workload") for row in rows}) > 1:
        table.add_column("workload", no_wrap=True)
    table.add_column("clients", justify="right", no_wrap=True)
    for key in shown:
        table.add_column(COLUMNS[key][0], justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        load_changes = number + 1 < len(rows) and _load(rows[number + 1]) != _load(row)
        cells = ["" if row.get(key) is None else COLUMNS[key][1](row[key]) for key in shown]
        workload = [row.get("workload", "")] if len(table.columns) > len(cells) + 2 else []
        table.add_row(row["system"], *workload, str(row.get("clients", "")), *cells, end_section=load_changes)
    return table


def _load(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row.get("workload"), row.get("clients")


def _figures(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="above 1 we are better")
    table.add_column("figure", overflow="fold")  # a narrow terminal folds the name and keeps the numbers
    for heading in ("ratio", "low", "high", "ours", "theirs", "pairs", "at least", "aim"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figure in figures.items():
        numbers = [f"{figure[key]:.2f}" for key in ("ratio", "low", "high")]
        sides = [f"{figure[key]:,.{0 if figure[key] >= 100 else 2}f}" for key in ("ours", "theirs")]
        least = figure.get("least", 1)
        style = "green" if figure["low"] > least else "red" if figure["high"] < least else ""
        goals = [f"{figure[key]:g}" if key in figure else "" for key in ("least", "aim")]
        table.add_row(name, *numbers, *sides, str(figure["runs"]), *goals, style=style)
    return table
