"""Peer-to-peer with a resolver of the user's own: every replica folds the log, and a site shows its own writes early.

A function of the user's need not be symmetric or associative, so the order in which it meets versions must be the same
everywhere: the log's. Beside a row that this site has changed and whose changes have not come back from the log, the
row's record keeps what the log alone says (the base) and how many changes are under way. An entry is folded into the
base; when the last change under way has come back, the base is what the site shows. A row that nothing is under way
for is its own base. So after the same prefix of the log all bases are equal, whatever the function is.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from adapters.changes import Change, Delete, InvalidChange, Member, Row, Update, Upsert
from adapters.resource import Entry, Resource
from replication.conflicts.clock import HybridClock
from replication.conflicts.resolvers import OwnFunction
from replication.conflicts.row_names import RowNames
from replication.conflicts.tables import (
    CLOCKS,
    KEYS,
    LOGGED_KEYS,
    Shapes,
    TableShape,
    as_text,
    as_write_set,
    clock_change,
    columns_in,
    conflict_kind,
    conflict_row,
    is_record,
    key_in,
    read_bases,
    read_versions,
    row_written,
    rows_of,
    values_in,
    version_in,
)
from replication.conflicts.versions import Base, Ranking, Version, base_of, from_json, on_top

RowKey = tuple[str, str]


class _Known(msgspec.Struct):
    """An idempotency key here: whose it is, and the number that it was logged under (0: not yet; negative: by another
    transaction, while ours is under way)."""

    tx: str
    number: int


class Folding:
    """Folds entries of the log into this replica's rows."""

    def __init__(
        self,
        replica_set: str,
        resource: Resource,
        clock: HybridClock,
        ranking: Ranking,
        shapes: Shapes,
        own_function: OwnFunction,
    ) -> None:
        self._set, self._resource, self.clock = replica_set, resource, clock
        self.ranking, self.shapes, self.own_function = ranking, shapes, own_function
        self._names = RowNames(resource, shapes)
        self.conflicts = 0

    async def resolved(self, entries: Sequence[Entry]) -> list[Entry]:
        """The first entry as it is to be applied here. To be called, and its result applied, with the replica's turn.

        Always one: what is under way for a row changes with the one before.
        """
        first = entries[0]
        if not first.members:
            return [first]
        entry = Entry(first.number, tuple(await self._names.published(first.members)), first.at_ms)
        known = await self._known([m.key for m in entry.members])
        fold = _Fold(self, entry.number)
        await fold.read([m for m in entry.members if not is_record(m)], self._resource)
        members = [m if is_record(m) else await self._member(m, fold, known) for m in entry.members]
        return [Entry(entry.number, tuple(members), entry.at_ms)]

    async def _member(self, member: Member, fold: "_Fold", known: dict[str, _Known]) -> Member:
        key, first = member.key, known.get(member.key)
        if first is None:
            known[key] = _Known(member.tx, fold.number)
            folded = msgspec.structs.replace(
                member, changes=tuple(await fold.member(member, folded=True, landed=False))
            )
            return as_write_set(folded, fold.site)
        ours = first.tx == member.tx
        if first.number > 0 or (first.number < 0 and not ours):
            return Member(member.tx, ())  # the log has it already
        changes = await fold.member(member, folded=first.number == 0, landed=ours)
        first.number = fold.number if ours else -fold.number
        noted = Upsert(LOGGED_KEYS, {"replica_set": self._set, "key": key}, {"tx": first.tx, "number": first.number})
        return as_write_set(Member(member.tx, (*changes, noted)), fold.site)

    async def _known(self, keys: list[str]) -> dict[str, _Known]:
        found = await self._resource.read_own(
            f"select k.key, k.tx, coalesce(l.number, k.number) as number from {KEYS} k "
            f"left join {LOGGED_KEYS} l on (l.replica_set, l.key, l.tx) = (k.replica_set, k.key, k.tx) "
            "where k.replica_set = $1 and k.key = any($2::text[])",
            (self._set, keys),
        )
        return {row["key"]: _Known(row["tx"], row["number"]) for row in found.rows}


class _Fold:
    """One entry under way: bases as its earlier members left them."""

    def __init__(self, outer: Folding, number: int) -> None:
        self.number, self.site = number, ""  # the writer of the last version that was looked at
        self._outer = outer
        self._bases: dict[RowKey, Base] = {}
        self._rows: dict[RowKey, Row | None] = {}  # as they are here
        self._waiting: dict[RowKey, int] = {}
        self._lines = 0

    async def read(self, members: list[Member], resource: Resource) -> None:
        steps = [step for member in members for step in rows_of(member.changes)]
        keys = {step.row_key: key_in(step.change) for step in steps}
        versions, stored = await read_versions(resource, keys, in_record=True), await read_bases(resource, keys)
        for table in sorted({table for table, _ in keys}):
            mine = [row_key for row_key in keys if row_key[0] == table]
            columns = {name for step in steps if step.row_key[0] == table for name in columns_in(step.change)}
            images = await self._outer.shapes.rows(table, [keys[row_key] for row_key in mine], columns)
            for row_key, image in zip(mine, images, strict=True):
                base, self._waiting[row_key] = stored.get(row_key, (None, 0))
                self._rows[row_key] = image
                self._bases[row_key] = base or Base(versions.get(row_key, Version()), image)

    async def member(self, member: Member, *, folded: bool, landed: bool) -> list[Change]:
        changes: list[Change] = []
        for row_key, change, clock in rows_of(member.changes):
            if clock is None:
                raise InvalidChange("a published change of a set that folds its log lacks its version")
            shape = await self._outer.shapes.of(row_key[0])
            key = shape.key_of(key_in(change))
            version = version_in(clock)
            self.site = version.site
            self._outer.clock.see(version.clock)
            lines = await self._fold(member.tx, shape, key, row_key, change, clock) if folded else []
            self._waiting[row_key] = max(0, self._waiting[row_key] - landed)
            changes += [*self._shown(shape, key, row_key), *lines]
        return changes

    def _shown(self, shape: TableShape, key: Row, row_key: RowKey) -> list[Change]:
        """The row as the log says, or, while changes of ours are under way, only the record of what it says."""
        base, waiting = self._bases[row_key], self._waiting[row_key]
        if waiting:
            return [Update(CLOCKS, _clock_key(row_key), {"base": base.text, "waiting": waiting})]
        clock = clock_change(*row_key, base.version, base.version, {"kind": "fold", "key": key})
        record = msgspec.structs.replace(clock, values={**clock.values, "base": "", "waiting": 0})
        before, self._rows[row_key] = self._rows[row_key], base.image
        if base.image is None:
            return [Delete(shape.name, key), record]
        return [*row_written(shape, key, before, base.image), record]

    async def _fold(
        self, tx: str, shape: TableShape, key: Row, row_key: RowKey, change: Change, clock: Upsert
    ) -> list[Change]:
        base, told, incoming = self._bases[row_key], from_json(clock.values["change"]), version_in(clock)
        if told["kind"] == "add":
            return await self._add(tx, shape, row_key, base, told["add"])
        values = await self._texts(shape, values_in(change, shape, told))
        # Of a row whose record was pruned nothing is known: an insert that builds on it is taken whole.
        unknown = told["kind"] == "insert" and base.image is None and base.version.generation == 0
        adds = incoming.adds if unknown else base.version.adds
        new = None if incoming.deleted else on_top(base_of(values, incoming.adds), adds)
        came = Base(msgspec.structs.replace(incoming, adds=adds), new)
        if unknown or list(base.version.identity) == from_json(clock.values["previous"]):
            self._bases[row_key] = came
            return []
        kind = conflict_kind(told["kind"], base.version, base.image)
        if base.image is None or new is None or not base.version.live:
            wins = self._outer.ranking.rank(incoming) > self._outer.ranking.rank(base.version)
            kept, lost = (came, base) if wins else (base, came)
            self._bases[row_key] = kept
            return [self._line(tx, kind, row_key, kept.version.site, kept.image, lost.image)]
        chosen = self._outer.own_function(shape.name, key, {**base.image}, {**new}, base.version.site, incoming.site)
        self._bases[row_key] = Base(self._merged(base.version, incoming), await self._texts(shape, chosen))
        return [self._line(tx, kind, row_key, "resolver", chosen, {"kept": base.image, "came": new})]

    async def _add(self, tx: str, shape: TableShape, row_key: RowKey, base: Base, add: Row) -> list[Change]:
        version = base.version.added(add)
        if base.image is None:
            self._bases[row_key] = Base(version, None)
            kind = "update_deleted" if base.version.deleted else "update_missing"
            return [self._line(tx, kind, row_key, base.version.site, None, {"add": add})]
        sums = on_top({column: base.image[column] for column in add}, Version().added(add).adds)
        self._bases[row_key] = Base(version, {**base.image, **await self._texts(shape, sums)})
        return []

    def _merged(self, one: Version, other: Version) -> Version:
        """A version of its own: whoever had seen only one of the two did not see this."""
        return msgspec.structs.replace(
            one,
            edits=max(one.edits, other.edits) + 1,
            clock=max(one.clock, other.clock),
            site=f"={self.number}.{self._lines}",
        )

    async def _texts(self, shape: TableShape, values: Row) -> Row:
        return await self._outer.shapes.normal(shape, {name: as_text(value) for name, value in values.items()})

    def _line(self, tx: str, kind: str, row_key: RowKey, winner: str, kept: object, discarded: object) -> Change:
        self._lines += 1
        self._outer.conflicts += 1
        ident, at = f"{self.number}:{tx}:{self._lines}", datetime.now(UTC).isoformat()
        resolver = self._outer.ranking.resolver
        return conflict_row(ident, at, kind, *row_key, winner, kept, discarded, resolver, self.number, tx)


def _clock_key(row_key: RowKey) -> Row:
    return {"table_name": row_key[0], "key": row_key[1]}
