"""How repairs write rows: as images, which are what triggers, rules and referential actions have made of them already.

Where a table has any of these, the row is written in replica mode, in which none of them runs. PostgreSQL checks no
foreign key and no deferrable constraint then, so these are checked by query.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import asyncpg

from adapters import changes as rows
from adapters.postgres.apply import replica_mode
from adapters.postgres.apply.replica_mode import ReplicaMode, Violation
from adapters.postgres.sql.catalog import Table, find_table
from replication.tables.endpoints import RowChange
from replication.tables.schema import CommonTable, ValueKind

ON, OFF = replica_mode.ON, replica_mode.OFF
fails = replica_mode.fails


class AsImages:
    """What one connection knows about tables and how their rows are written."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection, self._mode = connection, ReplicaMode(connection)
        self._tables: dict[str, Table] = {}

    async def violations(
        self, tables: Mapping[str, CommonTable], planned: Sequence[RowChange]
    ) -> Sequence[Violation] | None:
        """What is to be checked when these rows of one replica were written in replica mode; None: not needed.

        `tables` by the names that the changes have. To be called before the rows are written."""
        found = {name: await self._table(table) for name, table in tables.items()}
        ties = [await self._mode.ties(table) for table in found.values()]
        if not any(tie.does_more for tie in ties):
            return None
        checks = await self._mode.checks(found, [_change(tables[change.table], change) for change in planned])
        return await checks.violations()

    async def _table(self, table: CommonTable) -> Table:
        if table.label not in self._tables:
            # Rows are told apart by the key of the check, which may be a unique index.
            found = await find_table(self._connection, table.label)
            self._tables[table.label] = replace(found, key=table.key)
        return self._tables[table.label]


def _change(table: CommonTable, change: RowChange) -> rows.RowChange:
    """The change as far as the checks look at it: its kind, the key, and which columns may change."""
    key = {c.name: _value(c.kind, text) for c, text in zip(table.columns, change.key, strict=False)}
    if change.wanted is None:
        return rows.Delete(change.table, key)
    if change.seen is None:
        return rows.Insert(change.table, key)
    return rows.Update(change.table, key, {name: None for name in table.names if name not in key})


def _value(kind: ValueKind, text: str) -> Any:
    return bytes.fromhex(text) if kind is ValueKind.BYTES else text
