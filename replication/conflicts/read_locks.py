"""What a read of a serializable transaction depends on: rows by primary key, whole tables, or all of them.

A place is a table and a key. Two spellings of one row must give one key, or a conflict is missed; so only keys that
have one spelling here lock a row, and every other read or write counts for the whole table. Which tables a text names
is read from its parse tree, and the catalogue tells what they are. What may hide tables (a view, a function or an
operator of the user's, row security, partitions) reads them all, and a change that may change rows of others (triggers,
rules, referential actions, partitions) writes them all.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from pglast import ast

from adapters.changes import Change, InvalidChange, Row, Statement, is_captured, joined_table_name, split_table_name
from adapters.resource import Resource
from adapters.sql import Parsed, fixed_columns, parse
from replication.conflicts.tables import LEARN_AGAIN_S, Shapes, TableShape, key_in
from replication.model.events import UNREADABLE_ERRORS

TABLE = ""  # as a key: any row of the table
BY_STATEMENT = "*"  # as a key: rows that nobody listed
ANY = ""  # as a table: any
RowKey = tuple[str, str]

_TABLES = """
select n.nspname as schema_name, c.relname as name,
       c.relkind = 'r' and not c.relrowsecurity
         and not exists (select from pg_inherits i where c.oid in (i.inhparent, i.inhrelid)) as plain,
       exists (select from pg_constraint f where f.contype = 'f' and f.confrelid = c.oid
         and (f.confdeltype in ('c', 'n', 'd') or f.confupdtype in ('c', 'n', 'd'))) as cascades,
       c.relhasrules or exists (select from pg_trigger t join pg_proc f on f.oid = t.tgfoid where t.tgrelid = c.oid
         and not t.tgisinternal and f.pronamespace is distinct from to_regnamespace('tops'))
       or exists (select from pg_depend d join pg_proc f on f.oid = d.refobjid join pg_language l on l.oid = f.prolang
         where d.refclassid = 'pg_proc'::regclass and l.lanname not in ('internal', 'c')
           and (d.classid = 'pg_attrdef'::regclass and d.objid in (select oid from pg_attrdef where adrelid = c.oid)
             or d.classid = 'pg_constraint'::regclass
               and d.objid in (select oid from pg_constraint where conrelid = c.oid))) as runs_code
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'p') and n.nspname not in ('pg_catalog', 'information_schema', 'tops')
"""
# Names behind which a user's code may be; an empty one stands for casts, which need no name.
_OPAQUE = """
with own as (select oid from pg_namespace
              where nspname not in ('pg_catalog', 'information_schema', 'tops') and nspname not like 'pg\\_t%'),
     written as (select p.oid from pg_proc p join own on own.oid = p.pronamespace
                   join pg_language l on l.oid = p.prolang where l.lanname not in ('internal', 'c'))
select p.proname as name from pg_proc p join own on own.oid = p.pronamespace
union select o.oprname from pg_operator o join written on written.oid = o.oprcode
union select t.typname from pg_type t join own on own.oid = t.typnamespace where t.typtype = 'd'
union select '' from pg_cast k join written on written.oid = k.castfunc
"""
# Functions of PostgreSQL's own that run a query which is given to them as text, or read the table of a given name.
_RUN_TEXT = frozenset(
    {"ts_stat", "ts_rewrite", "cursor_to_xml", "cursor_to_xmlschema"}
    | {f"{what}_to_{form}" for what in ("query", "table", "schema", "database")
       for form in ("xml", "xmlschema", "xml_and_xmlschema")}
)  # fmt: skip


class Lock(msgspec.Struct, frozen=True, array_like=True):
    """Something that was read at a position of the log: a row, (with an empty key) a whole table, or (without a table)
    all of them."""

    table: str
    key: str
    position: int

    @property
    def row_keys(self) -> tuple[RowKey, ...]:
        """Where a later write would break it."""
        keys = (TABLE,) if self.key == TABLE else (self.key, BY_STATEMENT)
        return (*((self.table, key) for key in keys), (ANY, BY_STATEMENT))

    @property
    def what(self) -> str:
        return f"{self.table} {self.key}".strip() or "some table"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Lock])


def encode_locks(locks: Sequence[Lock]) -> bytes:
    return _encoder.encode(locks)


def decode_locks(data: bytes) -> list[Lock]:
    return _decoder.decode(data)


def more_locks(encoded: bytes, locks: Sequence[Lock]) -> bytes:
    """The locks that a client has sent, and others; what can't be decoded is left to be rejected."""
    if not locks:
        return encoded
    try:
        return encode_locks([*(decode_locks(encoded) if encoded else ()), *locks])
    except UNREADABLE_ERRORS:
        return encoded


class _Table(NamedTuple):
    plain: bool  # its rows are in no other table, and a query sees them all
    cascades: bool  # a change of it may change rows of others
    runs_code: bool  # triggers, rules, or functions of the user's in defaults and constraints: they may read others

    @property
    def reaches(self) -> bool:
        return self.cascades or self.runs_code


_UNKNOWN = _Table(plain=False, cascades=True, runs_code=True)


class _Catalogue(NamedTuple):
    """What a database holds, as of some seconds ago."""

    read_at: float
    tables: dict[str, _Table]  # by their one name
    opaque: frozenset[str]


class _Written(NamedTuple):
    """A table that is written, by its one name, and what its changes touch."""

    name: str
    shape: TableShape | None
    table: _Table


class AccessedRows:
    """The places that queries read and changes write at one replica."""

    def __init__(self, resource: Resource) -> None:
        self._resource, self._shapes = resource, Shapes(resource)
        self._known: _Catalogue | None = None

    async def read_by(self, sql: str, args: Sequence[Any]) -> list[RowKey]:
        """A read by primary key locks the row; any other locks the tables that it names, or all if it may hide some."""
        (parsed,) = parse(sql)
        tables = await self._tables_in(parsed)
        if tables is None:
            return [(ANY, TABLE)]
        key = await self._key_in(parsed, tables, args)
        return [(table, TABLE if key is None else key) for table in tables]

    async def _key_in(self, parsed: Parsed, tables: Sequence[str], args: Sequence[Any]) -> str | None:
        """The primary key that a statement fixes with a condition such as `a = $1 and b = $2`; None if it names several
        tables, or says anything else."""
        if len(parsed.relations) > 1:
            return None
        key, is_all = fixed_columns(_condition(parsed.node), args)
        if not is_all:
            return None
        with suppress(InvalidChange):  # it has no primary key
            shape = await self._shapes.of(tables[0])
            return spelled(shape, key) if key.keys() == set(shape.key) else None
        return None

    async def written_by(self, changes: Sequence[Change]) -> frozenset[RowKey]:
        """Rows and their tables; for what does not tell all its rows, the tables as a whole."""
        row_keys: set[RowKey] = set()
        tables: dict[str, _Written] = {}
        for change in changes:
            if isinstance(change, Statement):
                row_keys |= await self._written_by_statement(change.sql)
            elif not change.table.startswith("tops."):
                known = tables.get(change.table)
                if known is None:
                    known = tables[change.table] = await self._written(change.table)
                    row_keys.add((known.name, TABLE))
                # What a captured change has reached is in its write set, too.
                if not known.table.plain or (known.table.reaches and not is_captured(change)):
                    row_keys.add((ANY, BY_STATEMENT))
                key = spelled(known.shape, key_in(change)) if known.shape is not None else None
                row_keys.add((known.name, BY_STATEMENT if key is None else key))
        return frozenset({*row_keys, (ANY, TABLE)}) if row_keys else frozenset()

    async def read_to_execute(self, changes: Sequence[Change], rows: Sequence[int]) -> list[RowKey]:
        """What was read to execute changes once, beside the rows that they have changed: those are certified by their
        images. `rows` tells how many each of them has changed."""
        row_keys: dict[RowKey, None] = {}
        for change, count in zip(changes, rows, strict=True):
            if isinstance(change, Statement):
                row_keys.update(dict.fromkeys(await self._read_by_statement(change, count)))
                continue
            written = await self._written(change.table)
            if written.table.runs_code or not written.table.plain:
                row_keys[ANY, TABLE] = None
            elif count == 0:
                key = spelled(written.shape, key_in(change)) if written.shape is not None else None
                row_keys[written.name, TABLE if key is None else key] = None
        return list(row_keys)

    async def _read_by_statement(self, statement: Statement, count: int) -> list[RowKey]:
        try:
            (parsed,) = parse(statement.sql)
        except (InvalidChange, ValueError):
            return [(ANY, TABLE)]  # the database is going to reject it
        catalogue, tables = await self._catalogue(), await self._tables_in(parsed)
        if tables is None or any(catalogue.tables.get(table, _UNKNOWN).runs_code for table in tables):
            return [(ANY, TABLE)]
        if len(parsed.relations) == 1 and isinstance(parsed.node, ast.InsertStmt) and not parsed.node.onConflictClause:
            return []
        key = await self._key_in(parsed, tables, statement.args)
        if key is not None and count and not isinstance(parsed.node, ast.SelectStmt):
            return []
        return [(table, TABLE if key is None else key) for table in tables]

    async def _written_by_statement(self, sql: str) -> set[RowKey]:
        with suppress(InvalidChange):
            catalogue = await self._catalogue()
            named = [await self._tables_in(parsed) for parsed in parse(sql)]
            tables = [table for of_one in named for table in of_one or ()]
            if None not in named and not any(catalogue.tables.get(table, _UNKNOWN).reaches for table in tables):
                return {(table, key) for table in tables for key in (TABLE, BY_STATEMENT)}
        return {(ANY, BY_STATEMENT)}

    async def _written(self, table: str) -> _Written:
        name, shape = table, None
        with suppress(InvalidChange):  # the database is going to refuse the change
            schema, plain_name = split_table_name(table)
            name = joined_table_name(schema or "public", plain_name)
            shape = await self._shapes.of(table)
        return _Written(name, shape, (await self._catalogue()).tables.get(name, _UNKNOWN))

    async def _tables_in(self, parsed: Parsed) -> list[str] | None:
        """The tables that a statement names; None if it may read others as well, or is none that we know."""
        catalogue = await self._catalogue()
        if "" in catalogue.opaque or not catalogue.opaque.isdisjoint(parsed.names):
            return None
        found: dict[str, None] = {}
        for schema, relation in parsed.relations:
            name = joined_table_name(schema or "public", relation)
            if schema is None and relation in parsed.with_queries and name not in catalogue.tables:
                continue
            if name not in catalogue.tables or not catalogue.tables[name].plain:
                return None
            found[name] = None
        return list(found) or None

    async def _catalogue(self) -> _Catalogue:
        known = self._known
        if known is None or time.monotonic() - known.read_at > LEARN_AGAIN_S:
            read_at = time.monotonic()
            tables = {
                joined_table_name(row["schema_name"], row["name"]): _Table(
                    row["plain"], row["cascades"], row["runs_code"]
                )
                for row in (await self._resource.read_own(_TABLES)).rows
            }
            names = [row["name"] for row in (await self._resource.read_own(_OPAQUE)).rows]
            known = self._known = _Catalogue(read_at, tables, _RUN_TEXT.union(names))
        return known


def _condition(node: ast.Node) -> Any:
    """The condition by which a statement finds rows of the only table that it names, if it calls columns by their
    names."""
    match node:
        case ast.UpdateStmt(whereClause=where) | ast.DeleteStmt(whereClause=where):
            return where
        case ast.SelectStmt(fromClause=(ast.RangeVar(alias=alias),), whereClause=where):
            return where if alias is None or not alias.colnames else None
    return None


def spelled(shape: TableShape, row: Row) -> str | None:
    """A row's key in its one spelling; None where only the database could tell which spellings are the same."""
    if len(shape.key) == 1 and type(row.get(shape.key[0])) is int:
        value = shape.key_types[shape.key[0]].plain(row[shape.key[0]])
        return None if value is None else f"[{value}]"
    values = [shape.key_types[column].plain(row.get(column)) for column in shape.key]
    return None if None in values else msgspec.json.encode(values).decode()
