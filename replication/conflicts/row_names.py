"""The one name of a row in a peer-to-peer set: its table as the catalogue has it, its key in the form of its types.

Versions, sums and conflicts go by a row's name, and the database goes by equality: `4`, `" 4"` and `0x4` are one
integer, `1.0` and `1.00` one numeric, `t` and `public.t` one table. So each change gets the row's one name before
anything goes by it: where it is written, and again where it comes from the log, since nobody knows what another site
has sent.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from adapters.changes import Change, Insert, InvalidChange, Member, Row, RowChange, Upsert
from adapters.postgres.sql.literals import SqlType, quote, text_form
from adapters.postgres.sql.row_sql import one_form_sql
from adapters.resource import Resource
from replication.conflicts.tables import RowStep, Shapes, TableShape, columns_in, is_record, key_in, key_text, rows_of
from tops.model.errors import ResourceError, ResourceRejected


class RowName(NamedTuple):
    """A row as versions know it; `text` is the text of its key."""

    shape: TableShape
    key: Row
    text: str

    @property
    def row_key(self) -> tuple[str, str]:
        return self.shape.name, self.text

    def on(self, change: RowChange) -> RowChange:
        """The change by this name."""
        table, key = self.shape.name, self.key
        if isinstance(change, Insert):
            values = {**change.values, **key}
            same = change.table == table and change.values == values
            return change if same else msgspec.structs.replace(change, table=table, values=values)
        same = change.table == table and change.key == key
        return change if same else msgspec.structs.replace(change, table=table, key=key)


class RowNames:
    """Names rows as this replica's database does."""

    def __init__(self, resource: Resource, shapes: Shapes) -> None:
        self._resource, self._shapes = resource, shapes

    async def of(self, changes: Sequence[RowChange], shapes: Sequence[TableShape]) -> list[RowName]:
        """The names of the changes' rows, in tables of these shapes. InvalidChange if one of them can have none."""
        names: list[RowName] = []
        asked: dict[tuple[str, bool], list[int]] = {}  # those that the database must name, by table and use
        for row_key, (change, shape) in enumerate(zip(changes, shapes, strict=True)):
            check_key_types(shape)
            given = shape.key_of(key_in(change))
            key = {column: shape.key_types[column].plain(value) for column, value in given.items()}
            if None in key.values():
                key = given
                asked.setdefault((shape.name, isinstance(change, Insert | Upsert)), []).append(row_key)
            names.append(RowName(shape, key, key_text(key)))
        for (_, stored), row_keys in asked.items():
            keys = await self._asked(
                names[row_keys[0]].shape, [names[row_key].key for row_key in row_keys], stored=stored
            )
            for row_key, key in zip(row_keys, keys, strict=True):
                names[row_key] = RowName(names[row_key].shape, key, key_text(key))
        return names

    async def _asked(self, shape: TableShape, keys: Sequence[Row], *, stored: bool) -> list[Row]:
        """Keys in the one form of their types; `stored`: of rows that are written with them."""
        kinds = [shape.key_types[column] for column in shape.key]
        columns = zip(shape.key, kinds, strict=True)
        texts = [[text_form(key[column], kind) or "" for key in keys] for column, kind in columns]
        for text in chain.from_iterable(texts):
            quote(text)  # raises what makes it no text for PostgreSQL
        try:
            found = await self._resource.read_own(one_form_sql(kinds, stored=stored), texts)
        except ResourceRejected:
            raise
        except ResourceError as error:
            types = ", ".join(shape.types[column] for column in shape.key)
            raise InvalidChange(f"table {shape.name!r}: no row can have this key ({types}): {error}") from error
        return [dict(zip(shape.key, row.values(), strict=True)) for row in found.rows]

    async def published(self, members: Sequence[Member]) -> list[Member]:
        """Members of the log, their rows by the names that they have here. A member whose rows can have none, because a
        key is no value of its column's type or has a type that is rejected, is left as it is."""
        steps = [[] if is_record(member) else rows_of(member.changes) for member in members]
        changes = [step.change for of_member in steps for step in of_member]
        try:
            shapes = [await self._shapes.of(change.table, naming=columns_in(change)) for change in changes]
            names = iter(await self.of(changes, shapes))
        except InvalidChange:
            if len(members) == 1:
                return list(members)
            return [named for member in members for named in await self.published([member])]
        return [
            member if not of_member else _renamed(member, of_member, [next(names) for _ in of_member])
            for member, of_member in zip(members, steps, strict=True)
        ]


def _renamed(member: Member, steps: Sequence[RowStep], names: Sequence[RowName]) -> Member:
    changes: list[Change] = []
    for step, name in zip(steps, names, strict=True):
        change, clock = name.on(step.change), step.clock
        if step.row_key != name.row_key:
            key = {"table_name": name.shape.name, "key": name.text}
            clock = msgspec.structs.replace(clock, key=key) if clock is not None else None
            change = change if clock is not None else msgspec.structs.replace(change, sum_key=name.text)
        changes += [change] if clock is None else [change, clock]
    return msgspec.structs.replace(member, changes=tuple(changes))


def check_key_types(shape: TableShape) -> None:
    """InvalidChange if the table has a key of which different texts are equal, and none of them stands for all."""
    for column, kind in shape.key_types.items():
        if not kind.has_stored_form:
            raise InvalidChange(key_problem(shape.name, column, kind))


def key_problem(table: str, column: str, kind: SqlType) -> str:
    what = f"{kind.declared}{' under a nondeterministic collation' if kind.is_loose else ''}"
    return (
        f"table {table!r}: key column {column!r} is of type {what}: different texts of it are equal, and versions of "
        "rows in a peer-to-peer set go by the text; use a key of integers, texts, numerics, dates or uuids"
    )
