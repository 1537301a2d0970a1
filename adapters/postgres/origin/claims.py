"""Whether generated columns have one value for the same row, where functions of users make them.

Write sets do not hold generated columns: each replica computes its own. PostgreSQL believes a function that says that
it is immutable. So another session computes the columns of new and changed rows again, as the agent, which is what
every replica does: a function that looks at a clock, at random numbers, at its user or at rows that others do not see
yet has another value there.
"""

from collections.abc import Mapping

import asyncpg

from adapters.postgres.origin.images import Image, Key, claimed_digest
from adapters.postgres.origin.write_set import Images
from adapters.postgres.sql.catalog import Table
from adapters.postgres.sql.literals import identifier, text_form
from adapters.postgres.sql.sqlstates import is_connection_loss


async def broken_claim(agent: asyncpg.Connection, table: Table, before: Images, after: Mapping[Key, Image]) -> str:
    """Why rows of this table can't be replicated; empty: they can. A value that stays was not computed."""
    if not table.claimed:
        return ""
    computed = [
        image for key, image in after.items() if (old := before.get(key)) is None or old.claimed != image.claimed
    ]
    if not computed or await _are_again(agent, table, computed):
        return ""
    names = ", ".join(table.claimed)
    return (
        f"generated columns of {table.sql_name} ({names}) have other values when they are computed again: a function "
        "that they use is not immutable, although it is declared so"
    )


async def _are_again(agent: asyncpg.Connection, table: Table, images: list[Image]) -> bool:
    columns = [
        [text_form(image.values[name], kind, read_once=True) for image in images]
        for name, kind in table.columns.items()
    ]
    try:
        records = await agent.fetch(_computed_sql(table), *columns)
    except asyncpg.PostgresError as error:
        if is_connection_loss(error):
            raise
        return False  # nor can it be computed where the rows are applied
    return [record["claimed"] for record in records] == [image.claimed for image in images]


def _computed_sql(table: Table) -> str:
    """The expressions name columns as they are: those of one relation that has no others."""
    kinds = list(table.columns.items())
    arrays = ", ".join(f"${place}::text[]" for place in range(1, len(kinds) + 1))
    texts = ", ".join(f"tops_{place}" for place in range(1, len(kinds) + 1))
    typed = ", ".join(
        f"k.tops_{place}::{kind.declared} as {identifier(name)}" for place, (name, kind) in enumerate(kinds, 1)
    )
    return (
        f"select {claimed_digest(table.claimed.values())} as claimed from (select {typed}, k.tops_place "
        f"from unnest({arrays}) with ordinality as k({texts}, tops_place)) as written order by tops_place"
    )
