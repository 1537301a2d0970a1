"""Imports point one way: nothing in `tops` but the command line's entry knows of replication or a database."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", sorted((ROOT / "tops").rglob("*.py")), ids=str)
def test_the_middleware_knows_neither_replication_nor_adapters(path: Path) -> None:
    assert imported(path) & {"replication", "adapters"} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "adapters").rglob("*.py")), ids=str)
def test_adapters_know_no_policy(path: Path) -> None:
    assert "replication" not in imported(path)
