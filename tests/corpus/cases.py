"""The corpus as data: files of a schema and one line per case.

    schema:
    create table t (id int primary key, at timestamptz default now());

    cases:
    executed           | insert into t values ($1, $2) <- [1, "2026-01-01T00:00:00+00:00"]
    rejected default   | insert into t (id) values (2)
    failed 23505       | insert into t values (1, null)
    executed           | @delete t {"id": 1}

A case is SQL, or a row change behind an `@`; its arguments are JSON. Cases of a file run in their order on one state.
`python -m tests.corpus.record` writes down what happens now: read the difference before you keep it.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tops.changes import Change, Delete, Insert, Statement, Update, Upsert

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    expected: str  # executed, rejected REASON, failed SQLSTATE
    text: str
    line: int

    def as_line(self) -> str:
        return f"{self.expected:<26} | {self.text}"

    @property
    def change(self) -> Change:
        if self.text.startswith("@"):
            return _row_change(self.text[1:])
        sql, _, args = self.text.partition(" <- ")
        return Statement(sql, tuple(json.loads(args)) if args else ())


@dataclass(frozen=True, slots=True)
class Feature:
    """One file: a schema with its first rows, and what is done to it."""

    path: Path
    schema: str
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    def record(self, outcomes: list[str]) -> None:
        """Write the file again with these outcomes."""
        lines = self.path.read_text().splitlines()
        for case, outcome in zip(self.cases, outcomes, strict=True):
            lines[case.line] = replace(case, expected=outcome).as_line()
        self.path.write_text("\n".join(lines) + "\n")


def features() -> list[Feature]:
    return [_read(path) for path in sorted(FOLDER.glob("*.corpus"))]


def _read(path: Path) -> Feature:
    schema: list[str] = []
    cases: list[Case] = []
    part = ""
    for number, line in enumerate(path.read_text().splitlines()):
        if line in ("schema:", "cases:"):
            part = line
        elif part == "schema:":
            schema.append(line)
        elif part == "cases:" and line.strip() and not line.startswith("#"):
            expected, _, text = line.partition("|")
            cases.append(Case(" ".join(expected.split()), text.strip(), number))
    return Feature(path, "\n".join(schema), tuple(cases))


def _row_change(text: str) -> Change:
    verb, table, rest = text.split(" ", 2)
    parts: list[dict[str, Any]] = json.loads(f"[{rest}]")
    match verb:
        case "insert":
            return Insert(table, parts[0])
        case "update":
            return Update(table, parts[0], parts[1])
        case "add":
            return Update(table, parts[0], {}, parts[1])
        case "upsert":
            return Upsert(table, parts[0], parts[1])
        case "delete":
            return Delete(table, parts[0])
    raise ValueError(f"{verb!r} is no row change")
