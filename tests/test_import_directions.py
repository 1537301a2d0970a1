"""Imports point one way: machines know no I/O, the middleware knows no database, packages form no cycle."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("tops", "adapters", "replication")
# What the modules of a package may import of ours besides their own package; a longer name goes before a shorter one.
ALLOWED: dict[str, tuple[str, ...]] = {
    "tops.model": (),
    "tops.protocol": ("tops.model",),
    "tops.core": ("tops.model", "tops.protocol"),
    "tops.security": ("tops.model", "tops.protocol"),
    "tops.journal": ("tops.model", "tops.protocol"),
    "tops.runtime": ("tops.model", "tops.protocol", "tops.core", "tops.security", "tops.journal"),
    "tops.http": ("tops.model", "tops.protocol", "tops.core", "tops.security", "tops.runtime"),
    "tops.client": (
        "tops.model", "tops.protocol", "tops.core", "tops.security", "tops.journal", "tops.runtime", "tops.http",
    ),
    "tops.server": (
        "tops.model", "tops.protocol", "tops.core", "tops.security", "tops.journal", "tops.runtime", "tops.http",
    ),
    "tops.sim": ("tops.model", "tops.protocol", "tops.core"),
    "tops.cli": ("tops",),
    "adapters": ("tops.model", "tops.runtime.in_turn"),
    "replication": ("tops", "adapters"),
}  # fmt: skip
# What a machine would read a clock, draw a number or reach the world with.
FORBIDDEN_IN_MACHINES = {
    "asyncio", "socket", "ssl", "selectors", "select", "threading", "multiprocessing", "concurrent", "subprocess",
    "signal", "time", "random", "secrets", "uuid", "os", "io", "pathlib", "shutil", "tempfile", "sqlite3", "logging",
    "aiohttp", "uvloop", "asyncpg", "typer", "rich",
}  # fmt: skip
FORBIDDEN_CALLS = {"now", "utcnow", "today", "urandom", "open", "print", "input"}

Edges = Mapping[str, set[str]]  # imported packages, by importing package


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relative to itself"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


PATHS = {name_of(path): path for folder in OURS for path in modules(folder)}
MACHINES = [path for path in modules("tops/core") if path.stat().st_size]
PURE = [*modules("tops/model"), *modules("tops/protocol"), *MACHINES]


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Of ours; a name that a module defines stands for the module."""
    found = (name if name in PATHS else name.rpartition(".")[0] for name in imports(path) if under(name, *OURS))
    return frozenset(name for name in found if name in PATHS)


def package_edges() -> Edges:
    """Which packages the modules of each package import. A package's own `__init__.py` is a facade for users, which
    no module behind it imports: it is a package of its own here."""
    edges: dict[str, set[str]] = defaultdict(set)
    for name, path in PATHS.items():
        for imported in imported_modules(path):
            importing, used = _package(name), _package(imported)
            if importing != used:
                edges[importing].add(used)
    return edges


def _package(name: str) -> str:
    return f"{name} (facade)" if PATHS[name].name == "__init__.py" else name.rpartition(".")[0]


def cycle_in(edges: Edges) -> list[str]:
    """One cycle of packages, in order; empty if there is none."""
    done: set[str] = set()

    def search(package: str, way: list[str]) -> list[str]:
        if package in way:
            return way[way.index(package) :]
        if package in done:
            return []
        for used in sorted(edges.get(package, ())):
            if found := search(used, [*way, package]):
                return found
        done.add(package)
        return []

    return next((found for package in sorted(edges) if (found := search(package, []))), [])


def test_packages_form_no_cycle() -> None:
    assert cycle_in(package_edges()) == []


@pytest.mark.parametrize(
    ("importing", "used"),
    [
        ("tops.http", "tops.server"),
        ("tops.runtime", "tops.http"),
        ("replication.conflicts", "replication.replica.apply"),
        ("replication.tables", "replication.divergence.results"),
        ("replication.replica.apply", "replication.divergence.check"),
        ("adapters.postgres.sql", "adapters.postgres.apply"),
    ],
)
def test_a_cycle_that_is_put_back_is_found(importing: str, used: str) -> None:
    edges = {package: set(packages) for package, packages in package_edges().items()}
    edges[importing].add(used)

    assert {importing, used} <= set(cycle_in(edges))


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_module_imports_only_what_its_layer_may(name: str) -> None:
    layer = max((package for package in ALLOWED if under(name, package)), key=len, default=None)
    if layer is None:
        assert name in ("tops", "tops.__main__"), f"{name} belongs to no layer"
        return
    for imported in imported_modules(PATHS[name]):
        assert under(imported, layer, *ALLOWED[layer]), f"{name} imports {imported}"


def named_by_strings(source: str) -> list[str]:
    """The other packages' modules that a source names in strings, for an import that no statement shows."""
    strings = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [text for text in strings if re.fullmatch(r"(replication|adapters|bench)(\.\w+)*(:\w+)?", text)]


@pytest.mark.parametrize("path", modules("tops"), ids=named)
def test_the_middleware_names_no_other_package(path: Path) -> None:
    assert named_by_strings(path.read_text()) == []


def test_an_import_by_name_that_is_put_back_is_found() -> None:
    assert named_by_strings('load("replication.http.sets")') == ["replication.http.sets"]


def strangers(users: Mapping[str, set[str]]) -> list[str]:
    """The modules of `tops` that only other layers use; `users`: who imports each module."""
    return [name for name, importing in users.items() if importing and not any(under(n, "tops") for n in importing)]


def users_of_the_middleware() -> dict[str, set[str]]:
    users: dict[str, set[str]] = {name: set() for name in PATHS if under(name, "tops")}
    for name, path in PATHS.items():
        for imported in imported_modules(path) & users.keys():
            users[imported].add(name)
    return users


def test_what_only_other_layers_use_is_no_part_of_the_middleware() -> None:
    assert strangers(users_of_the_middleware()) == []


def test_vocabulary_of_databases_that_is_put_back_into_the_middleware_is_found() -> None:
    users = users_of_the_middleware() | {"tops.changes": {"adapters.sqlite.work", "replication.client.writes"}}

    assert strangers(users) == ["tops.changes"]


@pytest.mark.parametrize("path", PURE, ids=named)
def test_a_machine_imports_nothing_that_reaches_the_world(path: Path) -> None:
    for name in imports(path):
        assert not under(name, *FORBIDDEN_IN_MACHINES), f"{name} in a machine"


@pytest.mark.parametrize("path", MACHINES, ids=named)
def test_a_machine_reads_no_clock_and_waits_for_nothing(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith)
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            own = isinstance(node.func, ast.Attribute) and called in ("open", "print", "input")
            assert own or called not in FORBIDDEN_CALLS, f"{called}() in a machine"


def test_the_simulator_runs_machines_without_a_socket_or_the_wall_clock() -> None:
    for path in modules("tops/sim"):
        for name in imports(path):
            assert not under(name, "asyncio", "socket", "time", "aiohttp"), f"{path}: {name}"


def test_replication_knows_no_socket_and_http_only_where_it_is_served() -> None:
    for path in modules("replication"):
        for name in imports(path):
            assert not under(name, "socket", "tops.sim", "tops.cli", "bench"), f"{path}: {name}"
            serves = "http" in path.parts or path.parts[-2:] == ("direct", "listener.py")
            assert serves or not under(name, "aiohttp"), f"{path}: {name}"
