"""A record as pictures. A row of panels per workload, a panel per number of clients, a line per system: eight systems
need no eight colours."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from bench.results import Result
from bench.systems import PHASES

INK, MUTED, GRID = "#1f2933", "#5f6c7b", "#dde3ea"
PEER, OURS, WORSE = "#8fa3b8", "#1f6fb2", "#c2571a"
PHASE_COLOURS = (
    "#1f6fb2", "#5aa9a3", "#e0a63b", "#c2571a", "#7d5ba6", "#4c7a34",
    "#a34a6b", "#8fa3b8", "#20456b", "#9bc4a0", "#6b4f2a", "#c9a3c9",
)  # fmt: skip
LEGEND_INCHES = 1.2  # of a column
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "ytick.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "svg.hashsalt": "tops",  # the same record gives the same file
}

Row = Mapping[str, Any]
Bar = tuple[int, Row, str]  # its place from below, what it shows, its colour


def draw(record: Result, directory: Path) -> list[Path]:
    """`NAME-throughput`, `-latency`, `-figures`, `-growth`, `-phases` as PNG and SVG, where there is data for it."""
    directory.mkdir(parents=True, exist_ok=True)
    ours = {name.split(".")[0] for name in record["figures"]} | set(record.get("ours", ()))
    written: list[Path] = []
    with mpl.rc_context(STYLE):
        for kind, picture in _pictures(record, ours).items():
            for suffix in ("png", "svg"):
                path = directory / f"{record['name']}-{kind}.{suffix}"
                picture.savefig(path, dpi=144, metadata={"Date": None} if suffix == "svg" else None)
                written.append(path)
    return written


def _pictures(record: Result, ours: set[str]) -> dict[str, Figure]:
    rows, pictures = record["rows"], dict[str, Figure]()
    if paced := [row for row in rows if row.get("tps") is not None]:
        pictures["throughput"] = _panels(paced, ours, _throughput, "transactions per second")
    if timed := [row for row in rows if row.get("p50_ms") is not None and row.get("p95_ms") is not None]:
        pictures["latency"] = _panels(timed, ours, _latency, "ms: dot p50, bar to p95, tick p99 (logarithmic)")
    if record["figures"]:
        pictures["figures"] = _ratios(record["figures"])
    if sized := _by_size(rows):
        pictures["growth"] = _growth(sized, ours)
    if any(row.get("phases") for row in rows):
        pictures["phases"] = _phases([row for row in rows if row.get("phases")])
    return pictures


def _panels(rows: Sequence[Row], ours: set[str], panel: Callable[[Axes, list[Bar]], None], label: str) -> Figure:
    """The systems below each other, in the record's order, the same in all panels of a workload."""
    workloads = list(dict.fromkeys(row.get("workload", "") for row in rows))
    clients = sorted({_clients(row) for row in rows})
    lines = [list(dict.fromkeys(r["system"] for r in rows if r.get("workload", "") == w))[::-1] for w in workloads]
    heights = [0.5 + 0.34 * len(systems) for systems in lines]
    figure = Figure(figsize=(2.2 + 2.9 * len(clients), 0.7 + sum(heights)), layout="constrained")
    grid = figure.subplots(
        len(workloads), len(clients), sharey="row", squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axes, workload, systems in zip(grid, workloads, lines, strict=True):
        for ax, number in zip(axes, clients, strict=True):
            shown = [row for row in rows if (row.get("workload", ""), _clients(row)) == (workload, number)]
            if not shown:
                ax.set_visible(False)
                continue
            title = f"{workload}  {number} client{'s' if number != 1 else ''}".strip()
            ax.set_title(title, loc="left", fontsize=10)
            ax.set_yticks(range(len(systems)), systems)
            ax.set_ylim(-0.6, len(systems) - 0.4)
            ax.grid(axis="y", visible=False)
            panel(ax, [(systems.index(row["system"]), row, OURS if row["system"] in ours else PEER) for row in shown])
    figure.supxlabel(label, fontsize=9, color=MUTED)
    return figure


def _throughput(ax: Axes, bars: list[Bar]) -> None:
    for place, row, colour in bars:
        low, high = row.get("tps_low") or row["tps"], row.get("tps_high") or row["tps"]
        ax.barh(place, row["tps"], height=0.62, color=colour)
        ax.plot([low, high], [place, place], color=INK, linewidth=1)
        ax.annotate(f"{row['tps']:,.0f}", (high, place), xytext=(4, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, 1.25 * max(row.get("tps_high") or row["tps"] for _, row, _ in bars))  # room for the numbers
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _latency(ax: Axes, bars: list[Bar]) -> None:
    ax.set_xscale("log")
    for place, row, colour in bars:
        last = row.get("p99_ms") or row["p95_ms"]
        ax.plot([row["p50_ms"], row["p95_ms"]], [place, place], color=colour, linewidth=5, solid_capstyle="butt")
        ax.plot(row["p50_ms"], place, marker="o", color=colour, markeredgecolor="white", markersize=8)
        ax.plot(last, place, marker="|", color=colour, markersize=10)
        label = f"{row['p50_ms']:.3g} / {row['p95_ms']:.3g}"
        ax.annotate(label, (last, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    low, high = min(row["p50_ms"] for _, row, _ in bars), max(row.get("p99_ms") or row["p95_ms"] for _, row, _ in bars)
    ax.set_xlim(low * 0.8, high * (high / low) ** 0.45)  # room for the numbers, whatever the span
    _plain_logarithmic(ax)


def _clients(row: Row) -> int:
    return int(row.get("clients", 1))


def _plain_logarithmic(ax: Axes) -> None:
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _ratios(figures: Mapping[str, Row]) -> Figure:
    """Each figure with its range; right of the line we are better. A tick marks what must be reached."""
    names = list(figures)[::-1]
    picture = Figure(figsize=(8, 1.2 + 0.3 * len(names)), layout="constrained")
    ax = picture.subplots()
    ax.set_xscale("log")
    ax.axvline(1, color=INK, linewidth=1)
    for place, name in enumerate(names):
        figure = figures[name]
        least = figure.get("least", 1)
        colour = OURS if figure["ratio"] >= least else WORSE
        ax.plot([figure["low"], figure["high"]], [place, place], color=colour, linewidth=2)
        ax.plot(figure["ratio"], place, marker="o", color=colour, markersize=7)
        label = f"{figure['ratio']:.2f} ×"
        if "least" in figure:
            ax.plot(least, place, marker="|", color=INK, markersize=13, markeredgewidth=1.5)
            label += f" of {least:g}"
        ax.annotate(label, (max(figure["high"], least), place), xytext=(6, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.2)
    _plain_logarithmic(ax)
    ax.set_xlabel("median of the pairs with worst and best; above 1 we are better; | must be reached")
    return picture


def _by_size(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Seconds over table sizes, for the systems that were run on enough of them to show a curve."""
    sized: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get("seconds") is not None and row.get("rows") is not None:
            sized.setdefault(row["system"], []).append((row["rows"], row["seconds"]))
    return {system: sorted(points) for system, points in sized.items() if len(points) > 2}


def _growth(sized: Mapping[str, list[tuple[int, float]]], ours: set[str]) -> Figure:
    picture = Figure(figsize=(6, 3.4), layout="constrained")
    ax = picture.subplots()
    for system, points in sized.items():
        sizes, seconds = zip(*points, strict=True)
        ax.plot(sizes, seconds, marker="o", color=OURS if system in ours else PEER, label=system)
        for size, second in points:
            ax.annotate(f"{second:.1f} s", (size, second), xytext=(6, -10), textcoords="offset points", fontsize=8)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g} M"))
    ax.set_xlabel("rows of each table")
    ax.set_ylabel("seconds")
    ax.legend(frameon=False)
    return picture


def _phases(rows: Sequence[Row]) -> Figure:
    """Where the time of one operation goes: a stacked bar per system and load."""
    found = dict.fromkeys(phase for row in rows for phase in row["phases"])
    phases = [phase for phase in PHASES if phase in found] + [phase for phase in found if phase not in PHASES]
    colours = {phase: PHASE_COLOURS[number % len(PHASE_COLOURS)] for number, phase in enumerate(phases)}

    def stacked(ax: Axes, bars: list[Bar]) -> None:
        for place, row, _ in bars:
            left = 0.0
            for phase in phases:
                width = row["phases"].get(phase, 0.0) * 1e3
                ax.barh(place, width, left=left, height=0.62, color=colours[phase], edgecolor="white", linewidth=0.5)
                left += width
            ax.annotate(f"{left:.3g}", (left, place), xytext=(4, 0), textcoords="offset points", va="center")
        ax.set_xlim(0, 1.2 * max(sum(row["phases"].values()) * 1e3 for _, row, _ in bars))
        ax.xaxis.set_major_locator(MaxNLocator(4))

    picture = _panels(rows, set(), stacked, "ms per operation")
    handles = [Patch(color=colours[phase], label=phase) for phase in phases]
    columns = min(len(phases), max(2, int(picture.get_figwidth() / LEGEND_INCHES)))
    picture.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)
    return picture
