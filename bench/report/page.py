"""One HTML page with the pictures inside: it can be mailed, kept and opened without anything else."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.report.shortfalls import shortfalls
from bench.results import Result

CAPTIONS = {
    "throughput": "Throughput: the bar is the median of the runs, the line on it their range. Blue is ours.",
    "latency": "Latency of one operation as a client sees it. Blue is ours.",
    "figures": "We against each peer, in alternating pairs. Orange is below what must be reached.",
    "growth": "Time over table sizes.",
    "phases": "Where the time of one operation goes.",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
figure { margin: 1rem 0 } img { max-width: 100% } figcaption, .note { color: #5f6c7b }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #dde3ea; text-align: right; white-space: nowrap }
th:first-child, td:first-child, .text td, .text th { text-align: left } .text td { white-space: normal }
th { color: #5f6c7b; font-weight: 600 }
"""
ROW_KEYS = (
    "system", "workload", "clients", "tps", "tps_low", "tps_high", "p50_ms", "p95_ms", "p99_ms",
    "rows", "seconds", "rows_per_s", "peak_memory_mb", "applied_tps", "settle_s", "aborted", "errors",
    "fsyncs_per_tx", "messages_per_tx", "bytes_per_tx", "others_cores", "load_average", "runs",
)  # fmt: skip
FIGURE_KEYS = ("ratio", "low", "high", "ours", "theirs", "runs", "least", "aim")


def write_page(record: Result, pictures: Sequence[Path], directory: Path) -> Path:
    """`NAME.html` beside the JSON; of the pictures, the SVG ones are embedded."""
    path = directory / f"{record['name']}.html"
    path.write_text(render(record, [picture for picture in pictures if picture.suffix == ".svg"]))
    return path


def render(record: Result, pictures: Sequence[Path]) -> str:
    """What was to be shown first, then all that was measured."""
    machine, rows = record["machine"], record["rows"]
    keys = [key for key in ROW_KEYS if any(row.get(key) is not None for row in rows)]
    figures = [[name, *(figure.get(key) for key in FIGURE_KEYS)] for name, figure in record["figures"].items()]
    measures = [[name, *measure.values()] for name, measure in record.get("measures", {}).items()]
    parts = [
        f"<h1>tops bench {escape(record['name'])}</h1>",
        f"<p class=note>{escape(_sentence(machine))} {escape(_sentence(record['versions']))}</p>",
        *(_notes("Not measured", [f"{name}: {why}" for name, why in record.get("missing", {}).items()])),
        *(_notes("Left out", record.get("left_out", []))),
        *(_picture(record["name"], path) for path in pictures if path.stem.endswith("-figures")),
        *(_table("Figures (above 1 we are better)", ["figure", *FIGURE_KEYS], figures)),
        *(f"<p>{escape(paragraph)}</p>" for paragraph in shortfalls(record)),
        *(_picture(record["name"], path) for path in pictures if not path.stem.endswith("-figures")),
        *(_table("Runs", keys, [[row.get(key) for key in keys] for row in rows])),
        *(_table("Other measures", ["measure", "median", "low", "high", "runs"], measures)),
        *(_table("CPU", ["system", "workload", "clients", "cores kept busy, by process"], _cpu(rows), "text")),
        *(_table("Phases", ["system", "workload", "clients", "ms per operation"], _phases(rows), "text")),
        *(_table("Systems", ["system", "what runs", "what “committed” promises"], _systems(record), "text")),
    ]
    head = f"<meta charset=utf-8><title>tops bench {escape(record['name'])}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang=en>{head}\n" + "\n".join(parts) + "\n</html>\n"


def _picture(name: str, path: Path) -> str:
    kind = path.stem.removeprefix(f"{name}-")
    # As an image, not inline: the ids inside two SVG files would meet in one document.
    data = base64.b64encode(path.read_bytes()).decode()
    caption = escape(CAPTIONS.get(kind, kind))
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _table(title: str, keys: Sequence[str], rows: Sequence[Sequence[object]], kind: str = "") -> list[str]:
    if not rows:
        return []
    head = "".join(f"<th>{escape(key.replace('_', ' '))}</th>" for key in keys)
    body = "".join("<tr>" + "".join(f"<td>{escape(_cell(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return [f"<h2>{escape(title)}</h2><table class='{kind}'><tr>{head}</tr>{body}</table>"]


def _cpu(rows: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    measured = [row for row in rows if row.get("cpu_cores")]
    return [[*_load(row), ", ".join(f"{role} {cores}" for role, cores in row["cpu_cores"].items())] for row in measured]


def _phases(rows: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    return [
        [*_load(row), ", ".join(f"{phase} {seconds * 1e3:.3f}" for phase, seconds in row["phases"].items())]
        for row in rows
        if row.get("phases")
    ]


def _load(row: Mapping[str, Any]) -> list[object]:
    return [row["system"], row.get("workload"), row.get("clients")]


def _systems(record: Result) -> list[list[object]]:
    return [[name, about["description"], about["promise"]] for name, about in record.get("systems", {}).items()]


def _notes(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<p class=note><b>{escape(title)}:</b> {escape('; '.join(lines))}</p>"] if lines else []


def _sentence(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()) + "."


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int | float) else str(value)
