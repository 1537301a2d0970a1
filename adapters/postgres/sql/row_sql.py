"""Row changes as SQL: one statement over arrays for any number of rows of one shape, and the row versions with it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from adapters.changes import SUMS, Delete, Insert, Row, RowChange, Update, Upsert
from adapters.postgres.sql.catalog import Table
from adapters.postgres.sql.literals import BIGINT, TEXT, SqlType, identifier, quote, text_form

Source = Literal["values", "key", "add", "expected version", "expected row", "number", "sum key"]


class Part(NamedTuple):
    """One array of a call: where in a change its values are found, and their type."""

    source: Source
    column: str
    sql_type: SqlType


class Sql(NamedTuple):
    """A statement over arrays; `counted`: its last parameter is the expected number of rows."""

    text: str
    parts: tuple[Part, ...]
    counted: bool = True


class _Arrays:
    """Numbers the parameters of a statement over arrays and names the columns that they become."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def take(self, source: Source, column: str, sql_type: SqlType) -> str:
        self.parts.append(Part(source, column, sql_type))
        return f"s.c{len(self.parts)}{sql_type.cast}"

    @property
    def source(self) -> str:
        arrays = ", ".join(f"${place}::{part.sql_type.carrier}" for place, part in enumerate(self.parts, 1))
        names = ", ".join(f"c{place}" for place in range(1, len(self.parts) + 1))
        return f"unnest({arrays}) as s({names})"

    @property
    def lockstep(self) -> str:
        """As `source`, row by row instead of kept aside as a whole first: cheaper, but the planner knows less of it."""
        arrays = ", ".join(
            f"unnest(${place}::{part.sql_type.carrier}) as c{place}" for place, part in enumerate(self.parts, 1)
        )
        return f"(select {arrays}) as s"

    def counted(self, change: str) -> Sql:
        check = f"tops.affected(${len(self.parts) + 1}::int, count(*))"
        return Sql(f"with changed as ({change} returning 1) select {check} from changed", tuple(self.parts))

    def told(self, select: str) -> Sql:
        """For statements that raise by themselves; the last parameter has to be used."""
        return Sql(f"{select} where ${len(self.parts) + 1}::int is not null", tuple(self.parts))


def row_change_sql(change: RowChange, table: Table) -> Sql:
    arrays = _Arrays()
    match change:
        case Insert(_, values):
            insert = _insert(arrays, table, [("values", name) for name in values])
            if table.has_side_effects:  # a trigger may leave a row out
                return arrays.counted(f"{insert} {arrays.source}")
            return Sql(f"{insert} {arrays.lockstep}", tuple(arrays.parts), counted=False)
        case Upsert(_, key, values, _, add):
            columns: list[tuple[Source, str]] = [
                *(("key", name) for name in key),
                *(("values", name) for name in values),
                *(("add", name) for name in add),
            ]
            insert = _insert(arrays, table, columns)
            target = ", ".join(map(identifier, table.key))
            settings = [f"{identifier(name)} = excluded.{identifier(name)}" for name in values]
            settings += [f"{identifier(name)} = t.{identifier(name)} + excluded.{identifier(name)}" for name in add]
            settings = settings or [f"{identifier(name)} = excluded.{identifier(name)}" for name in table.key]
            update = f"do update set {', '.join(settings)}"
            return arrays.counted(f"{insert} {arrays.source} on conflict ({target}) {update}")
        case Delete():
            where = _where(arrays, table, change.expect_row)
            return arrays.counted(f"delete from {table.sql_name} as t using {arrays.source} where {where}")
        case Update(_, _, values, add):
            where = _where(arrays, table, change.expect_row)
            assigned = [f"{identifier(name)} = {arrays.take('values', name, table.column(name))}" for name in values]
            assigned += [
                f"{identifier(name)} = t.{identifier(name)} + {arrays.take('add', name, table.column(name))}"
                for name in add
            ]
            update = f"update {table.sql_name} as t set {', '.join(assigned)} from"
            if change.sum_key:
                return _summed(arrays, change, table, f"{update} s where {where}")
            return arrays.counted(f"{update} {arrays.source} where {where}")


def _summed(arrays: _Arrays, change: Update, table: Table, update: str) -> Sql:
    """The update and its sums as one statement, so that the values travel and are taken apart once."""
    key = arrays.take("sum key", "", TEXT)
    amounts = [(part.column, place) for place, part in enumerate(arrays.parts, 1) if part.source == "add"]
    sums = " union all ".join(
        f"select {quote(change.table)}, {key}, {quote(column)}, s.c{place} from s" for column, place in amounts
    )
    check = f"tops.affected(${len(arrays.parts) + 1}::int, count(*))"
    return Sql(
        f"with s as materialized (select * from {arrays.source}), changed as ({update} returning 1), "
        f"summed as (insert into {SUMS} as sums (table_name, key, column_name, amount) {sums} "
        "on conflict (table_name, key, column_name) do update set amount = sums.amount + excluded.amount) "
        f"select {check} from changed",
        tuple(arrays.parts),
    )


def _insert(arrays: _Arrays, table: Table, columns: list[tuple[Source, str]]) -> str:
    names = ", ".join(identifier(name) for _, name in columns)
    taken = ", ".join(arrays.take(attribute, name, table.column(name)) for attribute, name in columns)
    # A replicated row brings its identity along, also where the column would rather make its own.
    return f"insert into {table.sql_name} as t ({names}) overriding system value select {taken} from"


def _where(arrays: _Arrays, table: Table, expect_row: str | None) -> str:
    key = [f"t.{identifier(name)} = {arrays.take('key', name, table.column(name))}" for name in table.key]
    expected = [f"{row_digest(table, 't')} = {arrays.take('expected row', '', TEXT)}"] if expect_row is not None else []
    return " and ".join([*key, *expected])


def row_digest(table: Table, row: str) -> str:
    """The digest of a row's text: the same on all replicas that hold the same values, whatever the order of columns.

    Not by comparing values: json has no equality, and 1.0 equals 1.00. Generated columns follow from the others."""
    columns = ", ".join(f"{row}.{identifier(name)}" for name in sorted(table.columns))
    return f"md5(row({columns})::text)"


def _version_key(arrays: _Arrays, change: RowChange, table: Table) -> str:
    source: Source = "values" if isinstance(change, Insert) else "key"
    parts = [table.column(name).canonical(arrays.take(source, name, table.column(name))) for name in table.key]
    return f"jsonb_build_array({', '.join(parts)})::text"


def check_versions_sql(change: RowChange, table: Table) -> Sql:
    arrays = _Arrays()
    key = _version_key(arrays, change, table)
    expected = arrays.take("expected version", "", BIGINT)
    return arrays.told(f"select tops.expect_version({quote(table.sql_name)}, {key}, {expected}) from {arrays.source}")


def write_versions_sql(change: RowChange, table: Table) -> Sql:
    arrays = _Arrays()
    key = _version_key(arrays, change, table)
    name = quote(table.sql_name)
    if isinstance(change, Delete):
        delete = f"delete from tops.row_versions v using {arrays.source} where v.table_name = {name} and v.key = {key}"
        return Sql(f"{delete} and ${len(arrays.parts) + 1}::int is not null", tuple(arrays.parts))
    number = arrays.take("number", "", BIGINT)
    insert = f"insert into tops.row_versions as v select {name}, {key}, {number} from {arrays.source}"
    # A local write has no number yet, and leaves the version as it is.
    where = f"where ${len(arrays.parts) + 1}::int is not null and {number} > 0"
    conflict = "on conflict (table_name, key) do update set version = excluded.version"
    return Sql(f"{insert} {where} {conflict}", tuple(arrays.parts))


def one_form_sql(kinds: Sequence[SqlType], *, stored: bool) -> str:
    """A query over one array of texts for each column of a key: the keys in the one form of their types, in order."""
    names = [f"c{place}" for place in range(len(kinds))]
    forms = [kind.in_one_form(f"k.{name}", stored=stored) for kind, name in zip(kinds, names, strict=True)]
    columns = ", ".join(f"{form} as {name}" for form, name in zip(forms, names, strict=True))
    arrays = ", ".join(f"${place}::text[]" for place in range(1, len(kinds) + 1))
    return f"select {columns} from unnest({arrays}) with ordinality as k({', '.join(names)}, n) order by k.n"


def version_sql(table: Table, key: Row) -> tuple[str, list[str]]:
    """A query for the version of one row, and its parameters as text."""
    types = [table.columns[name] for name in table.key]
    taken = ", ".join(kind.canonical(f"${place}::text::{kind.name}") for place, kind in enumerate(types, 1))
    where = f"table_name = {quote(table.sql_name)} and key = jsonb_build_array({taken})::text"
    return f"select version from tops.row_versions where {where}", [
        text_form(key[name], table.columns[name]) or "" for name in table.key
    ]
