"""The names that row versions of a peer-to-peer set have for rows that a check knows by its own texts."""

from collections.abc import Iterable

import asyncpg

from adapters.postgres.sql.catalog import find_table
from adapters.postgres.sql.literals import TEXT_SETTINGS
from adapters.postgres.sql.row_sql import one_form_sql
from replication.conflicts.tables import key_text
from replication.tables.canonical import SESSION_SETTINGS
from replication.tables.endpoints import Key
from replication.tables.schema import CommonTable

_STYLE = "intervalstyle"  # the one setting in which the sessions of a check and those of agents write keys differently


async def clock_keys(connection: asyncpg.Connection, table: CommonTable, keys: Iterable[Key]) -> dict[str, Key]:
    """By name, the rows with these keys."""
    found, known = await find_table(connection, table.label), list(keys)
    kinds = [found.columns[column] for column in table.key]
    columns = zip(kinds, zip(*known, strict=True), strict=True) if known else ()
    texts = [[f"\\x{text}" if kind.is_bytes else text for text in column] for kind, column in columns]
    if not texts:
        return {}
    await connection.execute(f"SET LOCAL {_STYLE} = {TEXT_SETTINGS[_STYLE]}")
    try:
        rows = await connection.fetch(one_form_sql(kinds, stored=False), *texts)
    finally:
        await connection.execute(f"SET LOCAL {_STYLE} = {SESSION_SETTINGS[_STYLE]}")
    names = [key_text(dict(zip(table.key, row, strict=True))) for row in rows]
    return dict(zip(names, known, strict=True))
