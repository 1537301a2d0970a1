"""Rows by key, as images: the values of all columns that can be written, and a digest of the row's text."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import asyncpg

from adapters.changes import Row
from adapters.postgres.sql.catalog import Table
from adapters.postgres.sql.literals import identifier
from adapters.postgres.sql.row_sql import row_digest

Key = tuple[str, ...]  # the text of a row's key, one for all of its spellings


class Image(NamedTuple):
    """A row; two with the same digest have the same text in every column. `claimed` is the digest of its generated
    columns by functions of users, if it has any."""

    values: Row
    digest: str
    claimed: str = ""


async def images_of(connection: asyncpg.Connection, table: Table, keys: Iterable[Key]) -> dict[Key, Image]:
    """The rows with these keys that the connection's transaction sees."""
    asked = list(keys)
    columns = [[key[place] for key in asked] for place in range(len(table.key))]
    found: dict[Key, Image] = {}
    for record in await connection.fetch(_images_sql(table), *columns):
        place, digest, claimed, *values = record.values()
        found[asked[place - 1]] = Image(dict(zip(table.columns, values, strict=True)), digest, claimed)
    return found


async def one_spelling(connection: asyncpg.Connection, table: Table, keys: Sequence[Key]) -> list[Key]:
    """Each key, or an earlier one that is another spelling of it: where a text does not tell, the database does."""
    if len(keys) < 2:
        return list(keys)
    columns = [[key[place] for key in keys] for place in range(len(table.key))]
    first = {record["place"]: record["first"] for record in await connection.fetch(_spellings_sql(table), *columns)}
    return [keys[first[place] - 1] for place in range(1, len(keys) + 1)]


def _spellings_sql(table: Table) -> str:
    arrays, names = _arrays(table)
    values = ", ".join(f"k.c{place}::{table.columns[name].name}" for place, name in enumerate(table.key, 1))
    return (
        f"select k.place, first_value(k.place) over (partition by {values} order by k.place) as first "
        f"from unnest({arrays}) with ordinality as k({names}, place)"
    )


def claimed_digest(values: Iterable[str]) -> str:
    """SQL for the digest of generated columns, which are given as expressions; '' for none."""
    listed = ", ".join(values)
    return f"md5(row({listed})::text)" if listed else "''"


def _arrays(table: Table) -> tuple[str, str]:
    """Parameters with the texts of keys, a column each, and the columns' names."""
    places = range(1, len(table.key) + 1)
    return ", ".join(f"${place}::text[]" for place in places), ", ".join(f"c{place}" for place in places)


def _images_sql(table: Table) -> str:
    # Keys are matched by the index's own operator, whatever their text.
    arrays, names = _arrays(table)
    match = " and ".join(
        f"t.{identifier(name)} = k.c{place}::{table.columns[name].name}" for place, name in enumerate(table.key, 1)
    )
    columns = ", ".join(kind.readable(f"t.{identifier(name)}") for name, kind in table.columns.items())
    claimed = claimed_digest(f"t.{identifier(name)}" for name in table.claimed)
    return (
        f"select k.place, {row_digest(table, 't')}, {claimed}, {columns} "
        f"from unnest({arrays}) with ordinality as k({names}, place) join {table.sql_name} as t on {match}"
    )
