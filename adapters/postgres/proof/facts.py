"""What the proof has to know of types, collations and tables, read from the catalogue and kept until it may be old."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import asyncpg

from adapters.postgres.proof.functions import BUILT_IN_BELOW, Functions
from adapters.postgres.proof.tree import Node, Unreadable, Value, nodes_of, parse
from adapters.postgres.sql.stamps import Stamps, read_stamps
from tops.model.errors import InvariantBroken

# Base types whose input function depends on the text alone, or on a setting that every session pins (interval).
_PLAIN = frozenset(
    {"bool", "int2", "int4", "int8", "numeric", "float4", "float8", "text", "varchar", "bpchar", "char", "name"}
    | {"bytea", "uuid", "json", "jsonb", "bit", "varbit", "inet", "cidr", "macaddr", "macaddr8", "interval"}
    | {"tsvector", "tsquery", "point", "line", "lseg", "box", "path", "polygon", "circle"}
)
_TIME = frozenset({"date", "time", "timetz", "timestamp", "timestamptz"})

_TYPES = """
select t.oid, format_type(t.oid, null) as name, t.typname, t.typtype::text as kind,
       n.nspname = 'pg_catalog' as built_in, t.typelem as element, t.typbasetype as base,
       coalesce(r.rngsubtype, r.rngtypid, 0) as subtype, coalesce(r.rngcollation, 0) as range_collation,
       array(select a.atttypid from pg_attribute a
              where a.attrelid = t.typrelid and t.typtype = 'c' and a.attnum > 0 and not a.attisdropped) as parts,
       array(select c.conname::text from pg_constraint c where c.contypid = t.oid order by c.conname) as check_names,
       array(select c.conbin::text from pg_constraint c where c.contypid = t.oid order by c.conname) as checks,
       t.typelem <> 0 and t.typcategory = 'A' as is_array, t.typdefaultbin::text as domain_default
  from pg_type t join pg_namespace n on n.oid = t.typnamespace
  left join lateral (select rngsubtype, null::oid as rngtypid, rngcollation from pg_range where rngtypid = t.oid
                     union all select null, rngtypid, rngcollation from pg_range where rngmultitypid = t.oid) r on true
 where t.oid = any($1::oid[])
"""
_COLLATIONS = "select oid, collisdeterministic, collname from pg_collation where oid = any($1::oid[])"
_TABLE = """
select format('%I.%I', n.nspname, c.relname) as name, c.relkind::text as kind,
       c.relpersistence::text as persistence, c.relrowsecurity as row_security,
       exists (select from pg_rewrite r where r.ev_class = c.oid and r.rulename <> '_RETURN') as has_rules,
       exists (select from pg_inherits i where i.inhrelid = c.oid or i.inhparent = c.oid) as inherits,
       array(select t.tgname::text from pg_trigger t join pg_proc p on p.oid = t.tgfoid
               join pg_namespace s on s.oid = p.pronamespace
              where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled <> 'D' and s.nspname <> 'tops'
              order by t.tgname) as triggers,
       array(select k.conname::text from pg_constraint k
              where k.conrelid = c.oid and k.contype in ('p', 'u', 'x') and k.condeferrable) as deferrable_keys
  from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = $1
"""
_COLUMNS = """
select a.attnum as number, a.attname as name, a.atttypid::bigint as type, a.attgenerated <> '' as is_generated,
       a.attidentity <> '' as is_identity, d.adbin::text as expression
  from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
 where a.attrelid = $1 and a.attnum > 0 and not a.attisdropped order by a.attnum
"""
_CHECKS = "select conname, conbin::text as expression from pg_constraint where conrelid = $1 and contype = 'c'"
# For each key column of a unique index the functions of its family's equalities, own is that of its own type; for an
# exclusion constraint its operators.
_INDEXES = """
select x.relname as name, i.indisunique or i.indisexclusion as is_unique, i.indisexclusion as is_exclusion,
       i.indkey::int2[] as columns, i.indnkeyatts as key_columns, i.indexprs::text as expressions,
       i.indpred::text as predicate, i.indcollation::oid[]::bigint[] as collations,
       case when i.indisexclusion then
         (select array_agg(array[place - 1, o.oprcode::oid::bigint, 1]) from pg_constraint k
            cross join lateral unnest(k.conexclop) with ordinality as e(operator, place)
            join pg_operator o on o.oid = e.operator where k.conindid = i.indexrelid and k.contype = 'x')
       else
         (select array_agg(array[place - 1, o.oprcode::oid::bigint, (m.amoprighttype = oc.opcintype)::int])
            from unnest(i.indclass::oid[]) with ordinality as e(class, place)
            join pg_opclass oc on oc.oid = e.class
            join pg_amop m on m.amopfamily = oc.opcfamily and m.amoplefttype = oc.opcintype and m.amopstrategy = 3
            join pg_operator o on o.oid = m.amopopr where x.relam = 403)
       end as equalities
  from pg_index i join pg_class x on x.oid = i.indexrelid where i.indrelid = $1 and i.indislive
 order by x.relname
"""
# All about one table in one round trip.
_FACTS = f"""
select (select to_jsonb(t) from ({_TABLE}) t) as table,
       (select jsonb_agg(to_jsonb(c)) from ({_COLUMNS}) c) as columns,
       (select jsonb_agg(to_jsonb(k)) from ({_CHECKS}) k) as checks,
       (select jsonb_agg(to_jsonb(i)) from ({_INDEXES}) i) as indexes
"""
_FOREIGN_KEYS = """
select f.conname as name, f.conrelid as referring, f.confrelid as referenced, f.conkey::int2[] as referring_columns,
       f.confkey::int2[] as referenced_columns, f.confdeltype::text as on_delete, f.confupdtype::text as on_update,
       array(select o.oprcode::oid from pg_operator o where o.oid = any(f.conpfeqop)) as equalities
  from pg_constraint f
 where f.contype = 'f' and (f.conrelid = any($1::oid[]) or f.confrelid = any($1::oid[]))
 order by f.conname, f.oid
"""


@dataclass(frozen=True, slots=True)
class TypeFacts:
    """`of` are the types that its values consist of; `checks` those of a domain by name."""

    oid: int
    name: str
    kind: str  # plain, time, enum, array, range, domain, composite, other
    of: tuple[int, ...] = ()
    checks: tuple[tuple[str, Node], ...] = ()
    default: Node | None = None  # of a domain


@dataclass(frozen=True, slots=True)
class Column:
    number: int
    name: str
    type: int
    is_generated: bool
    is_identity: bool
    expression: Node | None  # of its default, or what it is generated from


@dataclass(frozen=True, slots=True)
class Index:
    """Per key column: `own_equality` is the function that decides whether two of its values are the same, 0 if there is
    none; `equalities` are those with which the index can be searched, also for values of other types."""

    name: str
    is_unique: bool
    is_exclusion: bool
    columns: tuple[int, ...]
    expressions: tuple[Node, ...]
    predicate: Node | None
    collations: tuple[int, ...]
    own_equality: tuple[int, ...]
    equalities: tuple[frozenset[int], ...]

    @property
    def touched_by(self) -> frozenset[int]:
        """Columns on which what the index holds depends."""
        nodes = [*self.expressions, *([self.predicate] if self.predicate is not None else [])]
        inside = {node.number("varattno") for top in nodes for node in top.walk() if node.kind == "VAR"}
        return frozenset({number for number in self.columns if number > 0} | inside)


@dataclass(frozen=True, slots=True)
class ForeignKey:
    name: str
    referring: int
    referenced: int
    referring_columns: frozenset[int]
    referenced_columns: frozenset[int]
    on_delete: str
    on_update: str
    equalities: frozenset[int]

    @property
    def has_action(self) -> bool:
        return bool({self.on_delete, self.on_update} & ACTIONS)


ACTIONS = frozenset({"c", "n", "d"})  # cascade, set null, set default


@dataclass(frozen=True, slots=True)
class TableFacts:
    oid: int
    name: str
    kind: str
    persistence: str
    row_security: bool
    has_rules: bool
    inherits: bool
    triggers: tuple[str, ...]
    deferrable_keys: tuple[str, ...]
    columns: dict[int, Column]
    checks: tuple[tuple[str, Node], ...]
    indexes: tuple[Index, ...]
    foreign_keys: tuple[ForeignKey, ...]  # of and to this table and those that actions reach from it

    @property
    def unique_columns(self) -> frozenset[int]:
        """Columns whose new values are compared with other rows'; a generated one may change with any other."""
        tied = frozenset().union(*(index.touched_by for index in self.indexes if index.is_unique))
        generated = any(self.columns[number].is_generated for number in tied if number in self.columns)
        return frozenset(self.columns) if generated else tied


class Facts:
    """Loads what a proof names before it is made, so that the proof itself is a function of what is known."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self._connection = connection
        self._functions: Functions | None = None
        self.types: dict[int, TypeFacts] = {}
        self.tables: dict[int, TableFacts] = {}
        self._stamps: dict[int, str] = {}  # of tables, read before their facts
        self._reach: dict[int, Stamps] = {}
        self.deterministic_collations: dict[int, bool] = {}

    @property
    def functions(self) -> Functions:
        if self._functions is None:
            raise InvariantBroken("the list of functions is used before it is resolved")
        return self._functions

    def forget(self) -> None:
        """The schema may have changed; what comes with the server has not."""
        self.tables.clear()
        self._stamps.clear()
        self._reach.clear()
        self.types = {oid: facts for oid, facts in self.types.items() if oid < BUILT_IN_BELOW}

    async def load_for(self, trees: Iterable[Node]) -> None:
        """Types, collations and names of functions that the trees mention, and those of their domains' checks."""
        functions = await self._resolved()
        nodes = [node for tree in trees for node in tree.walk()]
        while nodes:
            mentioned = _mentioned(nodes)
            await self._load_collations(mentioned.collations)
            await functions.load_names(self._connection, mentioned.functions)
            nodes = await self._load_types(mentioned.types)

    async def _resolved(self) -> Functions:
        if self._functions is None:
            self._functions = await Functions.resolve(self._connection)
        return self._functions

    async def _load_collations(self, oids: set[int]) -> None:
        unknown = oids - self.deterministic_collations.keys() - {0}
        if unknown:
            rows = await self._connection.fetch(_COLLATIONS, list(unknown))
            self.deterministic_collations.update({row["oid"]: row["collisdeterministic"] for row in rows})

    async def _load_types(self, oids: set[int]) -> list[Node]:
        """Also those that a type is made of; returns the nodes of what domains check and have by default."""
        checks: list[Node] = []
        unknown = oids - self.types.keys() - {0}
        while unknown:
            rows = await self._connection.fetch(_TYPES, list(unknown))
            found = [_type_facts(row) for row in rows]
            self.types.update({facts.oid: facts for facts in found})
            checks += [node for facts in found for tree in _trees(facts) for node in tree.walk()]
            unknown = {oid for facts in found for oid in facts.of} - self.types.keys()
        return checks

    async def load_table(self, oid: int) -> None:
        """The table and those that actions of foreign keys reach from it, with what all their expressions mention."""
        if oid in self._reach:
            return
        functions = await self._resolved()
        reached = await self._stamped(oid)
        trees: list[Node] = []
        types, collations, equalities = set[int](), set[int](), set[int]()
        for table in [oid, *reached.tables]:
            if table in self.tables:
                continue
            facts = await self._table(table, reached.keys)
            self.tables[table] = facts
            types |= {column.type for column in facts.columns.values()}
            trees += [check for _, check in facts.checks]
            trees += [column.expression for column in facts.columns.values() if column.expression is not None]
            for index in facts.indexes:
                trees += [*index.expressions, *([index.predicate] if index.predicate is not None else [])]
                collations |= set(index.collations)
                equalities |= set(index.own_equality) - {0}
        await self._load_collations(collations)
        await functions.load_names(self._connection, equalities.union(*(key.equalities for key in reached.keys)))
        trees += await self._load_types(types)
        await self.load_for(trees)
        self._reach[oid] = {table: self._stamps[table] for table in [oid, *reached.tables]}

    def knows(self, oid: int) -> bool:
        return oid in self._reach

    def stamps(self, oid: int) -> Stamps:
        """Of a loaded table and those that actions reach from it: not newer than anything that is known of them."""
        return self._reach[oid]

    async def _stamped(self, oid: int) -> "_Reached":
        """The tables that actions reach, with their stamps: a foreign key that comes later changes one of these."""
        while True:
            reached = await self._reached(oid)
            stamps = await read_stamps(self._connection, [oid, *reached.tables])
            if await self._reached(oid) == reached:
                self._stamps = {**stamps, **self._stamps}
                return reached

    async def _reached(self, oid: int) -> "_Reached":
        """Foreign keys around the table; followed to further tables where they have actions, however they begin."""
        known, keys = {oid}, dict[tuple[str, int], ForeignKey]()
        while True:
            rows = await self._connection.fetch(_FOREIGN_KEYS, list(known))
            keys = {(row["name"], row["referring"]): _foreign_key(row) for row in rows}
            further = {key.referring for key in keys.values() if key.referenced in known and key.has_action} - known
            if not further:
                return _Reached(known - {oid}, tuple(keys.values()))
            known |= further

    async def _table(self, oid: int, keys: "tuple[ForeignKey, ...]") -> TableFacts:
        found = await self._connection.fetchrow(_FACTS, oid)
        if found is None or found["table"] is None:
            raise Unreadable(f"there is no table with id {oid}")
        row, columns, checks, indexes = (json.loads(part or "[]") for part in found.values())
        return TableFacts(
            oid=oid,
            name=row["name"],
            kind=row["kind"],
            persistence=row["persistence"],
            row_security=row["row_security"],
            has_rules=row["has_rules"],
            inherits=row["inherits"],
            triggers=tuple(row["triggers"]),
            deferrable_keys=tuple(row["deferrable_keys"]),
            columns={column.number: column for column in map(_column, columns)},
            checks=tuple((check["conname"], _node(check["expression"])) for check in checks),
            indexes=tuple(map(_index, indexes)),
            foreign_keys=keys,
        )


@dataclass(frozen=True, slots=True)
class _Reached:
    tables: set[int]
    keys: tuple[ForeignKey, ...]


@dataclass(frozen=True, slots=True)
class _Mentioned:
    types: set[int]
    collations: set[int]
    functions: set[int]


_TYPE_FIELDS = (
    *("consttype", "paramtype", "resulttype", "minmaxtype"),
    *("vartype", "funcresulttype", "opresulttype"),
)
_FUNCTION_FIELDS = ("funcid", "opfuncid")


def _mentioned(nodes: list[Node]) -> _Mentioned:
    def numbers(*fields: str) -> set[int]:
        return {node.number(field) for node in nodes for field in fields if field in node.fields}

    return _Mentioned(numbers(*_TYPE_FIELDS), numbers("inputcollid"), numbers(*_FUNCTION_FIELDS))


def _trees(facts: TypeFacts) -> list[Node]:
    return [check for _, check in facts.checks] + ([facts.default] if facts.default is not None else [])


def _node(text: str) -> Node:
    value = parse(text)
    if not isinstance(value, Node):
        raise Unreadable("an expression of the catalogue is no node")
    return value


def _nodes(text: str | None) -> tuple[Node, ...]:
    value: Value = None if text is None else parse(text)
    return () if value is None else tuple(nodes_of(value if isinstance(value, list) else [value]))


def _column(row: Any) -> Column:
    return Column(
        row["number"],
        row["name"],
        row["type"],
        row["is_generated"],
        row["is_identity"],
        None if row["expression"] is None else _node(row["expression"]),
    )


def _index(row: Any) -> Index:
    equalities: list[set[int]] = [set() for _ in range(row["key_columns"])]
    own = [0] * row["key_columns"]
    for place, function, is_own in row["equalities"] or []:
        equalities[place].add(function)
        own[place] = function if is_own else own[place]
    return Index(
        name=row["name"],
        is_unique=row["is_unique"],
        is_exclusion=row["is_exclusion"],
        columns=tuple(row["columns"]),
        expressions=_nodes(row["expressions"]),
        predicate=None if row["predicate"] is None else _node(row["predicate"]),
        collations=tuple(row["collations"]),
        own_equality=tuple(own),
        equalities=tuple(map(frozenset, equalities)),
    )


def _foreign_key(row: Any) -> ForeignKey:
    return ForeignKey(
        row["name"],
        row["referring"],
        row["referenced"],
        frozenset(row["referring_columns"]),
        frozenset(row["referenced_columns"]),
        row["on_delete"],
        row["on_update"],
        frozenset(row["equalities"]),
    )


def _type_facts(row: Any) -> TypeFacts:
    oid, name = row["oid"], row["name"]
    checks = tuple(zip(row["check_names"], map(_node, row["checks"]), strict=True))
    match row["kind"]:
        case "d":
            default = None if row["domain_default"] is None else _node(row["domain_default"])
            return TypeFacts(oid, name, "domain", (row["base"],), checks, default)
        case "e":
            return TypeFacts(oid, name, "enum")
        case "c":
            return TypeFacts(oid, name, "composite", tuple(row["parts"]))
        case "r" | "m" if row["built_in"]:
            return TypeFacts(oid, name, "range", (row["subtype"],))
        case "b" if row["is_array"]:
            return TypeFacts(oid, name, "array", (row["element"],))
        case "b" if row["built_in"] and row["typname"] in _TIME:
            return TypeFacts(oid, name, "time")
        case "b" if row["built_in"] and row["typname"] in _PLAIN:
            return TypeFacts(oid, name, "plain")
        case _:
            return TypeFacts(oid, name, "other")
