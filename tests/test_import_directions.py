"""Imports point one way: machines know no I/O, the middleware knows no database and no policy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMAND_LINE = ROOT / "tops" / "cli"
VOCABULARY = {
    "tops.constraints",
    "tops.digests",
    "tops.effects",
    "tops.errors",
    "tops.event_types",
    "tops.filters",
    "tops.ids",
    "tops.messages",
    "tops.records",
    "tops.sizes",
    "tops.transactions",
    "tops.value_sets",
}
# What a machine would read a clock, draw a number or reach the world with.
FORBIDDEN_IN_MACHINES = {
    "asyncio", "socket", "ssl", "selectors", "select", "threading", "multiprocessing", "concurrent", "subprocess",
    "signal", "time", "random", "secrets", "uuid", "os", "io", "pathlib", "shutil", "tempfile", "sqlite3", "logging",
    "aiohttp", "uvloop", "asyncpg", "typer", "rich",
}  # fmt: skip
FORBIDDEN_CALLS = {"now", "utcnow", "today", "urandom", "open", "print", "input"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


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


MACHINES = [p for p in modules("tops/core") if p.stat().st_size]


@pytest.mark.parametrize("path", MACHINES, ids=named)
def test_a_machine_knows_the_vocabulary_and_other_machines_and_nothing_of_the_world(path: Path) -> None:
    for name in imports(path):
        assert not under(name, *FORBIDDEN_IN_MACHINES), f"{name} in a machine"
        if under(name, "tops"):
            assert under(name, "tops.core", *VOCABULARY), f"{name} is no part of the vocabulary"


@pytest.mark.parametrize("path", MACHINES, ids=named)
def test_a_machine_reads_no_clock_and_waits_for_nothing(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith)
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            own = isinstance(node.func, ast.Attribute) and called in ("open", "print", "input")
            assert own or called not in FORBIDDEN_CALLS, f"{called}() in a machine"


@pytest.mark.parametrize("name", sorted(VOCABULARY))
def test_the_vocabulary_knows_nothing_but_itself(name: str) -> None:
    place = ROOT / name.replace(".", "/")
    paths = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]

    for imported in (name for path in paths for name in imports(path)):
        assert not under(imported, *FORBIDDEN_IN_MACHINES), imported
        if under(imported, "tops"):
            assert under(imported, *VOCABULARY), imported


def test_the_middleware_knows_neither_replication_nor_adapters_but_in_the_command_line() -> None:
    for path in modules("tops"):
        if COMMAND_LINE not in path.parents:
            for name in imports(path):
                assert not under(name, "replication", "adapters", "bench"), f"{path}: {name}"


def test_the_simulator_runs_machines_without_the_runtime_a_socket_or_the_wall_clock() -> None:
    for path in modules("tops/sim"):
        for name in imports(path):
            assert not under(name, "tops.runtime", "asyncio", "socket", "time", "aiohttp"), f"{path}: {name}"


def test_adapters_know_only_the_middleware_and_each_other() -> None:
    for path in modules("adapters"):
        for name in imports(path):
            assert not under(name, "replication", "bench"), f"{path}: {name}"
            assert not under(name, "tops.core", "tops.sim", "tops.cli"), f"{path}: {name}"


def test_replication_knows_no_socket() -> None:
    for path in modules("replication"):
        serves_http = path.stem.startswith("http")
        for name in imports(path):
            assert not under(name, "socket", "tops.sim", "tops.cli", "bench"), f"{path}: {name}"
            assert serves_http or not under(name, "aiohttp"), f"{path}: {name}"
