"""Members carried out on a SQLite connection, one by one, each under a savepoint."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import msgspec

from adapters.changes import (
    Change,
    Delete,
    Insert,
    InvalidChange,
    Member,
    NotDeterministic,
    Row,
    RowChange,
    Statement,
    Update,
    Upsert,
    Value,
    check_not_volatile,
    content_digest,
    split_table_name,
    volatile_part,
)
from adapters.resource import Exclusion, MemberVote, Why
from adapters.sqlite.guards import KNOW_TABLES, OWN_PREFIX, changes_rows, check_statement
from adapters.sqlite.undo import OWN_TABLES, Violation, open_references, quoted

_SQLSTATES = {
    "SQLITE_CONSTRAINT_NOTNULL": "23502",
    "SQLITE_CONSTRAINT_FOREIGNKEY": "23503",
    "SQLITE_CONSTRAINT_UNIQUE": "23505",
    "SQLITE_CONSTRAINT_PRIMARYKEY": "23505",
    "SQLITE_CONSTRAINT_ROWID": "23505",
    "SQLITE_CONSTRAINT_CHECK": "23514",
}
_WRITES = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})
_TOUCHES = _WRITES | {sqlite3.SQLITE_READ}
_PASSING = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_NOMEM", "SQLITE_READONLY")
_EXACTLY = "select 1 from main.sqlite_master where type in ('table', 'view') and name = ?"


def is_transient(error: sqlite3.Error) -> bool:
    """Locks and space: not the fault of any member."""
    return getattr(error, "sqlite_errorname", "").startswith(_PASSING)


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    key: tuple[str, ...]
    columns: dict[str, str]
    volatile_defaults: dict[str, str]
    deferred_references: bool


class WrongVersion(Exception):
    """The row is not the one that the writer had seen."""


class Work:
    """Runs members inside the connection's open transaction; knows the tables as of the current schema."""

    def __init__(self, connection: sqlite3.Connection, replica_set: str, versioned: frozenset[str]) -> None:
        self._connection, self._replica_set, self._versioned = connection, replica_set, versioned
        self._tables: dict[str, _Table] = {}
        self._schema_version = -1
        self._deferred: list[str] = []
        self._open_before: set[Violation] = set()
        self._denied = ""
        self.reach: frozenset[str] | None = None  # the only tables that SQL may write, if not all

    def refresh(self) -> None:
        version = self._connection.execute("pragma main.schema_version").fetchone()[0]
        if version != self._schema_version:
            self._tables.clear()
            self._schema_version = version
            rows = self._connection.execute("select name, sql from main.sqlite_master where type = 'table'").fetchall()
            self._deferred = [name for name, sql in rows if "deferred" in (sql or "").lower()]
        # Whoever wrote with references switched off is not our members' business.
        self._open_before = {row for table in self._deferred for row in open_references(self._connection, table)}

    def run(self, number: int, at_ms: int, member: Member) -> MemberVote:
        excluded = self._known_key(at_ms, member)
        if excluded is not None:
            return MemberVote(tx=member.tx, excluded=excluded)
        self._connection.execute("savepoint tops_member")
        try:
            self._write_key(number, at_ms, member)
            done = [self._carry_out(number, change) for change in member.changes]
            self._check_deferred()
        except (InvalidChange, WrongVersion, sqlite3.Error, OverflowError, ValueError) as error:
            if isinstance(error, sqlite3.Error) and is_transient(error):
                raise
            self._connection.execute("rollback to tops_member")
            self._connection.execute("release tops_member")
            return MemberVote(tx=member.tx, excluded=_exclusion(error))
        self._connection.execute("release tops_member")
        returned = tuple(rows for _, rows in done)
        return MemberVote(
            tx=member.tx, rows=tuple(count for count, _ in done), returned=returned if any(returned) else ()
        )

    def table(self, name: str) -> _Table:
        if name not in self._tables:
            self._tables[name] = self._find(name)
        return self._tables[name]

    def _find(self, table: str) -> _Table:
        schema, name = split_table_name(table)
        if schema not in (None, "main", "public"):
            raise InvalidChange(f"there is no schema {schema!r} in a SQLite database")
        columns = self._connection.execute("select * from pragma_table_xinfo(?)", (name,)).fetchall()
        if name in OWN_TABLES:
            raise InvalidChange(f"{name} is the adapter's own memory: leave it alone")
        # SQLite takes any case for a name; everybody else here does not.
        if not columns or not self._connection.execute(_EXACTLY, (name,)).fetchone():
            raise InvalidChange(f"there is no table {table!r} in this database")
        volatile = {
            row[1]: culprit for row in columns if row[4] is not None and (culprit := volatile_part(row[4])) is not None
        }
        key = tuple(row[1] for row in sorted(columns, key=lambda row: row[5]) if row[5])
        kinds = {row[1]: row[2].upper() for row in columns if row[6] == 0}
        return _Table(name, key, kinds, volatile, name in self._deferred)

    def _carry_out(self, number: int, change: Change) -> tuple[int, tuple[Row, ...]]:
        if isinstance(change, Statement):
            return self._statement(change)
        table = self.table(change.table)
        _check(change, table)
        if getattr(change, "sum_key", ""):
            raise InvalidChange("sums of what was added are not kept in a SQLite database")
        expected = getattr(change, "expect_version", None)
        if expected is not None:
            self._check_version(change, table, expected)
        sql, values = _sql(change, table)
        count = self._connection.execute(sql, [_plain(value) for value in values]).rowcount
        if count == 0 and getattr(change, "must_exist", False):
            raise WrongVersion(f"0 rows of {table.name} affected, not 1")
        if change.table in self._versioned and number > 0:  # a local write has no number yet
            self._write_version(number, change, table)
        return count, ()

    def _statement(self, change: Statement) -> tuple[int, tuple[Row, ...]]:
        check_statement(change.sql)
        check_not_volatile(change.sql)
        self._connection.execute(KNOW_TABLES).fetchall()
        self._denied = ""
        self._connection.set_authorizer(self._may)
        try:
            cursor = self._connection.execute(change.sql, arguments_of(change.args))
        except sqlite3.DatabaseError as error:
            if self._denied:
                raise InvalidChange(self._denied) from error
            raise
        finally:
            self._connection.set_authorizer(None)
        if cursor.description is None:
            return max(0, cursor.rowcount), ()
        names = [column[0] for column in cursor.description]
        rows = tuple(dict(zip(names, row, strict=True)) for row in cursor.fetchall())
        return len(rows), rows

    def _is_out_of_reach(self, table: str | None) -> bool:
        found = table is not None and self.reach is not None and table not in self.reach
        return found and not str(table).startswith("sqlite_")

    def _may(self, action: int, table: str | None, more: str | None, database: str | None, within: str | None) -> int:
        """What a statement of the user's may do; `within` is the trigger that does it, if one does."""
        if within is None and not changes_rows(action, table, more):
            self._denied = "a replicated statement changes rows, and nothing else"
        elif action in _TOUCHES and within is None and (table or "").lower().startswith(OWN_PREFIX):
            self._denied = f"{table} is the adapter's own memory: leave it alone"
        elif action in _WRITES and within is None and database != "temp" and self._is_out_of_reach(table):
            self._denied = f"changes of {table} can't be compensated: it is not an ordinary table"
        return sqlite3.SQLITE_DENY if self._denied else sqlite3.SQLITE_OK

    def _check_deferred(self) -> None:
        """SQLite tells of deferred references at the end of the transaction only, when no member is known any more."""
        for table in self._deferred:
            for violation in open_references(self._connection, table):
                if violation in self._open_before:
                    continue
                name, row_id, parent, _ = violation
                error = sqlite3.IntegrityError(f"row {row_id} of {name} refers to no row of {parent}")
                error.sqlite_errorname = "SQLITE_CONSTRAINT_FOREIGNKEY"
                raise error

    def _known_key(self, at_ms: int, member: Member) -> Exclusion | None:
        if not member.key:
            return None
        known = self._connection.execute(
            "select content, tx, number from tops_idempotency_keys "
            "where replica_set = ? and key = ? and expires_ms > ?",
            (self._replica_set, member.key, at_ms),
        ).fetchone()
        if known is None:
            return None
        same = known[0] == content_digest(member)
        says = "committed already" if same else "in use with other content"
        return Exclusion(
            why=Why.DUPLICATE if same else Why.KEY_REUSED,
            sqlstate="",
            message=f"idempotency key {member.key!r} is {says} by transaction {known[1]}",
            first_tx=known[1],
            first_number=known[2],
        )

    def _write_key(self, number: int, at_ms: int, member: Member) -> None:
        if member.key:
            expires = at_ms + member.key_ttl_s * 1000
            row = (self._replica_set, member.key, content_digest(member), member.tx, number, expires)
            self._connection.execute("insert or replace into tops_idempotency_keys values (?, ?, ?, ?, ?, ?)", row)

    def version(self, table: _Table, row: Row) -> int:
        found = self._connection.execute(
            "select version from tops_row_versions where table_name = ? and key = ?",
            (table.name, _key_text(table, row)),
        ).fetchone()
        return found[0] if found else 0

    def _check_version(self, change: RowChange, table: _Table, expected: int) -> None:
        if change.table not in self._versioned:
            raise InvalidChange(f"table {change.table!r} does not track row versions: name it as versioned")
        row = change.values if isinstance(change, Insert) else change.key
        found = self.version(table, row)
        if found != expected:
            raise WrongVersion(f"row {_key_text(table, row)} of {table.name} has version {found}, not {expected}")

    def _write_version(self, number: int, change: RowChange, table: _Table) -> None:
        row = change.values if isinstance(change, Insert) else change.key
        key = (table.name, _key_text(table, row))
        if isinstance(change, Delete):
            self._connection.execute("delete from tops_row_versions where table_name = ? and key = ?", key)
        else:
            self._connection.execute("insert or replace into tops_row_versions values (?, ?, ?)", (*key, number))


def _exclusion(error: Exception) -> Exclusion:
    if isinstance(error, NotDeterministic):
        return Exclusion(why=Why.INVALID, sqlstate="", message=str(error), proof=error.reason)
    if isinstance(error, InvalidChange | ValueError):  # of the latter kind: text that is no text
        return Exclusion(why=Why.INVALID, sqlstate="", message=str(error))
    if isinstance(error, WrongVersion):
        return Exclusion(why=Why.VERSION, sqlstate="TP002", message=str(error))
    code = _SQLSTATES.get(getattr(error, "sqlite_errorname", ""), "")
    return Exclusion(why=Why.CONSTRAINT if code else Why.ERROR, sqlstate=code, message=str(error))


def _key_text(table: _Table, row: Row) -> str:
    return json.dumps([_key_value(_plain(row[name]), table.columns.get(name, "")) for name in table.key])


def _key_value(value: Value, declared: str) -> Value:
    """One form for all spellings of a key that the column's affinity takes for the same."""
    if "INT" in declared and isinstance(value, str | float):
        try:
            return int(value)
        except ValueError:
            return value
    return value.hex() if isinstance(value, bytes) else value


def _check(change: RowChange, table: _Table) -> None:
    if not table.key:
        raise InvalidChange(f"table {table.name!r} has no primary key: add one, or write by SQL statement")
    given = change.values if isinstance(change, Insert) else {**change.key, **getattr(change, "values", {})}
    for name in (*given, *getattr(change, "add", {})):
        if name not in table.columns:
            raise InvalidChange(f"table {table.name!r} has no column {name!r}; it has {', '.join(table.columns)}")
    if not isinstance(change, Insert) and set(change.key) != set(table.key):
        raise InvalidChange(f"table {table.name!r} is keyed by ({', '.join(table.key)})")
    match change:
        case Insert() | Upsert():
            if missing := set(table.key) - set(given):
                raise InvalidChange(f"the insert into {table.name!r} lacks its key: {', '.join(sorted(missing))}")
            for name, default in table.volatile_defaults.items():
                if name not in given:
                    raise InvalidChange(f"column {name!r} of {table.name!r} would be filled with {default}: give it")
        case Update(_, _, values, add):
            if set(values) & set(add) or not (values or add):
                raise InvalidChange(f"the update of {table.name!r} must set or add to each column once")
    if not isinstance(change, Insert) and (
        tied := set(table.key) & {*getattr(change, "values", {}), *getattr(change, "add", {})}
    ):
        raise InvalidChange(
            f"{', '.join(sorted(tied))} is part of the key of {table.name!r}: delete and insert the row"
        )


def _sql(change: RowChange, table: _Table) -> tuple[str, list[Value]]:
    name = f"main.{quoted(table.name)}"
    match change:
        case Insert(_, values):
            return _insert(name, values)
        case Upsert(_, key, values, _, add):
            sql, arguments = _insert(name, {**key, **values, **add})
            target = ", ".join(map(quoted, table.key))
            plain = values if values or add else table.key
            assigned = ", ".join(
                [f"{quoted(column)} = excluded.{quoted(column)}" for column in plain]
                + [f"{quoted(column)} = {quoted(column)} + excluded.{quoted(column)}" for column in add]
            )
            return f"{sql} on conflict ({target}) do update set {assigned}", arguments
        case Delete(_, key):
            return f"delete from {name} where {_where(key)}", list(key.values())
        case Update(_, key, values, add):
            assigned = ", ".join(
                [f"{quoted(column)} = ?" for column in values]
                + [f"{quoted(column)} = {quoted(column)} + ?" for column in add]
            )
            arguments = [*values.values(), *add.values(), *key.values()]
            return f"update {name} set {assigned} where {_where(key)}", arguments


def _insert(name: str, values: Row) -> tuple[str, list[Value]]:
    columns, places = ", ".join(map(quoted, values)), ", ".join("?" * len(values))
    return f"insert into {name} ({columns}) values ({places})", list(values.values())


def _where(key: Row) -> str:
    return " and ".join(f"{quoted(column)} = ?" for column in key)


def _plain(value: Value) -> Value:
    """SQLite knows numbers, text and bytes; other values are kept as the text that they are on the wire."""
    match value:
        case None | int() | float() | str() | bytes():
            return value
        case Decimal() | UUID():
            return str(value)
        case datetime() | date() | time() | timedelta():
            return str(msgspec.to_builtins(value))
        case list() | tuple() | dict():
            return json.dumps(msgspec.to_builtins(value, builtin_types=(bytes,)), default=str)
        case _:
            raise InvalidChange(f"a {type(value).__name__} can't be stored in SQLite")


def arguments_of(args: Sequence[Value]) -> dict[str, Value]:
    """Positional parameters $1, $2, … as SQLite's named ones."""
    return {str(place): _plain(value) for place, value in enumerate(args, 1)}
