"""Which changes may be carried out together: the fast path's plan.

Changes are taken in serial order and gathered into steps, each one statement over many rows. The plan may only differ
from running the changes one by one in ways that nobody can see, so a change moves in front of others only where its
row means nothing to theirs: no unique value passed on, no foreign key, no cascade, no trigger between them, and never
past a change of the same row (a row occurs once per statement: of three updates of one row in one statement, PostgreSQL
would carry out one). Where this file is too careful, a statement more is run; if a step fails or hits another number of
rows than it should, the whole plan is dropped and the members run one by one.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from adapters.postgres.catalog import Table
from tops.changes import Change, Delete, Insert, RowChange, Statement, Update, Upsert

Key = tuple[Hashable, ...]
Shape = tuple[Hashable, ...]  # what makes two changes one statement: verb, table, columns, whether versions are checked


@dataclass(slots=True)
class Step:
    """Changes of one shape, with distinct keys, that run as one statement."""

    shape: Shape
    table: Table | None  # None: an SQL statement of the user's
    changes: list[Change]
    numbers: list[int]  # the log's number of each change
    keys: set[Key] = field(default_factory=set)
    opaque: bool = False  # may touch any row: nothing moves past it


def shape_of(change: Change) -> Shape:
    match change:
        case Update(table, key, values, add, expected):
            return ("update", table, tuple(key), tuple(values), tuple(add), expected is not None)
        case Insert(table, values):
            return ("insert", table, tuple(values))
        case Upsert(table, key, values, expected):
            return ("upsert", table, tuple(key), tuple(values), expected is not None)
        case Delete(table, key, expected):
            return ("delete", table, tuple(key), expected is not None)
        case Statement(sql):
            return ("statement", sql)


def check(change: RowChange, table: Table, *, allow_volatile: bool) -> None:
    """Refuse what does not fit the table."""
    match change:
        case Insert(_, values):
            table.check_insert(values, allow_volatile=allow_volatile)
        case Upsert(_, key, values):
            table.check_key(key)
            table.check_values(values)
            table.check_insert({**key, **values}, allow_volatile=allow_volatile)
        case Update(_, key, values, add):
            table.check_key(key)
            table.check_values(values)
            table.check_values(add)
            table.check_assigned_once(values, add)
        case Delete(_, key):
            table.check_key(key)


def plan(changes: Iterable[tuple[int, Shape, Change]], tables: Mapping[str, Table]) -> list[Step]:
    """Steps whose effect is that of the changes in their order; the changes must have been checked."""
    steps: list[Step] = []
    for number, shape, change in changes:
        if isinstance(change, Statement):
            steps.append(Step(shape, None, [change], [number], opaque=True))
            continue
        table = tables[change.table]
        key = _key_of(change, table)
        step = _step_for(steps, shape, table, change, key)
        if step is None:
            opaque = key is None or table.has_side_effects
            step = Step(shape, table, [], [], opaque=opaque)
            steps.append(step)
        step.changes.append(change)
        step.numbers.append(number)
        if key is not None:
            step.keys.add(key)
    return steps


def _step_for(steps: list[Step], shape: Shape, table: Table, change: RowChange, key: Key | None) -> Step | None:
    if key is None or not steps or not _can_share(change, table):
        return None
    if not _can_move(change, table):
        last = steps[-1]
        return last if last.shape == shape and not last.opaque and key not in last.keys else None
    for step in reversed(steps):
        if step.opaque or key in step.keys:
            return None
        if step.shape == shape:
            return step
    return None


def _can_share(change: RowChange, table: Table) -> bool:
    """Whether a statement over many such rows does what the same rows one by one would do."""
    if table.has_side_effects or table.refers_to_itself:
        return False
    match change:
        case Insert():
            return True  # rows are only added, in order; parents are in other tables
        case Delete():
            return not table.referenced_columns
        case Upsert(_, _, values):
            return not table.unique_columns and table.referenced_columns.isdisjoint(values)
        case Update(_, _, values, add):
            tied = table.unique_columns | table.referenced_columns
            return tied.isdisjoint(values) and tied.isdisjoint(add)


def _can_move(change: RowChange, table: Table) -> bool:
    """Whether the change may run before others that came earlier, apart from those of its own row."""
    if table.stands_alone:
        return True
    if not isinstance(change, Update) or table.is_cascaded_to:
        return False
    tied = table.unique_columns | table.referring_columns | table.referenced_columns
    return tied.isdisjoint(change.values) and tied.isdisjoint(change.add)


def _key_of(change: RowChange, table: Table) -> Key | None:
    """The row's name, one for all ways to write its key; None where only the database could tell."""
    row = change.values if isinstance(change, Insert) else change.key
    key: list[Hashable] = [table.oid]
    try:
        for column in table.key:
            value, sql_type = row[column], table.columns[column]
            if sql_type.is_integer and isinstance(value, int | str):
                key.append(int(value))
            elif sql_type.name in ("text", "character varying") and isinstance(value, str):
                key.append(value)
            elif sql_type.is_uuid and isinstance(value, UUID | str):
                key.append(UUID(str(value)))
            else:
                return None
    except (KeyError, ValueError):
        return None
    return tuple(key)
