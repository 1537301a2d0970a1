"""The tables that a replica keeps beside its data: row clocks, the conflict log, and transactions set aside."""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from adapters.changes import (
    SUMS,
    Change,
    Delete,
    Insert,
    InvalidChange,
    Member,
    Row,
    RowChange,
    Statement,
    Update,
    Upsert,
    Value,
    is_captured,
    joined_table_name,
)
from adapters.postgres.sql.catalog import COLUMN_TYPES, sql_name, sql_type
from adapters.postgres.sql.literals import SqlType
from adapters.resource import Resource
from replication.conflicts.versions import Base, Version, from_json, to_json
from tops.model.errors import ResourceError, TopsError
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode

CLOCKS = "tops.row_clocks"
CONFLICTS, QUARANTINED = "tops.conflicts", "tops.set_aside"
WRITE_SETS = "tops.write_sets"
KEYS, LOGGED_KEYS = "tops.idempotency_keys", "tops.logged_keys"
DDL = f"""
create table if not exists {CLOCKS} (
    table_name text not null, key text not null, generation bigint not null, deleted boolean not null,
    edits bigint not null, clock bigint not null, site text not null, adds text not null, columns text not null,
    previous text not null, change text not null, base text not null default '', waiting int not null default 0,
    primary key (table_name, key)) with (fillfactor = 70);
create table if not exists {CONFLICTS} (
    id text primary key, at timestamptz not null, kind text not null, table_name text not null, key text not null,
    winner text not null, kept text, discarded text, resolver text not null, number bigint not null, tx text not null);
create index if not exists conflicts_at on {CONFLICTS} (at);
create table if not exists {LOGGED_KEYS} (
    replica_set text not null, key text not null, tx text not null, number bigint not null,
    primary key (replica_set, key));
create table if not exists {QUARANTINED} (
    tx text primary key, at timestamptz not null, number bigint not null, member bytea not null, reason text not null);
create table if not exists {WRITE_SETS} (number bigint primary key, places text not null);
"""

_COLUMNS = """
select c.oid, n.nspname as schema_name, c.relname as table_name, a.attname as name,
       a.attgenerated <> '' as generated, pg_get_expr(d.adbin, d.adrelid) as standard,
       coalesce(a.attnum = any (i.indkey), false) as in_key, format_type(a.atttypid, a.atttypmod) as type,
       a.attidentity = 'a' as fixed,
       a.attidentity <> '' or exists (select from pg_depend s join pg_class q on q.oid = s.refobjid and q.relkind = 'S'
         where s.classid = 'pg_attrdef'::regclass and s.objid = d.oid and s.refclassid = 'pg_class'::regclass) as drawn,
       (with recursive beneath(oid) as (
            select a.atttypid union select t.typbasetype from beneath join pg_type t on t.oid = beneath.oid
             where t.typtype = 'd')
        select bool_or(oid in ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'numeric'::regtype)) from beneath
       ) as summed
  from pg_class c join pg_namespace n on n.oid = c.relnamespace join pg_attribute a on a.attrelid = c.oid
  left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
  left join pg_index i on i.indrelid = a.attrelid and i.indisprimary
 where c.oid = to_regclass($1) and a.attnum > 0 and not a.attisdropped order by a.attnum
"""
_RECORDS = (
    f"select table_name, key, generation, deleted, edits, clock, site, adds, columns from {CLOCKS} "
    "where (table_name, key) in (select * from unnest($1::text[], $2::text[]))"
)
_RECORDS_AND_SUMS = f"""
select k.table_name, k.key, coalesce(c.generation, 0) as generation, coalesce(c.deleted, false) as deleted,
       coalesce(c.edits, 0) as edits, coalesce(c.clock, 0) as clock, coalesce(c.site, '') as site,
       coalesce((select json_object_agg(s.column_name, s.amount::text)::text from {SUMS} s
                  where s.table_name = k.table_name and s.key = k.key), '{{}}') as adds,
       coalesce(c.columns, '{{}}') as columns
  from unnest($1::text[], $2::text[]) as k(table_name, key) left join {CLOCKS} c using (table_name, key)
"""
LEARN_AGAIN_S = 5.0


class _Stored(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A rejection in the conflict log, where people read it, too: with the names of its fields, which are those of
    `Rejection` in the same order."""

    code: RejectionCode
    text: str = ""
    sqlstate: str = ""
    proof: str = ""
    first_tx: TxId | None = None
    first_number: int | None = None


class TableShape(msgspec.Struct, frozen=True):
    """The columns of a user's table, as far as conflicts need them. `name` is the one that the catalogue has for it."""

    name: str
    key: tuple[str, ...]
    others: tuple[str, ...]
    standards: dict[str, str | None]  # the default's expression
    types: dict[str, str]
    fixed: frozenset[str] = frozenset()  # GENERATED ALWAYS AS IDENTITY: no update can give them a value
    drawn: frozenset[str] = frozenset()  # left out of an insert, they get the next value of a sequence
    summed: frozenset[str] = frozenset()  # integers and numerics: increments can be made in any order
    key_types: dict[str, SqlType] = {}

    def key_of(self, change: Row) -> Row:
        missing = [name for name in self.key if name not in change]
        if missing:
            raise InvalidChange(f"table {self.name!r}: the change lacks the key column {missing[0]!r}")
        if empty := [name for name in self.key if change[name] is None]:
            raise InvalidChange(f"table {self.name!r}: the key column {empty[0]!r} is null; no row can have such a key")
        return {name: change[name] for name in self.key}


class Shapes:
    """The shapes of tables, read again after some seconds, for a column that is not known, and when rows can't be
    read by a shape: a table may change while the set runs."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._known: dict[str, tuple[float, TableShape]] = {}  # and when it was read

    async def of(self, table: str, naming: Iterable[str] = ()) -> TableShape:
        """`naming` are columns that somebody expects in it."""
        read_at, shape = self._known.get(table, (0.0, None))
        if shape is None or time.monotonic() - read_at > LEARN_AGAIN_S or not shape.types.keys() >= set(naming):
            shape = await self._read(table)
            self._known[table] = (time.monotonic(), shape)
        return shape

    async def rows(self, table: str, holders: Sequence[Row], naming: Iterable[str] = ()) -> list[Row | None]:
        """The present images of the rows whose keys these hold, as `read_rows`."""
        shape = await self.of(table, naming)
        try:
            return await read_rows(self._resource, shape, [shape.key_of(row) for row in holders])
        except TopsError:
            del self._known[table]
            if (again := await self.of(table)) == shape:
                raise
            return await read_rows(self._resource, again, [again.key_of(row) for row in holders])

    async def _read(self, table: str) -> TableShape:
        found = await self._resource.read_own(_COLUMNS, (sql_name(table),))
        rows = [row for row in found.rows if not row["generated"]]
        key = tuple(row["name"] for row in rows if row["in_key"])
        if not rows:
            raise InvalidChange(f"no table {table!r} is known here")
        if not key:
            raise InvalidChange(f"table {table!r} has no primary key: rows could not be told apart")
        types = (await self._resource.read_own(COLUMN_TYPES, (rows[0]["oid"],))).rows
        return TableShape(
            joined_table_name(rows[0]["schema_name"], rows[0]["table_name"]),
            key,
            tuple(row["name"] for row in rows if not row["in_key"]),
            {row["name"]: row["standard"] for row in rows},
            {row["name"]: row["type"] for row in rows},
            frozenset(row["name"] for row in rows if row["fixed"] and not row["in_key"]),
            frozenset(row["name"] for row in rows if row["drawn"]),
            frozenset(row["name"] for row in rows if row["summed"]),
            {row["attname"]: sql_type(row) for row in types if row["attname"] in key},
        )

    async def normal(self, shape: TableShape, texts: Row) -> Row:
        """Values as the database would give them back, as texts: what a column's type makes of them."""
        if not texts:
            return {}
        columns = ", ".join(
            f"${row_key}::text::{shape.types[name]}::text as {_quoted(name)}" for row_key, name in enumerate(texts, 1)
        )
        return (await self._resource.read_own(f"select {columns}", list(texts.values()))).rows[0]

    async def standard(self, shape: TableShape, column: str) -> Any:
        """The value that a column gets when nobody gives it one: it must travel with the row."""
        expression = shape.standards[column]
        if expression is None:
            return None
        return (await self._resource.read_own(f"select {expression} as value")).rows[0]["value"]


def key_text(key: Row) -> str:
    """A row's name among those of its table: its key, whose values are in their one form."""
    if len(key) == 1:
        ((name, value),) = key.items()
        if type(value) is int:  # as below, for the most common key of all
            return f'{{{_name_text(name)}: "{value}"}}'
    return to_json({name: as_text(value) for name, value in key.items()})


_name_text = lru_cache(maxsize=1_000)(to_json)


async def read_versions(
    resource: Resource, keys: Iterable[tuple[str, str]], *, in_record: bool = False
) -> dict[tuple[str, str], Version]:
    """What is known of these rows; rows without a record are of generation 0.

    `in_record`: the increments are those that the record itself names, and not the sums that are kept beside it.
    """
    wanted = sorted(set(keys))
    if not wanted:
        return {}
    found = await resource.read_own(
        _RECORDS if in_record else _RECORDS_AND_SUMS,
        ([table for table, _ in wanted], [key for _, key in wanted]),
    )
    return {
        (row["table_name"], row["key"]): Version(
            row["generation"],
            row["deleted"],
            row["edits"],
            row["clock"],
            row["site"],
            from_json(row["adds"]),
            {name: tuple(rank) for name, rank in from_json(row["columns"]).items()},
        )
        for row in found.rows
    }


async def read_bases(resource: Resource, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], tuple[Base, int]]:
    """What the log says of rows that have changes of this site under way, and how many those are."""
    wanted = sorted(set(keys))
    found = await resource.read_own(
        f"select table_name, key, base, waiting from {CLOCKS} "
        "where waiting > 0 and (table_name, key) in (select * from unnest($1::text[], $2::text[]))",
        ([table for table, _ in wanted], [key for _, key in wanted]),
    )
    return {(row["table_name"], row["key"]): (Base.of(row["base"]), row["waiting"]) for row in found.rows}


def clock_change(table: str, key: str, version: Version, previous: Version, change: dict[str, Any]) -> Upsert:
    """Records a row's new version; `change` and `previous` are what another replica must know of this step."""
    values = {
        "generation": version.generation,
        "deleted": version.deleted,
        "edits": version.edits,
        "clock": version.clock,
        "site": version.site,
        "adds": to_json(version.adds),
        "columns": to_json(version.columns),
        "previous": to_json(previous.identity),
        "change": to_json(change),
    }
    return Upsert(CLOCKS, {"table_name": table, "key": key}, values)


def increment(table: str, key: Row, add: Row, named: str) -> Update:
    """Adds, and records it: the sum of all increments that were ever made is what two replicas' rows differ by."""
    return Update(table, key, add=add, must_exist=True, sum_key=named)


def only_summed(change: Update) -> list[Change]:
    """Records increments of a row that is not there."""
    row_key = {"table_name": change.table, "key": change.sum_key}
    return [
        Upsert(SUMS, {**row_key, "column_name": name}, add={"amount": amount}) for name, amount in change.add.items()
    ]


def sums_set(table: str, key: str, before: dict[str, str], after: dict[str, str]) -> list[Change]:
    """Makes sums others than they are."""
    return [
        Upsert(SUMS, {"table_name": table, "key": key, "column_name": column}, {"amount": after.get(column, "0")})
        for column in {**before, **after}
        if before.get(column, "0") != after.get(column, "0")
    ]


def only_increments(changes: Sequence[Change]) -> bool:
    """Increments commute with everything: nothing has to be known of their rows, but that they are there."""
    for change in changes:
        if not isinstance(change, Update) or not change.sum_key:
            return False
    return bool(changes)


def version_in(change: Upsert) -> Version:
    values = change.values
    return Version(
        values["generation"],
        values["deleted"],
        values["edits"],
        values["clock"],
        values["site"],
        from_json(values["adds"]),
        {name: tuple(rank) for name, rank in from_json(values["columns"]).items()},
    )


def conflict_row(
    ident: str, at: str, kind: str, table: str, key: str, winner: str, kept: Any, discarded: Any, resolver: str,
    number: int, tx: str,
) -> Change:  # fmt: skip
    """One line of the conflict log."""
    return Upsert(
        CONFLICTS,
        {"id": ident},
        {
            "at": at,
            "kind": kind,
            "table_name": table,
            "key": key,
            "winner": winner,
            "kept": None if kept is None else to_json(kept),
            "discarded": None if discarded is None else to_json(discarded),
            "resolver": resolver,
            "number": number,
            "tx": tx,
        },
    )


def rejection_id(number: int, tx: str) -> str:
    """Under which the refusal of a transaction of the log stands in the conflict log."""
    return f"{number}:{tx}"


def rejection_in(discarded: str) -> Rejection:
    """Why a transaction of the log was not carried out, from its line in the conflict log.

    Raises ResourceError if another version of the program has written the line."""
    try:
        (stored,) = msgspec.json.decode(discarded, type=list[_Stored])
    except (msgspec.DecodeError, ValueError) as error:
        raise ResourceError(
            f"table {CONFLICTS}", f"a rejection is stored in a format that this version does not read: {error}"
        ) from error
    return Rejection(*msgspec.structs.astuple(stored))


def rejection_record(number: int, tx: str, kind: str, rejection: Rejection, resolver: str) -> Member:
    """Stands in the place of a transaction of the log that was not carried out, with the reason."""
    at = datetime.now(UTC).isoformat()
    stored = msgspec.to_builtins(_Stored(*msgspec.structs.astuple(rejection)))
    line = conflict_row(rejection_id(number, tx), at, kind, "", "", "", None, [stored], resolver, number, tx)
    return record_of(tx, line)


def record_of(tx: str, line: Change) -> Member:
    """A note about a transaction as a member of its own, to be committed in its place."""
    return Member(TxId(f"{tx}!"), (line,))


def is_record(member: Member) -> bool:
    return member.tx.endswith("!")


def quarantine_row(tx: str, at: str, number: int, member: bytes, reason: str) -> Change:
    return Insert(QUARANTINED, {"tx": tx, "at": at, "number": number, "member": member, "reason": reason})


async def read_rows(resource: Resource, shape: TableShape, keys: Sequence[Row]) -> list[Row | None]:
    """The present images of rows, without their keys, in the order of `keys`; None where there is no row."""
    names = [f"k{row_key}" for row_key in range(len(shape.key))]
    arrays = ", ".join(f"${row_key}::text[]" for row_key in range(1, len(names) + 1))
    on = " and ".join(
        f"t.{_quoted(column)} = k.{name}::{shape.key_types[column].name}"
        for column, name in zip(shape.key, names, strict=True)
    )
    columns = "".join(f", t.{_quoted(name)}::text as {_quoted(name)}" for name in shape.others)
    found = await resource.read_own(
        f"select k.n::int as tops_n{columns} from unnest({arrays}) with ordinality as k({', '.join(names)}, n) "
        f"join {sql_name(shape.name)} t on {on}",
        [[as_text(key[column]) for key in keys] for column in shape.key],
    )
    images: list[Row | None] = [None] * len(keys)
    for row in found.rows:
        images[row.pop("tops_n") - 1] = row
    return images


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def key_in(change: RowChange) -> Row:
    """Something that holds the row's key."""
    return change.values if isinstance(change, Insert) else change.key


def columns_in(change: RowChange) -> list[str]:
    """The columns that a change names."""
    match change:
        case Insert(values=values):
            return [*values]
        case Update(key=key, values=values, add=add) | Upsert(key=key, values=values, add=add):
            return [*key, *values, *add]
        case Delete(key=key):
            return [*key]


def values_in(change: Change, shape: TableShape, told: dict[str, Any]) -> Row:
    """The columns beside the key that a change gives, also those that its writer could not write and told instead."""
    match change:
        case Insert(values=values) | Update(values=values) | Upsert(values=values):
            given = {name: value for name, value in values.items() if name not in shape.key}
            return {**told.get("fixed", {}), **given}
    return {}


def row_written(shape: TableShape, key: Row, before: Row | None, after: Row) -> list[RowChange]:
    """The changes that lead from one image of a row, or none, to another; several are a write set (`as_write_set`).

    A column that no update can give a value is left out where it has that value; otherwise the row is inserted anew."""
    if not shape.fixed:
        return [Upsert(shape.name, key, after)]
    if before is None:
        return [Insert(shape.name, {**key, **after})]
    if any(as_text(before.get(name)) != as_text(after.get(name, before.get(name))) for name in shape.fixed):
        return [
            Delete(shape.name, key, captured=True),
            Insert(shape.name, {**key, **before, **after}, captured=True),
        ]
    values = {name: value for name, value in after.items() if name not in shape.fixed}
    return [Update(shape.name, key, values)] if values else []


def as_write_set(member: Member, site: str) -> Member:
    """The member of that site as one whose rows are applied as images, if one of them is inserted anew: nothing that
    hangs on a row that is deleted and inserted may change."""
    if not any(map(is_captured, member.changes)):
        return member
    changes = [
        change
        if isinstance(change, Statement) or change.table.startswith("tops.")
        else msgspec.structs.replace(change, captured=True)
        for change in member.changes
    ]
    return msgspec.structs.replace(member, changes=tuple(changes), origin=member.origin or site)


def conflict_kind(kind: str, current: Version, image: Row | None) -> str:
    """PostgreSQL's names of the kinds of conflict."""
    if kind == "insert":
        return "insert_exists" if image is not None else "insert_deleted"
    if kind == "delete":
        return "delete_origin_differs" if image is not None else "delete_missing"
    if image is None:
        return "update_deleted" if current.deleted else "update_missing"
    return "update_origin_differs"


def as_text(value: Value) -> str | None:
    """A value as PostgreSQL reads it."""
    match value:
        case None | str():
            return value
        case bool():
            return "true" if value else "false"
        case bytes():
            return f"\\x{value.hex()}"
        case list() | dict():
            return to_json(value)
    return str(value)


class RowStep(NamedTuple):
    """What a published member did to a row, and the row's version afterwards; increments leave the version as it is."""

    row_key: tuple[str, str]
    change: RowChange
    clock: Upsert | None


def rows_of(changes: Sequence[Change]) -> list[RowStep]:
    """A published member's changes, each with the version that follows it."""
    steps, rest = [], iter(changes)
    for change in rest:
        if isinstance(change, Update) and change.sum_key:
            steps.append(RowStep((change.table, change.sum_key), change, None))
            continue
        clock = next(rest, None)
        if isinstance(change, Statement) or not isinstance(clock, Upsert) or clock.table != CLOCKS:
            raise InvalidChange("a published change of a peer-to-peer set lacks its version")
        steps.append(RowStep((clock.key["table_name"], clock.key["key"]), change, clock))
    return steps
