"""Applying a write set with triggers switched off, and checking by query what PostgreSQL then does not check.

The rows that triggers, rules and referential actions wrote at the origin are in the write set, so nothing of that may
run again: `session_replication_role = replica`. That switches off foreign keys as well, and unique, primary key and
exclusion constraints that are deferrable. They are checked here for the rows that the write set changed, before the
replica votes. A violation means that something came in between: a conflict, not a constraint error.

Write sets whose tables have none of these, and no foreign keys among each other, are applied as ordinary row changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import asyncpg

from adapters.changes import Change, Delete, Insert, Row, RowChange, Statement, Update, Upsert
from adapters.postgres.sql.catalog import Table
from adapters.postgres.sql.literals import identifier, quote, text_form

ON, OFF = "SET LOCAL session_replication_role TO replica", "SET LOCAL session_replication_role TO origin"

_TRIGGERS = """
select exists (select from pg_trigger t join pg_proc p on p.oid = t.tgfoid where t.tgrelid = $1 and not t.tgisinternal
           and t.tgenabled <> 'D' and p.pronamespace::regnamespace::text <> 'tops')
       or (select relhasrules from pg_class where oid = $1)
       or exists (select from pg_partition_tree($1) part join pg_trigger t on t.tgrelid = part.relid
           join pg_proc p on p.oid = t.tgfoid where not t.tgisinternal and t.tgenabled <> 'D'
           and p.pronamespace::regnamespace::text <> 'tops')
"""
_FOREIGN_KEYS = """
select f.conname as name, f.conrelid as child, f.confrelid as parent, f.confmatchtype = 'f' as is_full,
       f.confdeltype in ('c', 'n', 'd') or f.confupdtype in ('c', 'n', 'd') as has_action,
       format('%s', f.conrelid::regclass) as child_name, format('%s', f.confrelid::regclass) as parent_name,
       array(select a.attname::text from unnest(f.conkey) with ordinality as k(number, place)
           join pg_attribute a on a.attrelid = f.conrelid and a.attnum = k.number order by place) as child_columns,
       array(select a.attname::text from unnest(f.confkey) with ordinality as k(number, place)
           join pg_attribute a on a.attrelid = f.confrelid and a.attnum = k.number order by place) as parent_columns
  from pg_constraint f where f.contype = 'f' and f.conparentid = 0 and (f.conrelid = $1 or f.confrelid = $1)
 order by f.conname
"""
_DEFERRABLE = """
select c.conname as name,
       array(select a.attname::text from unnest(c.conkey) with ordinality as k(number, place)
           join pg_attribute a on a.attrelid = c.conrelid and a.attnum = k.number order by place) as columns,
       coalesce((select array_agg(format('operator(%I.%s)', n.nspname, o.oprname) order by place)
           from unnest(c.conexclop) with ordinality as e(operator, place)
           join pg_operator o on o.oid = e.operator join pg_namespace n on n.oid = o.oprnamespace),
           array(select '=' from unnest(c.conkey))) as operators
  from pg_constraint c where c.conrelid = $1 and c.contype in ('p', 'u', 'x') and c.condeferrable
 order by c.conname
"""


class ForeignKey(NamedTuple):
    name: str
    child: int
    parent: int
    is_full: bool
    has_action: bool
    child_name: str
    parent_name: str
    child_columns: list[str]
    parent_columns: list[str]


class Unique(NamedTuple):
    """A deferrable constraint under which no two rows may match."""

    name: str
    columns: list[str]
    operators: list[str]


@dataclass(frozen=True, slots=True)
class Ties:
    """What ties a table's rows to others, as far as it matters how a write set is applied."""

    has_triggers: bool  # or rules
    foreign_keys: tuple[ForeignKey, ...]
    deferrable: tuple[Unique, ...]

    @property
    def does_more(self) -> bool:
        """Whether a change of a row may change others."""
        return self.has_triggers or any(key.has_action for key in self.foreign_keys)


class ReplicaMode:
    """What one connection knows about the ties of tables."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self._connection = connection
        self._ties: dict[int, Ties] = {}

    def forget(self) -> None:
        self._ties.clear()

    async def is_needed(self, tables: Sequence[Table], changes: Sequence[Change]) -> bool:
        """Whether a write set of these changes can't be applied as ordinary row changes."""
        ties = [await self.ties(table) for table in tables]
        if any(tie.does_more for tie in ties):
            return True
        oids = {table.oid for table in tables}
        among = any(key.child in oids and key.parent in oids for tie in ties for key in tie.foreign_keys)
        if among and len(changes) > 1:
            return True
        # A row that is deleted and inserted again is never missing for the rows that refer to it.
        deleted, inserted = ({c.table for c in changes if isinstance(c, kind)} for kind in (Delete, Insert))
        referenced = any(key.parent in oids for tie in ties for key in tie.foreign_keys)
        return referenced and not deleted.isdisjoint(inserted)

    async def ties(self, table: Table) -> Ties:
        known = self._ties.get(table.oid)
        if known is None:
            connection, oid = self._connection, table.oid
            keys = [_foreign_key(row) for row in await connection.fetch(_FOREIGN_KEYS, oid)]
            rows = await connection.fetch(_DEFERRABLE, oid)
            unique = [Unique(row["name"], row["columns"], row["operators"]) for row in rows]
            known = Ties(await connection.fetchval(_TRIGGERS, oid), tuple(keys), tuple(unique))
            self._ties[oid] = known
        return known

    async def checks(self, tables: dict[str, Table], changes: Sequence[Change]) -> "Checks":
        ties = {name: await self.ties(table) for name, table in tables.items()}
        return Checks(self._connection, tables, ties, changes)


class Violation(NamedTuple):
    """A query that finds rows, after the changes, if the constraint does not hold."""

    constraint: str
    query: str


class Checks:
    """The checks of one write set: what must be read before it is applied, and queries that fail afterwards."""

    def __init__(
        self,
        connection: "asyncpg.Connection[asyncpg.Record]",
        tables: dict[str, Table],
        ties: dict[str, Ties],
        changes: Sequence[Change],
    ) -> None:
        self._connection, self._tables, self._ties = connection, tables, ties
        self._changes = [change for change in changes if not isinstance(change, Statement)]

    async def texts(self) -> list[str]:
        """Queries that fail if a constraint does not hold; to be called in the transaction, before the changes."""
        return [fails(violation.query) for violation in await self.violations()]

    async def violations(self) -> list[Violation]:
        """As `texts`, queries that find what violates a constraint."""
        return [*self._written(), *await self._removed()]

    def _written(self) -> list[Violation]:
        """Rows that are there afterwards: their parents exist, and nobody else has their unique values."""
        found = []
        for name, table in self._tables.items():
            left = [change for change in self._of(name) if not isinstance(change, Delete)]
            if not left:
                continue
            rows = _rows(table, table.key, [_key(table, change) for change in left])
            mine = f"{table.sql_name} as t join {rows} on {_equal('t', table.key, 'k', table.key)}"
            parents = [key for key in self._ties[name].foreign_keys if key.child == table.oid]
            found += [Violation(key.name, f"select from {mine} where {_orphaned(key)}") for key in parents]
            found += [
                Violation(one.name, f"select from {mine} where {_has_twin(table, one)}")
                for one in self._ties[name].deferrable
            ]
        return found

    def _of(self, name: str) -> list[RowChange]:
        return [change for change in self._changes if change.table == name]

    async def _removed(self) -> list[Violation]:
        """Values that others refer to must not be gone afterwards."""
        found = []
        for name, table in self._tables.items():
            changes = [change for change in self._of(name) if not isinstance(change, Insert)]
            for key in self._ties[name].foreign_keys:
                rows = [change.key for change in changes if _may_remove(change, key)]
                if rows and key.parent == table.oid and (before := await self._values(table, key.parent_columns, rows)):
                    found.append(Violation(key.name, _left_behind(table, key, before)))
        return found

    async def _values(self, table: Table, columns: Sequence[str], rows: Sequence[Row]) -> list[Row]:
        """What the rows have in these columns now, as text; without those that nothing can refer to."""
        asked = ", ".join(f"t.{identifier(column)}::text" for column in columns)
        found = await self._connection.fetch(
            f"select {asked} from {table.sql_name} as t join {_rows(table, table.key, rows)} "
            f"on {_equal('t', table.key, 'k', table.key)}"
        )
        return [dict(zip(columns, row.values(), strict=True)) for row in found if None not in row.values()]


def _may_remove(change: Update | Upsert | Delete, key: ForeignKey) -> bool:
    return isinstance(change, Delete) or not set(key.parent_columns).isdisjoint(change.values)


def _has_twin(table: Table, unique: Unique) -> str:
    pairs = zip(unique.columns, unique.operators, strict=True)
    same = " and ".join(f"o.{identifier(name)} {operator} t.{identifier(name)}" for name, operator in pairs)
    if set(unique.columns) == set(table.key):
        return f"(select count(*) from {table.sql_name} as o where {same}) > 1"
    other = f"({_list('o', table.key)}) <> ({_list('t', table.key)})"
    return f"exists (select from {table.sql_name} as o where {same} and {other})"


def _orphaned(key: ForeignKey) -> str:
    """MATCH SIMPLE passes with any NULL, MATCH FULL only with nothing else."""
    nulls = [f"t.{identifier(column)} is null" for column in key.child_columns]
    same = _equal("p", key.parent_columns, "t", key.child_columns)
    parent = f"exists (select from {key.parent_name} as p where {same})"
    passes = f"({' and '.join(nulls)})" if key.is_full else f"({' or '.join(nulls)})"
    return f"not {passes} and not {parent}"


def _left_behind(table: Table, key: ForeignKey, before: Sequence[Row]) -> str:
    rows = _rows(table, tuple(key.parent_columns), before)
    refers = _equal("c", key.child_columns, "k", key.parent_columns)
    stays = _equal("p", key.parent_columns, "k", key.parent_columns)
    return (
        f"select from {rows} where exists (select from {key.child_name} as c where {refers}) "
        f"and not exists (select from {key.parent_name} as p where {stays})"
    )


def fails(query: str) -> str:
    """Raises what a row raises that is not the expected one."""
    return f"SELECT tops.affected(0, count(*)) FROM ({query}) AS violations"


def _rows(table: Table, columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows of literals as a relation `k` with columns of their own types."""
    texts = [", ".join(_literal(row[name], table, name) for name in columns) for row in rows]
    names = ", ".join(map(identifier, columns))
    return f"(values {', '.join(f'({text})' for text in texts)}) as k({names})"


def _literal(value: Any, table: Table, column: str) -> str:
    sql_type = table.column(column)
    text = text_form(value, sql_type, captured=True)
    return f"{'NULL' if text is None else quote(text)}::{sql_type.name}"


def _equal(left: str, left_columns: Sequence[str], right: str, right_columns: Sequence[str]) -> str:
    pairs = zip(left_columns, right_columns, strict=True)
    return " and ".join(f"{left}.{identifier(one)} = {right}.{identifier(other)}" for one, other in pairs)


def _list(row: str, columns: Sequence[str]) -> str:
    return ", ".join(f"{row}.{identifier(column)}" for column in columns)


def _key(table: Table, change: RowChange) -> Row:
    row = change.values if isinstance(change, Insert) else change.key
    return {name: row[name] for name in table.key}


def _foreign_key(row: asyncpg.Record) -> ForeignKey:
    return ForeignKey(*(row[name] for name in ForeignKey._fields))
