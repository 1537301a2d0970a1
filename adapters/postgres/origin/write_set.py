"""Old and new images of a transaction's rows as row changes, in an order in which they can be applied."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from adapters.changes import Delete, Insert, Row, RowChange, Update
from adapters.postgres.origin.images import Image, Key
from adapters.postgres.sql.catalog import Table

Images = dict[Key, Image | None]  # None: no such row


@dataclass
class State:
    """What the members of a chain have left so far, by table; what none of them touched is not in it."""

    rows: dict[str, Images] = field(default_factory=dict)

    def of(self, table: str) -> Images:
        return self.rows.setdefault(table, {})


def changes_between(tables: Mapping[str, Table], state: State, after: Mapping[str, Images]) -> tuple[RowChange, ...]:
    """The row changes that lead from the state to the images after it; the state has these afterwards.

    Deletes come first, so that a unique value can pass to another row; rows whose unique columns change are deleted
    and inserted where several of them could be in each other's way. Others are in the order of `after`, as far as no
    update leaves a unique value to an insert: a CHECK may look at rows that were written before."""
    deletes: list[RowChange] = []
    rest: list[RowChange] = []
    for name, images in after.items():
        table, before = tables[name], state.of(name)
        replaced = _replaced(table, before, images)
        written: list[RowChange] = []
        for key, new in images.items():
            old = before.get(key)
            if old is not None and (new is None or key in replaced):
                deletes.append(Delete(name, _key(table, old), expect_row=old.digest, captured=True))
            if new is not None and (old is None or key in replaced):
                written.append(Insert(name, new.values, captured=True))
            elif new is not None and old is not None:
                written += _update(table, name, old, new)
        before.update(images)
        if any(isinstance(change, Update) and table.unique_columns & change.values.keys() for change in written):
            written.sort(key=lambda change: isinstance(change, Insert))
        rest += written
    return (*deletes, *rest)


def _update(table: Table, name: str, old: Image, new: Image) -> list[RowChange]:
    changed = {column: value for column, value in new.values.items() if old.values[column] != value}
    if not changed:
        # Locked or written as it was: it stays a write, so that it conflicts with others as it would in one database.
        left_alone = {*table.key, *table.fixed_columns}
        changed = dict([next(((c, v) for c, v in new.values.items() if c not in left_alone), ("", None))])
        if "" in changed:
            return []  # nothing but its key and identity: there is nothing that could be written
    return [Update(name, _key(table, old), changed, expect_row=old.digest, captured=True)]


def _replaced(table: Table, before: Images, after: Images) -> set[Key]:
    """Rows that stay and are deleted and inserted nevertheless: their key is spelled differently, a column has another
    value that no update can give it, or they are among several that take other values in unique columns."""
    stay = [(key, old, new) for key, new in after.items() if new is not None and (old := before.get(key)) is not None]
    unique = table.unique_columns & table.columns.keys()
    moved = {key for key, old, new in stay if any(old.values[name] != new.values[name] for name in unique)}
    respelled = {key for key, old, new in stay if _key(table, old) != _key(table, new)}
    fixed = {key for key, old, new in stay if any(old.values[name] != new.values[name] for name in table.fixed_columns)}
    return respelled | fixed | (moved if len(moved) > 1 else set())


def _key(table: Table, image: Image) -> Row:
    return {name: image.values[name] for name in table.key}
