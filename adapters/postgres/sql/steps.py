"""Which changes may be carried out together: the fast path's plan.

Changes are taken in serial order and gathered into steps, each one statement over many rows. The plan may only differ
from running the changes one by one in ways that nobody can see, so a change moves in front of others only where its
row means nothing to theirs: no unique value passed on, no foreign key, no cascade, no trigger between them, and never
past a change of the same row (a row occurs once per statement: of three updates of one row in one statement, PostgreSQL
would carry out one). Where this file is too careful, a statement more is run; if a step fails or hits another number of
rows than it should, the whole plan is dropped and the members run one by one.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, cast

from adapters.changes import Change, Delete, Insert, Row, RowChange, Statement, Update, Upsert
from adapters.postgres.sql.catalog import Table
from adapters.postgres.sql.guards import check_table
from adapters.postgres.sql.stamps import Stamps
from tops.model.errors import InvariantBroken

Key = tuple[Hashable, ...]
_KEY, _VALUES, _ADD = attrgetter("key"), attrgetter("values"), attrgetter("add")
_TABLE, _VERSION, _SUM_KEY = attrgetter("table"), attrgetter("expect_version"), attrgetter("sum_key")
_EXPECTED_ROW, _CAPTURED = attrgetter("expect_row"), attrgetter("captured")
# Of numbers that are put into a table: a client chooses them, and their hashes can be foreseen. Hashes of texts differ
# from process to process.
_SALT = hash("keys of rows")
Shape = tuple[Hashable, ...]  # what makes two changes one statement: verb, table, columns, whether versions are checked


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """What all changes of one shape have in common; found once, since the plan asks for every change."""

    shape: Shape
    table: Table | None  # None: an SQL statement of the user's
    can_share: bool  # one statement over many such rows does what the rows one by one would do
    can_move: bool  # may run before earlier changes, apart from those of its own row
    opaque: bool  # may touch any row: nothing moves past it
    integer_key: str | None  # the only key column, if it is a number
    oid: int
    row: Callable[[Any], Row]  # where a change keeps its key
    stamps: Stamps  # of the tables for which this holds


@dataclass(slots=True)
class Step:
    """Changes of one shape, with distinct keys, that run as one statement."""

    traits: Traits
    changes: list[Change]
    numbers: list[int]  # the log's number of each change
    keys: set[Key] = field(default_factory=set)
    opaque: bool = False


def shape_of(change: Change) -> Shape:
    kind = type(change)
    if kind is Update:
        update = cast(Update, change)
        values = tuple(update.values) if update.values else ()
        plain = update.expect_version is None, not update.sum_key, update.expect_row is None, update.captured
        return ("update", update.table, tuple(update.key), values, tuple(update.add), *plain)
    if kind is Insert:
        insert = cast(Insert, change)
        return ("insert", insert.table, tuple(insert.values), insert.captured)
    match change:
        case Upsert(table, key, assigned, expected, add, captured):
            return ("upsert", table, tuple(key), tuple(assigned), expected is not None, tuple(add), captured)
        case Delete(table, key, expected, expected_row, captured):
            return ("delete", table, tuple(key), expected is not None, expected_row is not None, captured)
        case Statement(sql):
            return ("statement", sql)
        case _:
            raise InvariantBroken(f"{change!r} is no change")


def check(change: RowChange, table: Table) -> None:
    """Refuse what does not fit the table."""
    check_table(table.sql_name)
    match change:
        case Insert(_, values):
            table.check_insert(values)
        case Upsert(_, key, values, _, add):
            table.check_key(key)
            table.check_values(values)
            table.check_values(add)
            table.check_insert({**key, **values, **add})
            if add:
                table.check_assigned_once(values, add)
        case Update(_, key, values, add):
            table.check_key(key)
            table.check_values(values)
            table.check_values(add)
            table.check_assigned_once(values, add)
        case Delete(_, key):
            table.check_key(key)


def traits_of(change: Change, shape: Shape, table: Table | None, stamps: Stamps) -> Traits:
    """The change must have been checked against its table."""
    if table is None or isinstance(change, Statement):
        return Traits(shape, None, False, False, opaque=True, integer_key=None, oid=0, row=_KEY, stamps=stamps)
    return Traits(
        shape,
        table,
        can_share=_can_share(change, table),
        can_move=_can_move(change, table),
        opaque=table.has_side_effects,
        integer_key=table.key[0] if len(table.key) == 1 and table.columns[table.key[0]].is_integer else None,
        oid=table.oid,
        row=_VALUES if isinstance(change, Insert) else _KEY,
        stamps=stamps,
    )


def plan(changes: Iterable[tuple[int, Traits, Change]]) -> list[Step]:
    """Steps whose effect is that of the changes in their order."""
    steps: list[Step] = []
    step: Step | None = None
    for number, traits, change in changes:
        key: Key | None
        if traits.integer_key is not None and type(value := traits.row(change).get(traits.integer_key)) is int:
            key = (traits.oid, value ^ _SALT)
        else:
            key = _key_of(change, traits)
        last = steps[-1] if steps else None
        if last is not None and last.traits is traits and traits.can_share and key is not None and not last.opaque:
            step = last if key not in last.keys else None
        else:
            step = _step_for(steps, traits, key) if key is not None and last is not None and traits.can_share else None
        if step is None:
            step = Step(traits, [], [], opaque=traits.opaque or key is None)
            steps.append(step)
        step.changes.append(change)
        step.numbers.append(number)
        if key is not None:
            step.keys.add(key)
    return steps


def have_one_shape(changes: list[Change]) -> bool:
    """Whether all are of one shape; most batches are, and asking all at once is cheaper than one by one."""
    if len(changes) == 1:
        return True
    kinds = set(map(type, changes))
    if kinds not in ({Update}, {Upsert}, {Insert}) or len(set(map(_CAPTURED, changes))) > 1:
        return False
    if kinds == {Insert}:
        return _one_table(changes) and _same_names(changes, _VALUES)
    plain = set(map(_VERSION, changes)) == {None} and _one_table(changes)
    if kinds == {Update}:
        plain = plain and len(set(map(bool, map(_SUM_KEY, changes)))) == 1
        plain = plain and len(set(map(bool, map(_EXPECTED_ROW, changes)))) == 1
    return plain and all(_same_names(changes, of) for of in (_KEY, _VALUES, _ADD))


def _one_table(changes: list[Change]) -> bool:
    return len(set(map(_TABLE, changes))) == 1


def _same_names(changes: list[Change], of: Callable[[Any], Row]) -> bool:
    return len(set(map(tuple, map(of, changes)))) == 1


def layers(numbers: list[int], traits: Traits, changes: list[Change]) -> list[Step] | None:
    """Changes of one shape as few steps, if they may share statements: the first of every row, then the second of those
    that have one, and so on. None if their rows can't be told apart at a glance."""
    keys = _plain_keys(traits, changes) if traits.can_share else None
    if keys is None:
        return None
    if len(set(keys)) == len(keys):
        return [Step(traits, changes, numbers, opaque=traits.opaque)]
    if type(changes[0]) is Insert:
        return None  # only one of them can succeed
    steps: list[Step] = []
    seen: dict[Hashable, int] = {}
    for number, key, change in zip(numbers, keys, changes, strict=True):
        depth = seen[key] = seen.get(key, -1) + 1
        if depth == len(steps):
            steps.append(Step(traits, [], [], opaque=traits.opaque))
        steps[depth].changes.append(change)
        steps[depth].numbers.append(number)
    return steps


def side_by_side(groups: list[tuple[Traits, list[Step] | None]]) -> list[Step] | None:
    """Steps of several shapes one shape after the other, if no change minds that others go before it."""
    if len({traits.oid for traits, _ in groups}) < len(groups):
        return None  # of one row the order matters
    steps: list[Step] = []
    for traits, own in groups:
        if own is None or traits.opaque or not traits.can_move:
            return None
        steps += own
    return steps


def _plain_keys(traits: Traits, changes: list[Change]) -> list[Hashable] | None:
    """The rows' names, where they are integers or texts, which have one spelling."""
    table, rows = traits.table, map(traits.row, changes)
    if table is None:
        return None
    try:
        if traits.integer_key is not None:
            numbers = list(map(itemgetter(traits.integer_key), rows))
            return list(map(_SALT.__xor__, numbers)) if set(map(type, numbers)) == {int} else None
        types = [table.columns[column] for column in table.key]
        if len(types) < 2 or any(kind.name != "text" or kind.is_loose for kind in types):
            return None
        keys = list(map(itemgetter(*table.key), rows))
    except KeyError:
        return None
    return keys if set(map(type, chain.from_iterable(keys))) == {str} else None


def _step_for(steps: list[Step], traits: Traits, key: Key) -> Step | None:
    """A step that the change can join without passing one that matters to it."""
    for step in reversed(steps):
        if step.opaque or key in step.keys:
            return None
        if step.traits is traits:
            return step
        if not traits.can_move:
            return None
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
        case Upsert(_, _, values, _, add):
            return not table.unique_columns and table.referenced_columns.isdisjoint([*values, *add])
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


def _key_of(change: Change, traits: Traits) -> Key | None:
    """The row's name, one for all ways to write its key; None where only the database could tell."""
    table = traits.table
    if table is None or isinstance(change, Statement):
        return None
    row = traits.row(change)
    key: list[Hashable] = [table.oid]
    for column in table.key:
        value = table.columns[column].plain(row.get(column))
        if value is None:
            return None
        key.append(value ^ _SALT if type(value) is int else value)
    return tuple(key)
