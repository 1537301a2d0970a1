"""Rows of a set beside those of two plain databases: what the two agree on is determined, and the same in the set.

Some columns differ between plain databases, such as those that a clock has filled. The others are compared as whole
rows, so that values that changed places between rows are noticed; where even those differ, because the order of rows
decides, each column is compared beside the first one, and by itself.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, str]  # a value's text by the name of its column, or by its place
Names = Sequence[str]
_SHOWN = 3


def named(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows that a statement has returned."""
    return [{name: repr(value) for name, value in row.items()} for row in rows]


def split(rows: Sequence[str]) -> list[Row]:
    """Rows as text, by place of their columns; a comma within a value makes more places in all databases alike."""
    return [{str(place): part for place, part in enumerate(row.split(","))} for row in rows]


def unlike(what: str, here: Sequence[Row], one: Sequence[Row], other: Sequence[Row]) -> str:
    """In what the set differs from plain databases although these agree; empty if in nothing."""
    if len(one) == len(other) != len(here):
        return f"{what}: {len(here)} rows in the set, {len(one)} in PostgreSQL"
    names = list(dict.fromkeys(name for row in (*one, *other, *here) for name in row))
    for name in names:
        counts = [sum(name in row for row in rows) for rows in (here, one, other)]
        if counts[1] == counts[2] != counts[0]:
            return f"{what}: column {name!r} has {counts[0]} values in the set, {counts[1]} in PostgreSQL"
    for group in _groups([name for name in names if _of(one, [name]) == _of(other, [name])]):
        mine, plain = _of(here, group), _of(one, group)
        if mine != plain == _of(other, group):
            only_here, only_there = list(mine - plain)[:_SHOWN], list(plain - mine)[:_SHOWN]
            return f"{what}: columns {group} are {only_here} only in the set, {only_there} only in PostgreSQL"
    return ""


def _groups(determined: Names) -> Iterator[Names]:
    yield from ([name] for name in determined)
    yield from ([determined[0], name] for name in determined[1:])
    yield determined


def _of(rows: Sequence[Row], names: Names) -> "Counter[tuple[str | None, ...]]":
    """These columns of all rows, in any order."""
    return Counter(tuple(row.get(name) for name in names) for row in rows)
