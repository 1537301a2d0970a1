"""Reads of a SQLite file: rows as dicts, a copy in one snapshot, and the position that belongs to it."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

from adapters.changes import InvalidChange, Row, split_table_name
from adapters.resource import Position, SharedSnapshot
from adapters.sqlite.undo import quoted
from tops.model.log_points import BEGINNING, LogPoint


class SqliteSnapshot:
    """One state of the file, held by a read transaction."""

    def __init__(self, reader: sqlite3.Connection, replica_set: str, folder: Path) -> None:
        """`folder` is for copies that are shared; it goes with the snapshot."""
        self._folder = folder
        self._reader, self._position = reader, position_in(reader, replica_set)
        self._point = point_in(reader, replica_set)

    @property
    def position(self) -> Position:
        return self._position

    @property
    def point(self) -> LogPoint:
        return self._point

    async def rows(self, table: str, *, chunk: int = 10_000) -> AsyncIterator[list[Row]]:
        name = split_table_name(table)[1]
        columns = self._reader.execute("select name, pk, hidden from pragma_table_xinfo(?)", (name,)).fetchall()
        if not columns:
            raise InvalidChange(f"there is no table {table!r} in this database")
        listed = ", ".join(quoted(column) for column, _, hidden in columns if hidden == 0)
        key = ", ".join(quoted(column) for column, pk, _ in sorted(columns, key=lambda row: row[1]) if pk) or "rowid"
        cursor = self._reader.execute(f"select {listed} from main.{quoted(name)} order by {key}")
        while rows := await asyncio.to_thread(cursor.fetchmany, chunk):
            names = [column[0] for column in cursor.description]
            yield [dict(zip(names, row, strict=True)) for row in rows]

    async def share(self) -> SharedSnapshot:
        """Copy the state to a file of its own."""
        path = self._folder / "snapshot.db"
        await asyncio.to_thread(self._copy_to, path)
        return SharedSnapshot(path=str(path))

    def _copy_to(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as copy:
            self._reader.backup(copy)


def dicts(cursor: sqlite3.Cursor) -> list[Row]:
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def position_in(connection: sqlite3.Connection, replica_set: str) -> Position:
    row = connection.execute("select prefix from tops_position where replica_set = ?", (replica_set,)).fetchone()
    prefix = row[0] if row else 0
    numbers = connection.execute(
        "select number from tops_applied where replica_set = ? and number > ? order by number", (replica_set, prefix)
    ).fetchall()
    above = []
    for (number,) in numbers:
        if number == prefix + 1:
            prefix = number
        else:
            above.append(number)
    return Position(prefix, frozenset(above))


def point_in(connection: sqlite3.Connection, replica_set: str) -> LogPoint:
    """The applied prefix, and which log it is a prefix of."""
    prefix = position_in(connection, replica_set).prefix
    row = connection.execute(
        "select history, digest from tops_applied where replica_set = ?1 and number = ?2 union all "
        "select history, digest from tops_position where replica_set = ?1 and prefix = ?2",
        (replica_set, prefix),
    ).fetchone()
    return LogPoint(row[0], prefix, row[1]) if row else BEGINNING
