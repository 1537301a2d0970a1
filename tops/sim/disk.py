"""A broker's simulated journal: what was synced survives a crash, of the rest a prefix may."""

from random import Random

from tops.protocol.messages import LogEntry
from tops.protocol.records import AnyRecord, LogAppended


class SimDisk:
    """Records in the order in which they were written."""

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []
        self.synced = 0
        self.torn = False  # whether the last crash took something

    def append(self, record: AnyRecord) -> None:
        self.records.append(record)

    def sync(self) -> None:
        self.synced = len(self.records)

    def crash(self, rng: Random) -> None:
        """Power is gone: the unsynced tail is lost from some point on."""
        self.cut(rng.randint(self.synced, len(self.records)))

    def cut(self, kept: int) -> None:
        """Only so many records are left. A disk that keeps its word cuts off nothing that was synced."""
        self.torn = kept < len(self.records)
        del self.records[kept:]
        self.synced = kept

    def log_entries(self, event_type: str, first: int, last: int) -> tuple[LogEntry, ...]:
        """What a `ReadLog` finds."""
        found = {
            r.entry.number: r.entry
            for r in self.records
            if isinstance(r, LogAppended) and r.event_type == event_type and first <= r.entry.number <= last
        }
        return tuple(found[n] for n in sorted(found))
