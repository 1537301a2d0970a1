"""What the database says about a table, as far as carrying out changes of its rows depends on it."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import asyncpg

from adapters.changes import InvalidChange, NotDeterministic, split_table_name
from adapters.postgres.sql.literals import SqlType, identifier
from adapters.postgres.sql.stamps import stamp_sql

_INTEGERS = frozenset({"int2", "int4", "int8"})
# Types with several texts for values that are equal: 1.5 and 1.50, "a" and "a  ", 0 and -0, 1 day and 24:00:00.
_ONE_FORM = {
    "numeric": "trim_scale({})",
    "bpchar": "({})::text",
    "float4": "({} + 0::float4)",
    "float8": "({} + 0)",
    "citext": "lower(({})::text)",
    "interval": "justify_interval({})",
}

_FIND_TABLE = f"""
select c.oid, n.nspname, c.relname, c.relkind, {stamp_sql("c.oid")} as stamp,
       exists (select from pg_trigger t join pg_proc f on f.oid = t.tgfoid where t.tgrelid = c.oid
         and not t.tgisinternal and t.tgenabled <> 'D' and f.pronamespace is distinct from to_regnamespace('tops'))
       or c.relhasrules or c.relrowsecurity as has_side_effects,
       coalesce((select array_agg(a.attname order by k.place) from pg_index i cross join
           lateral unnest(i.indkey) with ordinality as k(number, place)
           join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number
         where i.indrelid = c.oid and i.indisprimary), '{{}}')::text[] as primary_key,
       coalesce((select array_agg(distinct a.attname) from pg_index i join pg_attribute a on a.attrelid = i.indrelid
         where i.indrelid = c.oid and (i.indisunique or i.indisexclusion) and not i.indisprimary
           and (a.attnum = any(i.indkey) or 0 = any(i.indkey) or i.indpred is not null)
           and a.attnum > 0), '{{}}')::text[] as unique_columns,
       coalesce((select array_agg(distinct a.attname) from pg_constraint f
           join pg_attribute a on a.attrelid = f.conrelid and a.attnum = any(f.conkey)
         where f.conrelid = c.oid and f.contype = 'f'), '{{}}')::text[] as referring_columns,
       coalesce((select array_agg(distinct a.attname) from pg_constraint f
           join pg_attribute a on a.attrelid = f.confrelid and a.attnum = any(f.confkey)
         where f.confrelid = c.oid and f.contype = 'f'), '{{}}')::text[] as referenced_columns,
       exists (select from pg_constraint f where f.conrelid = c.oid and f.confrelid = c.oid) as refers_to_itself,
       exists (select from pg_constraint f where f.conrelid = c.oid and f.contype = 'f'
         and (f.confdeltype in ('c', 'n', 'd') or f.confupdtype in ('c', 'n', 'd'))) as is_cascaded_to
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.oid = to_regclass($1)
"""
# Whether a type is, or consists of, dates or times: of its elements, bounds, fields, or the type beneath a domain.
_HOLDS_TIME = """exists (
    with recursive part(oid) as (
        select t.oid
        union select inner_type.oid from part join pg_type w on w.oid = part.oid cross join lateral (
                  select w.typbasetype union all select w.typelem where w.typcategory = 'A'
                  union all select r.rngsubtype from pg_range r where r.rngtypid = w.oid
                  union all select r.rngtypid from pg_range r where r.rngmultitypid = w.oid
                  union all select f.atttypid from pg_attribute f
                             where f.attrelid = w.typrelid and w.typtype = 'c' and f.attnum > 0 and not f.attisdropped
              ) as inner_type(oid) where inner_type.oid <> 0)
    select from part join pg_type w on w.oid = part.oid where w.typcategory = 'D') as holds_time"""
# The type itself, or the one beneath a domain and the domains beneath it.
_BASE = """lateral (
    with recursive beneath(oid) as (
        select t.oid union select d.typbasetype from beneath join pg_type d on d.oid = beneath.oid
         where d.typtype = 'd')
    select w.* from beneath join pg_type w on w.oid = beneath.oid where w.typtype <> 'd') as b on true"""
# The functions of users in what a generated column `a` is made of, also those behind operators.
GENERATED_BY = """
select distinct coalesce(o.oprcode::oid, d.refobjid) as oid from pg_depend d
  left join pg_operator o on d.refclassid = 'pg_operator'::regclass and o.oid = d.refobjid
 where a.attgenerated <> '' and d.refclassid in ('pg_proc'::regclass, 'pg_operator'::regclass)
   and (d.classid = 'pg_class'::regclass and d.objid = a.attrelid and d.objsubid = a.attnum
        or d.classid = 'pg_attrdef'::regclass and d.objid = (select f.oid from pg_attrdef f
                 where f.adrelid = a.attrelid and f.adnum = a.attnum))"""
# Of the table with an oid.
COLUMN_TYPES = f"""
select a.attname, format_type(a.atttypid, -1) as type_name, t.typcategory::text as category, b.typname as base,
       t.typtype = 'd' as is_domain, format_type(a.atttypid, a.atttypmod) as declared,
       exists (select from pg_collation l where l.oid = a.attcollation and not l.collisdeterministic) as is_loose,
       t.typarray <> 0 and t.typdelim = ',' as has_array, a.attgenerated <> '' as is_generated,
       a.attidentity = 'a' as is_fixed,
       case when exists ({GENERATED_BY}) then (select pg_get_expr(f.adbin, f.adrelid) from pg_attrdef f
            where f.adrelid = a.attrelid and f.adnum = a.attnum) end as claimed,
       {_HOLDS_TIME}, e.typname as element_base, coalesce(e.typdelim, ',')::text as delimiter,
       format_type(b.typelem, -1) as element_name, e.typcategory::text as element_category
  from pg_attribute a
  join pg_type t on t.oid = a.atttypid
  join {_BASE}
  left join pg_type e on e.oid = b.typelem and b.typcategory = 'A'
 where a.attrelid = $1 and a.attnum > 0 and not a.attisdropped
 order by a.attnum
"""
_TYPES = f"""
select format_type(t.oid, -1) as type_name, t.typcategory::text as category, b.typname as base,
       t.typtype = 'd' as is_domain, format_type(t.oid, -1) as declared, false as is_loose,
       t.typarray <> 0 and t.typdelim = ',' as has_array,
       {_HOLDS_TIME}, e.typname as element_base, coalesce(e.typdelim, ',')::text as delimiter,
       format_type(b.typelem, -1) as element_name, e.typcategory::text as element_category
  from unnest($1::oid[]) with ordinality as asked(oid, place)
  join pg_type t on t.oid = asked.oid
  join {_BASE}
  left join pg_type e on e.oid = b.typelem and b.typcategory = 'A'
 order by asked.place
"""


@dataclass(frozen=True)
class Table:
    """One table's columns, its key, and what ties its rows to other rows."""

    oid: int
    sql_name: str
    key: tuple[str, ...]
    columns: dict[str, SqlType]
    fixed_columns: frozenset[str]  # GENERATED ALWAYS AS IDENTITY: no update can give them a value
    unique_columns: frozenset[str]  # of unique or exclusion constraints other than the primary key
    referring_columns: frozenset[str]  # in a foreign key of this table
    referenced_columns: frozenset[str]  # in a foreign key of another table (or this one)
    refers_to_itself: bool
    is_cascaded_to: bool  # rows can change because a row elsewhere does
    has_side_effects: bool  # triggers, rules or row security: a change may do anything
    stamp: str  # read before everything else: not newer than the rest
    claimed: dict[str, str] = field(default_factory=dict)  # generated columns by functions of users, and how

    @cached_property
    def stands_alone(self) -> bool:
        """A change of one row means nothing to any other row."""
        tied = self.unique_columns or self.referring_columns or self.referenced_columns
        return not tied and not self.has_side_effects

    @cached_property
    def key_has_one_text(self) -> bool:
        return all(self.columns[name].has_one_text for name in self.key)

    def column(self, name: str) -> SqlType:
        found = self.columns.get(name)
        if found is None:
            known = ", ".join(self.columns)
            raise InvalidChange(f"table {self.sql_name} has no column {name!r}; it has {known}")
        return found

    def check_key(self, key: Iterable[str]) -> None:
        if not self.key:
            raise InvalidChange(f"table {self.sql_name} has no primary key: add one, or write by SQL statement")
        if set(key) != set(self.key):
            raise InvalidChange(
                f"table {self.sql_name} is keyed by ({', '.join(self.key)}), not by ({', '.join(sorted(key))})"
            )

    def check_values(self, names: Iterable[str]) -> None:
        for name in names:
            self.column(name)
            if name in self.key:
                raise InvalidChange(f"column {name!r} is part of the key of {self.sql_name}: delete and insert the row")

    def check_assigned_once(self, values: Iterable[str], add: Iterable[str]) -> None:
        both, neither = set(values) & set(add), not set(values) | set(add)
        if both or neither:
            what = f"sets and adds to {', '.join(sorted(both))}" if both else "changes no column"
            raise InvalidChange(f"the update of {self.sql_name} {what}")

    def check_insert(self, names: Iterable[str]) -> None:
        given = set(names)
        for name in given:
            self.column(name)
        if not self.key:
            raise InvalidChange(f"table {self.sql_name} has no primary key: add one, or write by SQL statement")
        if missing := set(self.key) - given:
            names = ", ".join(sorted(missing))
            raise NotDeterministic("default", f"the insert into {self.sql_name} lacks its key: {names}")


def sql_name(table: str) -> str:
    """A table's name as changes give it, as SQL needs it."""
    schema, name = split_table_name(table)
    return identifier(name) if schema is None else f"{identifier(schema)}.{identifier(name)}"


async def find_table(connection: asyncpg.Connection, table: str) -> Table:
    found = await connection.fetchrow(_FIND_TABLE, sql_name(table))
    if found is None:
        raise InvalidChange(f"there is no table {table!r} in this database")
    if found["relkind"] not in (b"r", b"p"):
        raise InvalidChange(f"{table!r} is not a table")
    columns = await connection.fetch(COLUMN_TYPES, found["oid"])
    generated = {column["attname"] for column in columns if column["is_generated"]}

    def tied(names: list[str]) -> frozenset[str]:
        # A generated column may change with any other.
        every = frozenset(column["attname"] for column in columns)
        return frozenset(names) if generated.isdisjoint(names) else every

    return Table(
        oid=found["oid"],
        sql_name=f"{identifier(found['nspname'])}.{identifier(found['relname'])}",
        key=tuple(found["primary_key"]),
        columns={column["attname"]: sql_type(column) for column in columns if not column["is_generated"]},
        fixed_columns=frozenset(column["attname"] for column in columns if column["is_fixed"]),
        unique_columns=tied(found["unique_columns"]),
        referring_columns=tied(found["referring_columns"]),
        referenced_columns=tied(found["referenced_columns"]),
        refers_to_itself=found["refers_to_itself"],
        is_cascaded_to=found["is_cascaded_to"],
        has_side_effects=found["has_side_effects"] or found["relkind"] == b"p",
        stamp=found["stamp"],
        claimed={column["attname"]: column["claimed"] for column in columns if column["claimed"] is not None},
    )


async def find_types(connection: asyncpg.Connection, oids: list[int]) -> list[SqlType]:
    """The types of a statement's parameters, in order."""
    rows = await connection.fetch(_TYPES, oids)
    return [sql_type(row) for row in rows]


def sql_type(row: Any) -> SqlType:
    """The type that a row of `COLUMN_TYPES` describes."""
    element = None
    if row["element_base"] is not None:
        element = _simple_type(row["element_name"], row["element_base"], row["element_category"], has_array=True)
        element = replace(element, holds_time=row["holds_time"])
    simple = _simple_type(row["type_name"], row["base"], row["category"], has_array=row["has_array"])
    return replace(
        simple,
        element=element,
        delimiter=row["delimiter"],
        holds_time=row["holds_time"],
        is_domain=row["is_domain"],
        is_loose=row["is_loose"],
        declared=row["declared"],
    )


def _simple_type(name: str, base: str, category: str, *, has_array: bool) -> SqlType:
    return SqlType(
        name=name,
        category=category,
        has_array=has_array,
        is_json=base in ("json", "jsonb"),
        is_float=base in ("float4", "float8"),
        is_bytes=base == "bytea",
        is_integer=base in _INTEGERS,
        is_uuid=base == "uuid",
        one_form=_ONE_FORM.get(base, "{}"),
        base=base,
        declared=name,
    )
