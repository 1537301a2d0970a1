"""The pictures of the report as inline SVG: no script, no font, no file beside the page."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape

from replication.divergence.results.model import Kind, TableResult

COLOURS: Mapping[str, str] = {
    Kind.MISSING.value: "#c0392b",
    Kind.EXTRA.value: "#8e44ad",
    Kind.CHANGED.value: "#e67e22",
    Kind.STALE.value: "#d4ac0d",
    Kind.IN_FLIGHT.value: "#2980b9",
    Kind.DELETED_ELSEWHERE.value: "#7f8c8d",
    Kind.TYPE.value: "#16a085",
}
LINES = ("#2563eb", "#db2777", "#059669", "#d97706", "#7c3aed", "#0891b2")
_WIDTH = 860


def kinds_of(table: TableResult) -> dict[str, int]:
    """Differing rows of a table by kind, over all replicas."""
    return {kind: n for kind in COLOURS if (n := sum(counts.get(kind, 0) for counts in table.counts.values()))}


def bars(rows: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    """One stacked bar per row, in the colours of the kinds."""
    largest = max((sum(parts.values()) for _, parts in rows), default=0)
    if not largest:
        return ""
    label, bar, height = 190, _WIDTH - 190 - 150, 30
    body = []
    for index, (name, parts) in enumerate(rows):
        y, x = index * height + 4, float(label)
        body.append(
            f'<text x="{label - 10}" y="{y + 15}" text-anchor="end">{escape(_short(name))}'
            f"<title>{escape(name)}</title></text>"
        )
        for kind, count in parts.items():
            width = max(2.0, bar * count / largest)
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" rx="2" fill="{COLOURS[kind]}">'
                f"<title>{escape(name)}: {count:,} {escape(kind)}</title></rect>"
            )
            x += width
        body.append(f'<text x="{x + 8:.1f}" y="{y + 15}" class="n">{_total(parts)}</text>')
    return _svg(len(rows) * height + 4, body)


def _short(name: str, longest: int = 24) -> str:
    """The end of a long name tells more than its beginning."""
    return name if len(name) <= longest else "…" + name[1 - longest :]


def _total(parts: Mapping[str, int]) -> str:
    """What is in flight is no difference, and is counted by itself."""
    moving = parts.get(Kind.IN_FLIGHT.value, 0)
    return f"{sum(parts.values()) - moving:,}" + (f" + {moving:,} in flight" if moving else "")


def heat_strip(table: TableResult, cells: int = 120) -> str:
    """Where in the table the differences are: from its first bucket to its last, darker is more."""
    found = {b.bucket: b.differences for b in table.buckets_differing if b.differences}
    if not found:
        return ""
    low, high = min([*table.bucket_ends, *found]), max([*table.bucket_ends, *found])
    step = max(1, -(-(high - low + 1) // cells))
    sums = [0] * cells
    for bucket, count in found.items():
        sums[(bucket - low) // step] += count
    used = -(-(high - low + 1) // step)
    width, largest = _WIDTH / used, max(sums)
    body = []
    for index, count in enumerate(sums[:used]):
        opacity = 0.15 + 0.85 * count / largest if count else 0.0
        first = low + index * step
        body.append(
            f'<rect x="{index * width:.2f}" y="0" width="{max(1.0, width - 1):.2f}" height="26" fill="#f1f5f9"/>'
            f'<rect x="{index * width:.2f}" y="0" width="{max(1.0, width - 1):.2f}" height="26" fill="#c0392b" '
            f'fill-opacity="{opacity:.2f}"><title>buckets {first:,} to {first + step - 1:,}: {count:,} differing '
            "rows</title></rect>"
        )
    body.append(f'<text x="0" y="42" class="n">bucket {low:,}</text>')
    body.append(f'<text x="{_WIDTH}" y="42" class="n" text-anchor="end">bucket {high:,}</text>')
    return _svg(48, body)


def lines(series: Mapping[str, Sequence[tuple[datetime, float]]], unit: str) -> str:
    """One line per replica over time."""
    points = [point for line in series.values() for point in line]
    if len({at for at, _ in points}) < 2:
        return ""
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    highest = max(max(value for _, value in points), 1.0)
    left, top, width, height = 60, 10, _WIDTH - 70, 150
    body = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="#f8fafc"/>']
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        body.append(f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#e2e8f0"/>')
        body.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" class="n">{highest * share:,.0f}</text>')
    for index, (name, line) in enumerate(series.items()):
        colour = LINES[index % len(LINES)]
        spots = [
            (left + width * ((at - first) / (last - first)), top + height * (1 - value / highest))
            for at, value in sorted(line)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        body.append(
            f'<rect x="{left + index * 110}" y="{top + height + 26}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{left + index * 110 + 18}" y="{top + height + 36}">{escape(name)}</text>'
        )
    body.append(f'<text x="{left}" y="{top + height + 16}" class="n">{first:%Y-%m-%d %H:%M}</text>')
    body.append(
        f'<text x="{left + width}" y="{top + height + 16}" class="n" text-anchor="end">{last:%Y-%m-%d %H:%M}</text>'
    )
    body.append(f'<text x="{left + width}" y="{top + height + 36}" class="n" text-anchor="end">{escape(unit)}</text>')
    return _svg(top + height + 44, body)


def _svg(height: int, body: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" width="100%">{"".join(body)}</svg>'
