"""The writer's half of peer-to-peer: a change as it is committed here first, with the row's new version beside it.

The version is recorded in the same database transaction as the change, and both are what is published.
"""

from typing import Any, NamedTuple

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
    is_captured,
)
from adapters.resource import Resource
from replication.conflicts.clock import HybridClock
from replication.conflicts.own_statements import check_expects_no_version
from replication.conflicts.row_names import RowNames
from replication.conflicts.tables import (
    CLOCKS,
    Shapes,
    TableShape,
    as_text,
    clock_change,
    columns_in,
    increment,
    key_in,
    key_text,
    read_bases,
    read_versions,
)
from replication.conflicts.versions import Base, Ranking, Version, on_top

Known = dict[tuple[str, str], tuple[Version, Row | None]]  # a row's version and image, as this member leaves them


class NamedWrite(NamedTuple):
    """A transaction whose changes have the one name of each row, and those rows with their keys.

    `increments` is the transaction as it can be written without a look at its rows, if all it does is to add to them:
    then it is rejected with `Why.VERSION` where one of them is not there."""

    member: Member
    row_keys: dict[tuple[str, str], Row]
    increments: Member | None


class PeerWrites:
    """Turns an application's changes into changes with versions."""

    def __init__(
        self,
        site: str,
        resource: Resource,
        clock: HybridClock,
        ranking: Ranking,
        shapes: Shapes,
        *,
        folding: bool = False,
    ) -> None:
        self._site, self._resource, self._clock = site, resource, clock
        self._ranking, self._shapes, self._names = ranking, shapes, RowNames(resource, shapes)
        self._folding = folding  # rows keep what the log says until our changes have come back from it
        self._bases: dict[tuple[str, str], tuple[Base, int]] = {}

    async def named(self, member: Member) -> NamedWrite:
        """The transaction with the one name of every row that it touches; InvalidChange if it can't be told.

        NotDeterministic: it must be executed."""
        rows: list[RowChange] = []
        shapes: list[TableShape] = []
        check_expects_no_version(member.changes, "in a peer-to-peer set: sites write without asking each other")
        for change in member.changes:
            if isinstance(change, Statement):
                raise InvalidChange(
                    "a peer-to-peer set replicates rows: use insert, update, upsert or delete by primary key, "
                    f"not a statement: {change.sql[:200]}"
                )
            shape = await self._shapes.of(change.table, naming=columns_in(change))
            _check_drawn(shape, change)
            if isinstance(change, Update):
                _check_sums(shape, change.add)
            rows.append(change)
            shapes.append(shape)
        names = await self._names.of(rows, shapes)
        changes = [name.on(change) for name, change in zip(names, rows, strict=True)]
        increments = [
            increment(name.shape.name, name.key, change.add, name.text)
            for name, change in zip(names, changes, strict=True)
            if isinstance(change, Update) and change.add and not change.values
        ]
        unseen = not self._folding and len(increments) == len(changes)
        return NamedWrite(
            msgspec.structs.replace(member, changes=tuple(changes)),
            {name.row_key: name.key for name in names},
            msgspec.structs.replace(member, changes=tuple(increments)) if unseen else None,
        )

    async def known(self, row_keys: dict[tuple[str, str], Row]) -> Known:
        """What is in the database about these rows. To be called with the replica's turn."""
        versions = await read_versions(self._resource, row_keys, in_record=self._folding)
        if self._folding:
            self._bases = await read_bases(self._resource, row_keys)
        known: Known = {}
        for table in sorted({table for table, _ in row_keys}):
            mine = [row_key for row_key in row_keys if row_key[0] == table]
            images = await self._shapes.rows(table, [row_keys[row_key] for row_key in mine])
            for row_key, image in zip(mine, images, strict=True):
                known[row_key] = (versions.get(row_key, Version()), image)
        return known

    async def versioned(self, member: Member, known: Known) -> tuple[Member, list[int | None]]:
        """A transaction that `named` has made, row by row, each followed by its version, and where in it each of the
        application's changes went (None: it changes nothing)."""
        changes: list[Change] = []
        went: list[int | None] = []
        for change in member.changes:
            steps = await self._row(change, known) if not isinstance(change, Statement) else []
            went.append(len(changes) if steps else None)
            changes += steps
        return msgspec.structs.replace(member, changes=tuple(changes)), went

    async def _row(self, change: RowChange, known: Known) -> list[Change]:
        shape = await self._shapes.of(change.table)
        key = shape.key_of(key_in(change))
        row_key = (shape.name, key_text(key))
        before = Base(*known[row_key])
        steps = await self._steps(shape, key, row_key, change, known)
        if is_captured(change):
            steps = [_as_captured(step, change, shape) for step in steps]
        return [self._under_way(row_key, before, step) for step in steps] if self._folding else steps

    def _under_way(self, row_key: tuple[str, str], before: Base, step: Change) -> Change:
        """A row's record with one more change that has yet to come back from the log."""
        if not isinstance(step, Upsert) or step.table != CLOCKS:
            return step
        base, waiting = self._bases.get(row_key, (before, 0))
        self._bases[row_key] = (base, waiting + 1)
        return msgspec.structs.replace(step, values={**step.values, "base": base.text, "waiting": waiting + 1})

    async def _steps(
        self,
        shape: TableShape,
        key: Row,
        row_key: tuple[str, str],
        change: RowChange,
        known: Known,
    ) -> list[Change]:
        _, image = known[row_key]
        match change:
            case Insert(values=values):
                given = {name: value for name, value in values.items() if name not in shape.key}
                return await self._set(shape, key, row_key, given, "insert", known)
            case Upsert(values=values):
                return await self._set(shape, key, row_key, values, "insert" if image is None else "update", known)
            case Delete():
                return self._delete(shape, key, row_key, known) if image is not None else []
            case Update(values=values, add=add):
                if image is None:
                    return []  # no such row: nothing to do, and nothing to tell
                steps = await self._set(shape, key, row_key, values, "update", known) if values else []
                return steps + (self._add(shape, key, row_key, add, known) if add else [])

    async def _set(
        self, shape: TableShape, key: Row, row_key: tuple[str, str], values: Row, kind: str, known: Known
    ) -> list[Change]:
        before, image = known[row_key]
        whole = {**(image or {}), **values}
        if kind == "insert":
            for column in shape.others:
                if column not in whole:
                    whole[column] = await self._shapes.standard(shape, column)
        told = dict(values) if self._ranking.per_column and kind == "update" else whole
        generation = before.generation + (1 if before.deleted or before.generation == 0 else 0)
        clock = self._clock.tick()
        columns = before.columns
        if self._ranking.per_column:
            columns = {**columns, **dict.fromkeys(told, (generation, clock, self._site))}
        after = Version(generation, False, before.edits + 1, clock, self._site, before.adds, columns)
        known[row_key] = (after, whole)
        step: dict[str, Any] = {"kind": kind, "key": key}
        row: Change = Insert(shape.name, {**key, **whole})
        if kind == "update":
            fixed = _fixed_as_they_are(shape, image or {}, told)
            row = Update(shape.name, key, {name: value for name, value in told.items() if name not in fixed})
            if fixed:
                step["fixed"] = fixed
        if self._ranking.per_column:
            step["seen"] = {name: before.columns.get(name) for name in told}
        return [row, clock_change(*row_key, after, before, step)]

    def _delete(self, shape: TableShape, key: Row, row_key: tuple[str, str], known: Known) -> list[Change]:
        before, _ = known[row_key]
        after = msgspec.structs.replace(
            before,
            generation=max(before.generation, 1),
            deleted=True,
            edits=before.edits + 1,
            clock=self._clock.tick(),
            site=self._site,
        )
        known[row_key] = (after, None)
        return [Delete(shape.name, key), clock_change(*row_key, after, before, {"kind": "delete", "key": key})]

    def _add(self, shape: TableShape, key: Row, row_key: tuple[str, str], add: Row, known: Known) -> list[Change]:
        before, image = known[row_key]
        after = before.added(add)
        if image is not None:
            one = Version().added(add).adds
            image = {**image, **on_top({c: image[c] for c in add}, one)}
        known[row_key] = (after, image)
        if not self._folding:
            return [increment(shape.name, key, add, row_key[1])]
        amounts = {name: str(value) for name, value in add.items()}
        return [
            Update(shape.name, key, add=add),
            clock_change(*row_key, after, before, {"kind": "add", "key": key, "add": amounts}),
        ]


def _fixed_as_they_are(shape: TableShape, image: Row, told: Row) -> Row:
    """Columns that no update can give a value, and that need none here; others may have to write them. PostgreSQL
    rejects another value."""
    return {n: image[n] for n in shape.fixed if n in told and n in image and as_text(told[n]) == as_text(image[n])}


def _as_captured(step: Change, change: RowChange, shape: TableShape) -> Change:
    """The row's step as part of an origin's write set: here it must find what the origin has found."""
    if isinstance(step, Statement) or step.table != shape.name:
        return step
    if isinstance(step, Update | Delete) and isinstance(change, Update | Delete):
        return msgspec.structs.replace(step, captured=True, expect_row=change.expect_row)
    return msgspec.structs.replace(step, captured=True)


def _check_sums(shape: TableShape, add: Row) -> None:
    for column in add:
        if column in shape.types and column not in shape.summed:
            raise InvalidChange(
                f"column {column!r} of {shape.name!r} is of type {shape.types[column]}: a peer-to-peer set adds to "
                "integer and numeric columns only, whose sums do not depend on the order; write the new value instead, "
                "or keep the amount in a column of type bigint or numeric"
            )


def _check_drawn(shape: TableShape, change: RowChange) -> None:
    """Keys that the database makes, and values of sequences, are not made here: only an execution tells whose they
    are."""
    given = columns_in(change)
    if isinstance(change, Insert) and (missing := [name for name in shape.key if name not in given]):
        raise NotDeterministic("default", f"the insert into {shape.name} lacks its key: {', '.join(missing)}")
    if isinstance(change, Insert | Upsert) and (drawn := sorted(shape.drawn.difference(given))):
        raise NotDeterministic("default", f"the insert into {shape.name} draws from a sequence: {', '.join(drawn)}")
