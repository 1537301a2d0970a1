"""Draws which packages import which: `python docs/package_graph.py` writes `docs/pictures/packages.svg`.

Boxes are packages, a package below another one is imported by it. An import that follows from others is left out of
the picture, so that each arrow is needed. The tests check that the picture in the repository is the one of the code.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "pictures" / "packages.svg"
OURS = ("tops", "adapters", "replication")
DEEPER = {("adapters", "postgres")}
COLOURS = {"tops": "#dbe9f6", "adapters": "#e3f1dd", "replication": "#fbe8d3"}
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 176, 30, 18, 44, 16
TURN, TURN_WIDTH = "turn of an arrow to ", 4

Edges = Mapping[str, set[str]]  # imported packages, by importing package


def packages() -> dict[str, list[Path]]:
    """The modules of each package that is drawn, by the name of the package."""
    found: dict[str, list[Path]] = defaultdict(list)
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            folders = path.relative_to(ROOT).parts[:-1]
            if path.name in ("__init__.py", "__main__.py") and len(folders) == 1:
                continue  # facades, which no module behind them imports
            found[drawn(folders)].append(path)
    return dict(found)


def drawn(parts: Sequence[str]) -> str:
    """The package that stands for a module: two levels of names, or three where the packages of two form a cycle."""
    return ".".join(parts[: 3 if parts[:2] in DEEPER else 2])


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in OURS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(found: Mapping[str, list[Path]]) -> Edges:
    """Which package imports which."""
    used: dict[str, set[str]] = {name: set() for name in found}
    for name, paths in found.items():
        for module in (module for path in paths for module in imports(path)):
            parts = tuple(module.split("."))
            # The longest name is the package: what follows is a module of it, or what that defines.
            package = next((known for n in (3, 2, 1) if (known := drawn(parts[:n])) in found), None)
            if package is not None and package != name:
                used[name].add(package)
    return used


def reachable(start: str, used: Edges) -> set[str]:
    """All packages that an import leads to."""
    seen: set[str] = set()
    waiting = list(used[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(used[name])
    return seen


def reduced(used: Edges) -> Edges:
    """Without the imports that follow from others. A cycle, which a test forbids, would make this wrong."""
    beyond = {name: reachable(name, used) for name in used}
    return {
        name: {to for to in tos if not any(to in beyond[other] for other in tos - {to})} for name, tos in used.items()
    }


def rows(used: Edges) -> tuple[list[list[str]], Edges]:
    """What each row holds, and what is connected with what in the row below.

    A package is above everything that it imports. An arrow that is longer than a row is a chain of turns, one per row,
    so that it passes between boxes."""
    depth: dict[str, int] = {}

    def depth_of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((depth_of(to) for to in used[name]), default=-1)
        return depth[name]

    layers: list[list[str]] = [[] for _ in range(1 + max(depth_of(name) for name in used))]
    below: dict[str, set[str]] = defaultdict(set)
    for name in sorted(used):
        layers[depth[name]].append(name)
        for to in sorted(used[name]):
            upper = name
            for level in range(depth[name] - 1, depth[to], -1):
                turn = f"{TURN}{to} {level}"  # shared by all arrows to the same package
                if turn not in layers[level]:
                    layers[level].append(turn)
                below[upper].add(turn)
                upper = turn
            below[upper].add(to)
    return _untangled(layers, below)[::-1], below


def _untangled(layers: list[list[str]], below: Edges) -> list[list[str]]:
    """Each row in an order with few crossings: again and again everything moves towards its neighbours."""
    neighbours: dict[str, set[str]] = defaultdict(set)
    for upper, lowers in below.items():
        for lower in lowers:
            neighbours[upper].add(lower)
            neighbours[lower].add(upper)
    for sweep in range(48):
        at = {name: x for layer in layers for name, x in zip(layer, places(layer), strict=True)}
        for layer in layers if sweep % 2 else layers[::-1]:
            middle = {name: sum(sorted(at[n] for n in neighbours[name])) / len(neighbours[name]) for name in layer}
            layer.sort(key=lambda name: (middle[name], name))
            at.update(zip(layer, places(layer), strict=True))
    return layers


def width_of(name: str) -> float:
    return TURN_WIDTH if name.startswith(TURN) else WIDTH


def places(layer: Sequence[str]) -> list[float]:
    """The middles of what is in a row, around 0."""
    found, x = [], 0.0
    for name in layer:
        found.append(x + width_of(name) / 2)
        x += width_of(name) + GAP_X
    return [at - (x - GAP_X) / 2 for at in found]


def svg(used: Edges) -> str:
    """The picture."""
    layers, below = rows(used)
    span = max(max(places(layer)) + WIDTH / 2 for layer in layers)
    width, height = 2 * (span + MARGIN), len(layers) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    x = {name: at + width / 2 for layer in layers for name, at in zip(layer, places(layer), strict=True)}
    y = {name: MARGIN + row * (HEIGHT + GAP_Y) for row, layer in enumerate(layers) for name in layer}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
    ]
    for upper, lowers in sorted(below.items()):
        if upper.startswith(TURN):
            lines.append(line(x[upper], y[upper], x[upper], y[upper] + HEIGHT))
        for lower in sorted(lowers):
            lines.append(line(x[upper], y[upper] + HEIGHT, x[lower], y[lower], head=not lower.startswith(TURN)))
    lines += [box(name, x[name], y[name]) for layer in layers for name in layer if not name.startswith(TURN)]
    return "\n".join([*lines, "</svg>", ""])


def line(x1: float, y1: float, x2: float, y2: float, *, head: bool = False) -> str:
    middle = (y1 + y2) / 2
    path = f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
    marker = ' marker-end="url(#head)"' if head else ""
    return f'<path d="{path}" fill="none" stroke="#667" stroke-width="1.1"{marker}/>'


def box(name: str, x: float, y: float) -> str:
    colour = COLOURS[name.split(".")[0]]
    return (
        f'<rect x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
        f'fill="{colour}" stroke="#889"/>'
        f'<text x="{x:g}" y="{y + HEIGHT / 2 + 4.5:g}" text-anchor="middle" font-size="13" fill="#223">{name}</text>'
    )


def picture() -> str:
    """The picture of the packages as they are."""
    return svg(reduced(edges(packages())))


if __name__ == "__main__":
    PICTURE.write_text(picture())
