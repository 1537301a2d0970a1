"""The corpus as data: files of a schema and one line per case.

    schema:
    create table t (id int primary key, at timestamptz default now());

    cases:
    executed           | executed                | insert into t values ($1, $2) <- [1, "2026-01-01T00:00:00+00:00"]
    rejected default   | executed                | insert into t (id) values (2)
    failed 23505       | failed 23505            | insert into t values (1, null)
    executed           | executed                | @delete t {"id": 1}
    rejected function  | executed ~              | delete from t where random() < 0.5
    executed           | executed                | @transaction ["delete from t", "insert into t values (1)"]

A case is SQL, a row change or a transaction behind an `@`; arguments are JSON. Cases of a file run in their order on
one state. The first column is what the proof makes of it: shipped to every replica as it stands, or rejected. The
second is what a replica set does, which executes once what is not proved; `; POLICY: outcome` behind it where policies
differ, and `~` where two plain PostgreSQL servers may differ in more than values.
`python -m tests.corpus.record` writes down what happens now: read the difference before you keep it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adapters.changes import Change, Delete, Insert, Statement, Update, Upsert

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    expected: str  # executed, rejected REASON, failed SQLSTATE
    in_set: str
    varies: bool
    text: str
    line: int

    def as_line(self) -> str:
        return f"{self.expected:<26} | {self.in_set + (' ~' if self.varies else ''):<26} | {self.text}"

    def under(self, policy: str) -> str:
        """What a set with that policy does."""
        usual, *others = self.in_set.split("; ")
        return dict(other.split(": ") for other in others).get(policy, usual)

    @property
    def is_transaction(self) -> bool:
        return self.text.startswith("@transaction ")

    @property
    def changes(self) -> tuple[Change, ...]:
        """One, unless it is a transaction."""
        if self.is_transaction:
            return tuple(_statement(text) for text in json.loads(self.text.removeprefix("@transaction ")))
        return (_row_change(self.text[1:]) if self.text.startswith("@") else _statement(self.text),)


@dataclass(frozen=True, slots=True)
class Feature:
    """One file: a schema with its first rows, and what is done to it."""

    path: Path
    schema: str
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    def record(self, outcomes: Sequence[str], in_set: Sequence[str] = ()) -> None:
        """Write the file again with these outcomes of the proof, and of sets."""
        lines = self.path.read_text().splitlines()
        in_set = in_set or [case.in_set for case in self.cases]
        for case, outcome, whole in zip(self.cases, outcomes, in_set, strict=True):
            lines[case.line] = replace(case, expected=outcome, in_set=whole).as_line()
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
            expected, in_set, text = (
                " ".join(part.split()) if place < 2 else part.strip() for place, part in enumerate(line.split("|", 2))
            )
            cases.append(Case(expected, in_set.removesuffix("~").strip(), in_set.endswith("~"), text, number))
    return Feature(path, "\n".join(schema), tuple(cases))


def _statement(text: str) -> Statement:
    sql, _, args = text.partition(" <- ")
    return Statement(sql, tuple(json.loads(args)) if args else ())


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
