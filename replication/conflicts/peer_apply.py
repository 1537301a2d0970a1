"""The receiver's half of peer-to-peer: what becomes, at this replica, of a transaction that another site committed.

Each change is compared with the row's present version. If that is the one its writer had seen, it simply follows; if
not, the two met, the higher version wins, and the conflict log shows what was kept and what was discarded.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from adapters.changes import Change, Delete, Insert, Member, Row, RowChange, Update, Upsert
from adapters.postgres.apply.keys import known_keys
from adapters.resource import Entry, EntryFailed, Resource, Why
from replication.conflicts.clock import HybridClock
from replication.conflicts.row_names import RowNames
from replication.conflicts.tables import (
    Shapes,
    TableShape,
    as_write_set,
    clock_change,
    columns_in,
    conflict_kind,
    conflict_row,
    is_record,
    key_in,
    only_increments,
    only_summed,
    read_versions,
    row_written,
    rows_of,
    sums_set,
    values_in,
    version_in,
)
from replication.conflicts.versions import Ranking, Version, base_of, from_json, on_top

RowKey = tuple[str, str]
FailedEntry = Callable[[Entry, EntryFailed], Awaitable[Entry | None]]
_NOT_AS_TRUSTED = (Why.VERSION, Why.KEY_REUSED)
_TOGETHER = 256  # entries for which the rows are looked up at once; writers of this site wait meanwhile


class PeerApply:
    """Resolves entries of the log against this replica's rows."""

    def __init__(
        self,
        replica_set: str,
        resource: Resource,
        clock: HybridClock,
        ranking: Ranking,
        shapes: Shapes,
    ) -> None:
        self._set, self._resource, self._clock = replica_set, resource, clock
        self._ranking, self._shapes, self._names = ranking, shapes, RowNames(resource, shapes)
        self._distrusted: set[int] = set()  # entries whose increments did not go through unseen
        self.conflicts = 0

    async def resolved(self, entries: Sequence[Entry]) -> list[Entry]:
        """The first entries as they are to be applied here: without what is known already, with every row decided.

        To be called, and its result applied, with the replica's turn: nothing may change in between.
        """
        together = await self._named(entries[:_TOGETHER])
        steps = [
            step
            for entry in together
            for member in entry.members
            if self._must_look(entry, member)
            for step in rows_of(member.changes)
        ]
        if not steps:
            return together
        keys = {step.row_key: key_in(step.change) for step in steps}
        rows = _Rows(self, await read_versions(self._resource, keys))
        await rows.read_images(keys, {(step.row_key[0], name) for step in steps for name in columns_in(step.change)})
        looked_at = [
            member for entry in together for member in entry.members if not is_record(member) and rows.meets(member)
        ]
        known = await self._known_keys(looked_at)
        return [await self._entry(entry, rows, known) for entry in together]

    async def _named(self, entries: Sequence[Entry]) -> list[Entry]:
        """Every row by the one name that it has here, whatever its sender calls it."""
        members = iter(await self._names.published([member for entry in entries for member in entry.members]))
        return [Entry(entry.number, tuple([next(members) for _ in entry.members]), entry.at_ms) for entry in entries]

    def _must_look(self, entry: Entry, member: Member) -> bool:
        """Increments need no look at their rows, unless it turned out that one is not there or was made before."""
        return (entry.number in self._distrusted or not only_increments(member.changes)) and not is_record(member)

    def unless_looked_at(self, otherwise: FailedEntry | None) -> FailedEntry:
        """What to do with an entry that fails: look at its rows first, if they were not looked at."""

        async def on_failed(entry: Entry, failed: EntryFailed) -> Entry | None:
            if failed.reason.why in _NOT_AS_TRUSTED and entry.number not in self._distrusted:
                self._distrusted = {entry.number}  # those before it are applied
                return None
            return await otherwise(entry, failed) if otherwise is not None else None

        return on_failed

    async def _entry(self, entry: Entry, rows: "_Rows", known: dict[str, str]) -> Entry:
        rows.begin(entry.number)
        records = [m for m in entry.members if is_record(m)]
        fresh = [m for m in entry.members if known.get(m.key) != m.tx and not is_record(m)]
        members = [await rows.member(m, known) if rows.meets(m) else m for m in fresh] + records
        return Entry(entry.number, tuple(members), entry.at_ms)

    async def _known_keys(self, members: list[Member]) -> dict[str, str]:
        """Keys that were committed here, and by which transactions."""
        found = await self._resource.read_own(*known_keys(self._set, members))
        return {row["key"]: row["tx"] for row in found.rows}


class _Rows:
    """Entries under way: versions and images as those before left them."""

    def __init__(self, outer: PeerApply, versions: dict[RowKey, Version]) -> None:
        self._outer, self._versions = outer, versions
        self._images: dict[RowKey, Row | None] = {}
        self._number = self._lines = 0
        self._site = ""  # the writer of the last version that was looked at
        self._captured = False  # whether the member at hand is an origin's write set

    def begin(self, number: int) -> None:
        """The next entry is the one with this number."""
        self._number, self._lines = number, 0

    async def read_images(self, keys: dict[RowKey, Row], named: set[tuple[str, str]]) -> None:
        """`named` are the columns, with their tables, that the changes are about."""
        for table in sorted({table for table, _ in keys}):
            mine = [row_key for row_key in keys if row_key[0] == table]
            columns = {name for of_table, name in named if of_table == table}
            found = await self._outer._shapes.rows(table, [keys[row_key] for row_key in mine], columns)
            self._images.update(zip(mine, found, strict=True))

    def meets(self, member: Member) -> bool:
        """Whether the transaction touches rows that were looked at."""
        return any(step.row_key in self._images for step in rows_of(member.changes))

    async def member(self, member: Member, known: dict[str, str]) -> Member:
        """One transaction; written before at another site, under the same key, its increments are there already."""
        again, self._captured = member.key in known, bool(member.origin)
        known.setdefault(member.key, member.tx)
        changes: list[Change] = []
        for row_key, change, clock in rows_of(member.changes):
            if clock is not None:
                changes += await self._row(member.tx, row_key, change, clock)
            elif isinstance(change, Update) and not again:
                changes += self._add(member.tx, row_key, change)
        here = as_write_set(msgspec.structs.replace(member, changes=tuple(changes)), self._site)
        return msgspec.structs.replace(here, idempotency_key="", content="") if again else here

    async def _row(self, tx: str, row_key: RowKey, change: RowChange, clock: Upsert) -> list[Change]:
        shape = await self._outer._shapes.of(row_key[0])
        told = from_json(clock.values["change"])
        incoming = version_in(clock)
        self._outer._clock.see(incoming.clock)
        self._site = incoming.site
        key = shape.key_of(key_in(change))
        current = self._versions.get(row_key, Version())
        return self._set(tx, shape, key, row_key, current, incoming, change, clock, told)

    def _add(self, tx: str, row_key: RowKey, change: Update) -> list[Change]:
        if row_key not in self._images:
            return [change]
        current, add = self._versions.get(row_key, Version()), {name: str(value) for name, value in change.add.items()}
        self._versions[row_key] = current.added(add)
        image = self._images[row_key]
        if image is None:
            kind = "update_deleted" if current.deleted else "update_missing"
            return [*only_summed(change), self._line(tx, kind, row_key, current.site, None, {"add": add})]
        self._images[row_key] = {**image, **on_top({c: image[c] for c in add}, Version().added(add).adds)}
        return [change]

    def _set(
        self, tx: str, shape: TableShape, key: Row, row_key: RowKey, current: Version, incoming: Version,
        change: Change, clock: Upsert, told: dict[str, Any],
    ) -> list[Change]:  # fmt: skip
        outer, kind = self._outer, told["kind"]
        image = self._images[row_key]
        # Of a row whose record was pruned nothing is known: an insert that builds on it is taken whole.
        unknown = kind == "insert" and image is None and current.generation == 0
        follows = unknown or list(current.identity) == from_json(clock.values["previous"])
        values, adds = values_in(change, shape, told), incoming.adds if unknown else current.adds
        new = on_top(base_of(values, incoming.adds), adds)
        merged = msgspec.structs.replace(incoming, adds=adds)
        if outer._ranking.per_column:
            return self._columns(tx, shape, key, row_key, current, merged, new, told, follows, image)
        wins = outer._ranking.rank(incoming) > outer._ranking.rank(current)
        lines: list[Change] = []
        if not follows:
            name = conflict_kind(kind, current, image)
            kept, lost = (new, image) if wins else (image, new)
            lines.append(self._line(tx, name, row_key, (incoming if wins else current).site, kept, lost))
        if not wins:
            return lines
        self._versions[row_key] = merged
        sums = sums_set(*row_key, current.adds, adds)
        return self._write(shape, key, row_key, None if incoming.deleted else new, current, kind) + sums + lines

    def _write(
        self, shape: TableShape, key: Row, row_key: RowKey, image: Row | None, before: Version, kind: str
    ) -> list[Change]:
        record = clock_change(*row_key, self._versions[row_key], before, {"kind": kind, "key": key})
        row = self._images.get(row_key)
        existed = row is not None
        # Columns that its writer did not know yet stay as they are.
        self._images[row_key] = {**(row or {}), **image} if image is not None else None
        if image is None:
            return [Delete(shape.name, key, captured=self._captured), record] if existed else [record]
        written = row_written(shape, key, row, image)
        if not self._captured or len(written) > 1:
            return [*written, record]
        # A table with rules takes no ON CONFLICT, also where the rules are switched off.
        if not existed:
            return [Insert(shape.name, {**key, **image}, captured=True), record]
        values = {name: value for name, value in image.items() if name not in key and name not in shape.fixed}
        return [Update(shape.name, key, values, captured=True), record] if values else [record]

    def _columns(
        self, tx: str, shape: TableShape, key: Row, row_key: RowKey, current: Version, incoming: Version, new: Row,
        told: dict[str, Any], follows: bool, image: Row | None,
    ) -> list[Change]:  # fmt: skip
        """Every column by itself; a delete is about the row, and ends its generation."""
        kind, seen = told["kind"], told.get("seen", {})
        lines: list[Change] = []
        row_wins = (incoming.generation, incoming.deleted) > (current.generation, current.deleted)
        if incoming.deleted or row_wins or image is None:
            wins = self._outer._ranking.rank(incoming) > self._outer._ranking.rank(current)
            if not follows:
                kept, lost = (None if incoming.deleted else new, image) if wins else (image, new)
                winner = (incoming if wins else current).site
                lines.append(self._line(tx, conflict_kind(kind, current, image), row_key, winner, kept, lost))
            if not wins or (image is None and kind == "update"):
                return lines
            self._versions[row_key] = incoming
            sums = sums_set(*row_key, current.adds, incoming.adds)
            return self._write(shape, key, row_key, None if incoming.deleted else new, current, kind) + sums + lines
        if current.deleted or incoming.generation < current.generation:
            return [self._line(tx, conflict_kind(kind, current, image), row_key, current.site, image, new)]
        taken, lost, replaced = {}, {}, {}
        columns = dict(current.columns)
        for name, value in new.items():
            rank = incoming.columns.get(name, (incoming.generation, incoming.clock, incoming.site))
            if rank <= columns.get(name, (0, 0, "")):
                lost[name] = value
                continue
            if not follows and name in columns and list(columns[name]) != seen.get(name):
                replaced[name] = image[name]  # its writer had seen another value than the one that goes
            columns[name], taken[name] = rank, value
        met = conflict_kind(kind, current, image)
        if lost:
            lines.append(self._line(tx, met, row_key, current.site, image, lost))
        if replaced:
            lines.append(self._line(tx, met, row_key, incoming.site, {**image, **taken}, replaced))
        newest = max(current, incoming, key=self._outer._ranking.rank)
        self._versions[row_key] = msgspec.structs.replace(newest, adds=current.adds, columns=columns)
        return self._write(shape, key, row_key, {**image, **taken}, current, kind) + lines

    def _line(self, tx: str, kind: str, row_key: RowKey, winner: str, kept: object, discarded: object) -> Change:
        self._lines += 1
        self._outer.conflicts += 1
        at = datetime.now(UTC).isoformat()
        ident = f"{self._number}:{tx}:{self._lines}"
        resolver = self._outer._ranking.resolver
        return conflict_row(ident, at, kind, *row_key, winner, kept, discarded, resolver, self._number, tx)
