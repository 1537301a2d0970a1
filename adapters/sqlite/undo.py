"""Before-images: triggers that write down, for every row changed, the statement that takes the change back.

They are temporary triggers of the writing connection, so they see what any statement does, cascades included, and the
database's other users never meet them. Each statement of compensation names the row as our change left it; a row that
somebody has changed since is not found, and nothing is taken back.
"""

import re
import sqlite3
from dataclasses import dataclass

OWN_TABLES = frozenset(
    {"tops_agent", "tops_applied", "tops_position", "tops_row_versions", "tops_idempotency_keys"}
    | {"tops_outbox", "tops_participation", "tops_undo"}
)
# Written together with members' rows, and taken back with them.
_TAKEN_BACK = frozenset({"tops_row_versions", "tops_idempotency_keys"})
_COLUMNS = "select name, pk, hidden from pragma_table_xinfo(?)"
_TABLES = """
select m.name, l.wr from main.sqlite_master m join pragma_table_list l on l.name = m.name and l.schema = 'main'
 where m.type = 'table' and m.name not like 'sqlite\\_%' escape '\\' and l.type = 'table'
"""
_REFERENCES = """
select m.name, f."table" from main.sqlite_master m join pragma_foreign_key_list(m.name) f where m.type = 'table'
"""
_TARGET = re.compile(r'main\.("(?:[^"]|"")+")')

Violation = tuple[object, ...]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    columns: list[str]
    row_id: str | None  # how the row is named if no column does; None: by its primary key


class UndoLog:
    """The capturing of one connection; `refresh` after the schema may have changed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._schema_version = -1
        self._triggers: list[str] = []
        self.captured: frozenset[str] = frozenset()  # tables whose changes can be taken back
        connection.execute("create temp table tops_capturing (replica_set text, number integer)")

    def refresh(self) -> None:
        version = self._connection.execute("pragma main.schema_version").fetchone()[0]
        if version == self._schema_version:
            return
        for trigger in self._triggers:
            self._connection.execute(f"drop trigger temp.{trigger}")
        self._triggers.clear()
        tables = self._tables()
        self.captured = frozenset(table.name for table in tables) - OWN_TABLES
        for number, table in enumerate(tables):
            for event, undo in (
                ("insert", _undo_insert(table)),
                ("update", _undo_update(table)),
                ("delete", _undo_delete(table)),
            ):
                trigger = f"tops_undo_{event}_{number}"
                self._connection.execute(
                    f"create temp trigger {trigger} after {event} on main.{quoted(table.name)} "
                    f"when exists (select 1 from tops_capturing) begin "
                    f"insert into tops_undo (replica_set, number, sql) "
                    f"select replica_set, number, {undo} from tops_capturing; end"
                )
                self._triggers.append(trigger)
        self._schema_version = version

    def capture(self, replica_set: str, number: int) -> None:
        """Write down what happens from now on under this number."""
        self._connection.execute("insert into tops_capturing values (?, ?)", (replica_set, number))

    def stop(self) -> None:
        self._connection.execute("delete from tops_capturing")

    def take_back(self, replica_set: str, number: int) -> bool:
        """Undo in reverse; False if a row is no longer as it was left, or others lean on it (the caller rolls back).

        The caller has switched foreign keys off: cascades would reach rows that were never ours.
        """
        steps = self._connection.execute(
            "select sql from tops_undo where replica_set = ? and number = ? order by id desc", (replica_set, number)
        ).fetchall()
        touched = {found[1] for (sql,) in steps if (found := _TARGET.search(sql))}
        before = self._open_references(touched)
        if any(self._connection.execute(sql).rowcount != 1 for (sql,) in steps):
            return False
        if not self._open_references(touched) <= before:
            return False
        self.forget(replica_set, number)
        return True

    def _open_references(self, touched: set[str]) -> set[Violation]:
        """Rows of these tables, or that refer to them, whose reference leads nowhere."""
        references = self._connection.execute(_REFERENCES).fetchall()
        checked = {child for child, parent in references if touched & {quoted(child), quoted(parent)}}
        return {row for table in checked for row in open_references(self._connection, table)}

    def forget(self, replica_set: str, number: int) -> None:
        self._connection.execute("delete from tops_undo where replica_set = ? and number = ?", (replica_set, number))

    def _tables(self) -> list[_Table]:
        tables = []
        for name, without_rowid in self._connection.execute(_TABLES).fetchall():
            if name in OWN_TABLES - _TAKEN_BACK:
                continue
            columns = self._connection.execute(_COLUMNS, (name,)).fetchall()
            stored = [column for column, _, hidden in columns if hidden == 0]
            key = [column for column, pk, _ in columns if pk]
            free = next((alias for alias in ("rowid", "oid", "_rowid_") if alias not in stored), None)
            tables.append(_Table(name, stored, None if without_rowid or (free is None and key) else free))
        return tables


def open_references(connection: sqlite3.Connection, table: str) -> list[Violation]:
    """Rows of the table whose foreign key leads nowhere: table, row, parent table, which key."""
    return connection.execute(f"pragma foreign_key_check({quoted(table)})").fetchall()


def _shown(value: str) -> str:
    """SQL that yields a value as SQL; `quote` alone ends a text at its first NUL and knows no infinity."""
    as_bytes = f"cast({value} as blob)"
    return (
        f"case when typeof({value}) = 'text' and instr({as_bytes}, x'00') "
        f"then 'cast(' || quote({as_bytes}) || ' as text)' "
        f"when typeof({value}) = 'real' and {value} = 9e999 then '9e999' "
        f"when typeof({value}) = 'real' and {value} = -9e999 then '-9e999' else quote({value}) end"
    )


def _same(table: _Table, row: str) -> str:
    """SQL that yields a condition: the row is the one in question and as that image shows it."""
    names = [*table.columns, *([table.row_id] if table.row_id else [])]
    return " || ' and ' || ".join(
        f"{text(quoted(name) + ' collate binary is ')} || {_shown(f'{row}.{quoted(name)}')}" for name in names
    )


def _undo_insert(table: _Table) -> str:
    return f"{text(f'delete from main.{quoted(table.name)} where ')} || {_same(table, 'new')}"


def _undo_update(table: _Table) -> str:
    names = [*([table.row_id] if table.row_id else []), *table.columns]
    assigned = " || ', ' || ".join(f"{text(quoted(name) + ' = ')} || {_shown(f'old.{quoted(name)}')}" for name in names)
    head = text(f"update main.{quoted(table.name)} set ")
    return f"{head} || {assigned} || ' where ' || {_same(table, 'new')}"


def _undo_delete(table: _Table) -> str:
    names = [*([table.row_id] if table.row_id else []), *table.columns]
    listed = ", ".join(map(quoted, names))
    values = " || ', ' || ".join(_shown(f"old.{quoted(name)}") for name in names)
    return f"{text(f'insert into main.{quoted(table.name)} ({listed}) values (')} || {values} || ')'"
