"""Before-images: triggers that write down, for every row changed, the statement that takes the change back.

They are temporary triggers of the writing connection, so they see what any statement does, cascades included, and the
database's other users never meet them. Each statement of compensation names the row as our change left it; a row that
somebody has changed since is not found, and nothing is taken back.
"""

import sqlite3
from dataclasses import dataclass

_COLUMNS = "select name, pk, hidden from pragma_table_xinfo(?)"
_TABLES = """
select m.name, l.wr from main.sqlite_master m join pragma_table_list l on l.name = m.name and l.schema = 'main'
 where m.type = 'table' and m.name not like 'sqlite\\_%' escape '\\' and m.name not like 'tops\\_%' escape '\\'
   and l.type = 'table' or m.name in ('tops_row_versions', 'tops_idempotency_keys')
"""


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
        connection.execute("create temp table tops_capturing (replica_set text, number integer)")

    def refresh(self) -> None:
        version = self._connection.execute("pragma main.schema_version").fetchone()[0]
        if version == self._schema_version:
            return
        for trigger in self._triggers:
            self._connection.execute(f"drop trigger temp.{trigger}")
        self._triggers.clear()
        for number, table in enumerate(self._tables()):
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
        """Undo in reverse; False if a row is no longer as it was left (the caller rolls back)."""
        # References are right again only when all rows are.
        self._connection.execute("pragma defer_foreign_keys = on")
        rows = self._connection.execute(
            "select sql from tops_undo where replica_set = ? and number = ? order by id desc", (replica_set, number)
        )
        if any(self._connection.execute(sql).rowcount != 1 for (sql,) in rows.fetchall()):
            return False
        self.forget(replica_set, number)
        return True

    def forget(self, replica_set: str, number: int) -> None:
        self._connection.execute("delete from tops_undo where replica_set = ? and number = ?", (replica_set, number))

    def _tables(self) -> list[_Table]:
        tables = []
        for name, without_rowid in self._connection.execute(_TABLES).fetchall():
            columns = self._connection.execute(_COLUMNS, (name,)).fetchall()
            stored = [column for column, _, hidden in columns if hidden == 0]
            key = [column for column, pk, _ in columns if pk]
            free = next((alias for alias in ("rowid", "oid", "_rowid_") if alias not in stored), None)
            tables.append(_Table(name, stored, None if without_rowid or (free is None and key) else free))
        return tables


def _same(table: _Table, row: str) -> str:
    """SQL that yields a condition: the row is the one in question and as that image shows it."""
    names = [*table.columns, *([table.row_id] if table.row_id else [])]
    return " || ' and ' || ".join(f"{text(quoted(name) + ' is ')} || quote({row}.{quoted(name)})" for name in names)


def _undo_insert(table: _Table) -> str:
    return f"{text(f'delete from main.{quoted(table.name)} where ')} || {_same(table, 'new')}"


def _undo_update(table: _Table) -> str:
    names = [*([table.row_id] if table.row_id else []), *table.columns]
    assigned = " || ', ' || ".join(f"{text(quoted(name) + ' = ')} || quote(old.{quoted(name)})" for name in names)
    head = text(f"update main.{quoted(table.name)} set ")
    return f"{head} || {assigned} || ' where ' || {_same(table, 'new')}"


def _undo_delete(table: _Table) -> str:
    names = [*([table.row_id] if table.row_id else []), *table.columns]
    listed = ", ".join(map(quoted, names))
    values = " || ', ' || ".join(f"quote(old.{quoted(name)})" for name in names)
    return f"{text(f'insert into main.{quoted(table.name)} ({listed}) values (')} || {values} || ')'"
