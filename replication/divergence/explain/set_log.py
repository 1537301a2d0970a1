"""A replica set's log as the broker keeps it: who wrote a row, when, and in which transaction."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from adapters.changes import volatile_part
from replication.divergence.explain.log_records import TableRecords, members_of, overruled_in
from replication.divergence.explain.set_link import SetLink
from replication.replica.pruning import REFUSALS_KEPT
from replication.tables.endpoints import Key, LogRecord
from replication.tables.schema import CommonTable

# Log indexes before the barrier that are read: as long as replicas remember which logged transactions they rejected.
WINDOW = REFUSALS_KEPT
KEPT_PER_ROW = 50
INSERTED_MAX = 10_000  # keys of inserted rows that are remembered


class SetLog:
    """Looks rows up in the log; what was read for a table is not read again for the same rows."""

    def __init__(self, link: SetLink, window: int = WINDOW) -> None:
        self._link, self._window = link, window
        self._table = ""
        self._read: _Read | None = None

    async def records_of(
        self, table: CommonTable, keys: Collection[Key], upto: int | None
    ) -> Mapping[Key, Sequence[LogRecord]]:
        last = await self._go_on(table, set(keys), upto)
        assert self._read is not None
        return {key: self._read.of(key, last) for key in keys}

    async def inserted(self, table: CommonTable, upto: int | None) -> Collection[Key]:
        await self._go_on(table, set(), upto)
        assert self._read is not None
        return list(self._read.inserted)

    async def _go_on(self, table: CommonTable, keys: set[Key], upto: int | None) -> int:
        told = await self._link.log()
        last = told.decided if upto is None else min(upto, told.decided)
        if self._read is None or self._table != table.label or not self._read.keys >= keys:
            first = max(told.oldest, last - self._window + 1, 1)
            self._table, self._read = table.label, _Read(TableRecords(table, self._link.config), keys, first - 1)
        await self._read.go_on(self._link, last)
        return last


class _Read:
    """The records of some rows, as far as the log was read."""

    def __init__(self, records: TableRecords, keys: set[Key], upto: int) -> None:
        self.keys = keys
        self._row_keys = {records.row_key_of(key): key for key in keys}
        self._records, self._upto = records, upto
        self._by_key: dict[Key, deque[LogRecord]] = {}
        self._any_row: deque[LogRecord] = deque(maxlen=KEPT_PER_ROW)
        self._not_deterministic: deque[LogRecord] = deque(maxlen=KEPT_PER_ROW)
        self.inserted: dict[Key, None] = {}  # the newest ones last

    async def go_on(self, link: SetLink, last: int) -> None:
        async for entry in link.entries(self._upto + 1, last):
            for origin, member in members_of(entry, link.config):
                for key, record in self._records.of(origin, member):
                    if key is None:
                        known = self._not_deterministic if volatile_part(record.statement) else self._any_row
                        known.append(record)
                        continue
                    self._note_inserted(key, record)
                    if key in self.keys:
                        self._add(key, record)
            for origin, row_key in overruled_in(entry, link.config):
                for key in [key for key in self.inserted if self._records.row_key_of(key) == row_key]:
                    del self.inserted[key]
                if (wanted := self._row_keys.get(row_key)) is not None:
                    self._add(wanted, self._records.overruled(origin, wanted))
        self._upto = max(self._upto, last)

    def _add(self, key: Key, record: LogRecord) -> None:
        self._by_key.setdefault(key, deque(maxlen=KEPT_PER_ROW)).append(record)

    def _note_inserted(self, key: Key, record: LogRecord) -> None:
        if record.new is None:
            self.inserted.pop(key, None)
        elif record.creates:
            self.inserted.pop(key, None)
            self.inserted[key] = None
            if len(self.inserted) > INSERTED_MAX:
                del self.inserted[next(iter(self.inserted))]

    def of(self, key: Key, last: int) -> list[LogRecord]:
        found = [*self._by_key.get(key, ()), *self._any_row, *self._not_deterministic]
        return sorted((r for r in found if r.number <= last), key=lambda r: r.number)
