"""A broker's simulated journal: synced records survive a crash, and possibly a prefix of the others."""

from random import Random

from tops.protocol.messages import LogEntry
from tops.protocol.records import AnyRecord, LogAppended


class SimDisk:
    """Records in the order in which they were written."""

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []
        self.synced = 0
        self.torn = False  # whether the last crash lost records

    def append(self, record: AnyRecord) -> None:
        self.records.append(record)

    def sync(self) -> None:
        self.synced = len(self.records)

    def crash(self, rng: Random) -> None:
        """Power failure: the unsynced tail is lost from a random point on."""
        self.cut(rng.randint(self.synced, len(self.records)))

    def cut(self, kept: int) -> None:
        """Keep only so many records. A correct disk loses no synced record."""
        self.torn = kept < len(self.records)
        del self.records[kept:]
        self.synced = kept

    def log_entries(self, event_type: str, first: int, last: int) -> tuple[LogEntry, ...]:
        """The result of a `ReadLog`."""
        found = {
            r.entry.number: r.entry
            for r in self.records
            if isinstance(r, LogAppended) and r.event_type == event_type and first <= r.entry.number <= last
        }
        return tuple(found[n] for n in sorted(found))
