"""The serializable policy at a replica: whether what a write set depends on still holds.

The protocol is SER (Kemme and Alonso): reads lock at one replica, write sets go through one total order, and a
transaction whose read lock stands in the way of an earlier write set is aborted. That verdict follows from what was
read, at which position, and from the log alone. So the entry carries its read locks, and every replica decides as the
initiator would: no second message, and nobody waits for an initiator that died.

What the newest write sets wrote is kept in memory, and beside the data for the next start. Whoever read longer ago
than that is refused, by every replica alike.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from adapters.changes import Insert, Member, Statement
from adapters.resource import Entry, Resource
from replication.conflicts.own_statements import DROP_WRITE_SETS
from replication.conflicts.read_locks import AccessedRows, Lock, RowKey, decode_locks
from replication.conflicts.tables import WRITE_SETS, rejection_record
from replication.model.events import UNREADABLE_ERRORS
from replication.model.values import pack_result
from replication.rpc.calls import LockedReadDone
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.messages import LogEntry

WINDOW = 100_000  # numbers; how old a read may be when its transaction commits
PRUNE_EVERY = 1_000
_row_keys = msgspec.json.Decoder(list[tuple[str, str]])
WriteSet = tuple[int, frozenset[RowKey]]


class WriteSets:
    """What was written when, within the window."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._sets: deque[WriteSet] = deque()
        self._last: dict[RowKey, int] = {}

    def add(self, number: int, row_keys: frozenset[RowKey]) -> None:
        self._sets.append((number, row_keys))
        self._last.update(dict.fromkeys(row_keys, number))
        while self._sets and self._sets[0][0] <= number - self._window:
            old, gone = self._sets.popleft()
            for row_key in gone:
                if self._last.get(row_key) == old:
                    del self._last[row_key]

    def last(self, row_key: RowKey) -> int:
        return self._last.get(row_key, 0)


class Certifier:
    """One replica's judgement of write sets; the same at every replica that has applied the same prefix."""

    def __init__(self, resource: Resource, replica_set: str, *, window: int = WINDOW) -> None:
        self._resource, self._replica_set, self._window = resource, replica_set, window
        self.row_keys = AccessedRows(resource)
        self._written = WriteSets(window)
        self._judged: list[WriteSet] = []  # handed out to be applied; certain once the next ones are asked for

    async def start(self) -> None:
        """Remember what earlier lives have written down."""
        found = await self._resource.read_own(f"select number, places from {WRITE_SETS} order by number")
        for row in found.rows:
            self._written.add(row["number"], frozenset(_row_keys.decode(row["places"])))

    async def read(self, replica: str, sql: str, args: Sequence[Any], who: str) -> LockedReadDone:
        """A query in one snapshot, with the position it was read at and the locks that it takes."""
        done = await self._resource.read(sql, args, with_position=True, who=who)
        position = done.position.prefix if done.position is not None else 0
        locks = await self.row_keys.read_by(sql, args)
        rows = await pack_result(f"replica {replica}", done.rows)
        return LockedReadDone(replica=replica, rows=rows, position=position, locks=tuple(locks))

    async def certified(self, entries: Sequence[Entry], logged: Mapping[int, LogEntry]) -> list[Entry]:
        """The entries as every replica applies them: without the members whose reads no longer hold.

        They are judged in order, each on what those before it write, so it makes no difference how many come at once.
        Those from before the first one have been applied; the rest of what was judged before is judged again.
        """
        for number, row_keys in self._judged:
            if number < entries[0].number:
                self._written.add(number, row_keys)
        self._judged = []
        newest: dict[RowKey, int] = {}
        keys: dict[str, int] = {}
        return [await self._certified(entry, _reads(logged.get(entry.number)), newest, keys) for entry in entries]

    async def _certified(
        self, entry: Entry, reads: dict[str, list[Lock] | None], newest: dict[RowKey, int], keys: dict[str, int]
    ) -> Entry:
        members: list[Member] = []
        for member in entry.members:
            broken = self._broken(entry.number, reads.get(member.tx, []), newest)
            if broken is not None and not await self._repeated(member, entry.at_ms, keys):
                members.append(rejection_record(entry.number, member.tx, "serialization", broken, "serializable"))
                continue
            if member.idempotency_key:
                keys[member.idempotency_key] = entry.at_ms + member.key_ttl_s * 1000
            members.append(member)
            if reads:  # the next member of the entry comes after this one
                row_keys = await self.row_keys.written_by(member.changes)
                newest.update(dict.fromkeys(row_keys, entry.number))
        written = await self.row_keys.written_by([change for member in members for change in member.changes])
        if written:
            newest.update(dict.fromkeys(written, entry.number))
            self._judged.append((entry.number, written))
            members += self._records(entry.number, written, members[-1])
        return Entry(entry.number, tuple(members), entry.at_ms)

    def _broken(self, number: int, locks: Sequence[Lock] | None, newest: dict[RowKey, int]) -> Rejection | None:
        if locks is None:
            return _not_serializable("what it has read can't be decoded")
        for lock in locks:
            what = lock.what
            if number - lock.position > self._window:
                return _not_serializable(f"{what} was read at {lock.position}, too long before number {number}")
            for row_key in lock.row_keys:
                changed = max(newest.get(row_key, 0), self._written.last(row_key))
                if changed > lock.position:
                    return _not_serializable(f"{what} was read at {lock.position} and changed by number {changed}")
        return None

    async def _repeated(self, member: Member, at_ms: int, keys: dict[str, int]) -> bool:
        """Said again, with what it read before its first time: the database recognises it by its key."""
        key = member.idempotency_key
        if key and key not in keys:
            found = await self._resource.read_own(
                "select expires_ms from tops.idempotency_keys where replica_set = $1 and key = $2",
                (self._replica_set, key),
            )
            keys[key] = max((row["expires_ms"] for row in found.rows), default=0)
        return keys.get(key, 0) > at_ms

    def _records(self, number: int, row_keys: frozenset[RowKey], last: Member) -> list[Member]:
        """What is written beside the members, not into them: an idempotency key is tied to what its member says."""
        row = {"number": number, "places": msgspec.json.encode(sorted(row_keys)).decode()}
        records = [Member(last.tx, (Insert(WRITE_SETS, row),))]
        if number % PRUNE_EVERY == 0:
            records.append(Member(last.tx, (Statement(DROP_WRITE_SETS, (number - self._window,)),)))
        return records


def _reads(logged: LogEntry | None) -> dict[str, list[Lock] | None]:
    """What each transaction has read; None if that can't be decoded."""
    if logged is None:
        return {}
    return {
        transaction.tx: _locks(event.body["reads"])
        for transaction in logged.transactions
        for event in transaction.events
        if event.body.get("reads")
    }


def _locks(encoded: bytes) -> list[Lock] | None:
    try:
        return decode_locks(encoded)
    except UNREADABLE_ERRORS:
        return None


def _not_serializable(text: str) -> Rejection:
    return Rejection(RejectionCode.SERIALIZATION, text)
