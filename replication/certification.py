"""The serializable policy at a replica: which reads a write set depends on, and whether they still hold.

The protocol is SER (Kemme and Alonso): reads lock at one replica, write sets go through one total order, and a
transaction whose read lock stands in the way of an earlier write set is aborted. That verdict follows from what was
read, at which position, and from the log alone. So the entry carries its read locks, and every replica decides as the
initiator would: no second message, and nobody waits for an initiator that died.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from replication.calls import LockedReadDone
from replication.conflicts.tables import Shapes, TableShape, conflict_row, key_text, record_of
from replication.values import pack_rows
from tops.changes import Change, Insert, Member, Row, Statement, Upsert
from tops.ids import TxId
from tops.messages import LogEntry
from tops.ports import Entry, Resource

LAST_WRITES = "tops.last_writes"
TABLE = ""  # as a key: any row of the table
BY_STATEMENT = "*"  # as a key: rows that nobody listed
_WORD = re.compile(r'"((?:[^"]|"")+)"|([A-Za-z_]\w*)')
_BY_KEY = re.compile(
    r"\s*select\s.+?\sfrom\s+(?P<table>[\w.\"]+)\s+where\s+(?P<where>.+?)\s*;?\s*", re.IGNORECASE | re.DOTALL
)
_EQUALS = re.compile(r'\s*"?(?P<column>\w+)"?\s*=\s*\$(?P<number>\d+)\s*')


class Lock(msgspec.Struct, frozen=True, array_like=True):
    """Something that was read at a position of the log: a row, or (with an empty key) a whole table."""

    table: str
    key: str
    position: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Lock])


def encode_locks(locks: Sequence[Lock]) -> bytes:
    return _encoder.encode(locks)


class Certifier:
    """One replica's view of what was written when; the same at every replica that has applied the same prefix."""

    def __init__(self, resource: Resource, replica_set: str, tables: Sequence[str]) -> None:
        self._resource, self._replica_set = resource, replica_set
        self._tables, self._shapes = list(tables), Shapes(resource)

    # --------------------------------------------------------------------------------------------------------- reads

    async def read(self, replica: str, sql: str, args: Sequence[Any]) -> LockedReadDone:
        """A query in one snapshot, with the position it was read at and the locks that it takes."""
        done = await self._resource.read(sql, args, with_position=True)
        position = done.position.prefix if done.position is not None else 0
        locks = await self._locks(sql, args)
        return LockedReadDone(replica=replica, rows=pack_rows(done.rows), position=position, locks=tuple(locks))

    async def _locks(self, sql: str, args: Sequence[Any]) -> list[tuple[str, str]]:
        """A read by primary key locks the row; any other locks the tables that it names, or all if it names none."""
        by_key = _BY_KEY.fullmatch(sql)
        if by_key is not None and by_key["table"].strip('"') in self._tables:
            shape = await self._shapes.of(by_key["table"].strip('"'))
            key = _key_in(by_key["where"], shape, args)
            if key is not None:
                return [(shape.name, key_text(key))]
        named = self._named_in(sql)
        return [(table, TABLE) for table in named or self._tables]

    def _named_in(self, sql: str) -> list[str]:
        words = {quoted or plain.lower() for quoted, plain in _WORD.findall(sql)}
        return [table for table in self._tables if table.split(".")[-1].strip('"') in words]

    # -------------------------------------------------------------------------------------------------- write sets

    async def certified(self, entries: Sequence[Entry], logged: Mapping[int, LogEntry]) -> list[Entry]:
        """The entries as every replica applies them: without the members whose reads no longer hold.

        They are judged in order, each on what those before it write, so it makes no difference how many come at once:
        if one can't be applied after all, the ones behind it are judged again."""
        reads = {entry.number: _reads(logged.get(entry.number)) for entry in entries}
        locks = [lock for of_entry in reads.values() for of_member in of_entry.values() for lock in of_member]
        written = await self._last_writes({(lock.table, key) for lock in locks for key in _checked(lock)})
        keys = await self._known_keys([member for entry in entries for member in entry.members])
        judged: list[Entry] = []
        for entry in entries:
            members: list[Member] = []
            for member in entry.members:
                broken = _broken(reads[entry.number].get(member.tx, []), written)
                # Said again, with what it read before its first time: the database recognises it by its key.
                if broken is not None and keys.get(member.idempotency_key, 0) <= entry.at_ms:
                    members.append(_refused(entry.number, member.tx, broken))
                    continue
                if member.idempotency_key:
                    keys[member.idempotency_key] = entry.at_ms + member.key_ttl_s * 1000
                footprint = await self._footprint(member)
                written.update(dict.fromkeys(footprint, entry.number))
                members += [member, _records(member.tx, footprint, entry.number)] if footprint else [member]
            judged.append(Entry(entry.number, tuple(members), entry.at_ms))
        return judged

    async def _known_keys(self, members: Sequence[Member]) -> dict[str, int]:
        """Until when each of the members' idempotency keys is taken, as far as one is."""
        wanted = [member.idempotency_key for member in members if member.idempotency_key]
        if not wanted:
            return {}
        found = await self._resource.read(
            "select key, expires_ms from tops.idempotency_keys where replica_set = $1 and key = any($2::text[])",
            (self._replica_set, wanted),
        )
        return {row["key"]: row["expires_ms"] for row in found.rows}

    async def _last_writes(self, places: set[tuple[str, str]]) -> dict[tuple[str, str], int]:
        if not places:
            return {}
        wanted = sorted(places)
        found = await self._resource.read(
            f"select table_name, key, number from {LAST_WRITES} "
            "where (table_name, key) in (select * from unnest($1::text[], $2::text[]))",
            ([table for table, _ in wanted], [key for _, key in wanted]),
        )
        return {(row["table_name"], row["key"]): row["number"] for row in found.rows}

    async def _footprint(self, member: Member) -> set[tuple[str, str]]:
        """What a write set writes: its rows and their tables; for a statement, its tables as a whole."""
        places: set[tuple[str, str]] = set()
        for change in member.changes:
            if isinstance(change, Statement):
                for table in self._named_in(change.sql) or self._tables:
                    places |= {(table, TABLE), (table, BY_STATEMENT)}
            elif not change.table.startswith("tops."):
                places |= {(change.table, TABLE), (change.table, await self._row_key(change))}
        return places

    async def _row_key(self, change: Change) -> str:
        assert not isinstance(change, Statement)
        shape = await self._shapes.of(change.table)
        return key_text(shape.key_of(change.values if isinstance(change, Insert) else change.key))


def _key_in(where: str, shape: TableShape, args: Sequence[Any]) -> Row | None:
    """The primary key that a condition such as `a = $1 and b = $2` fixes; None if it is any other condition."""
    key: Row = {}
    for part in re.split(r"\s+and\s+", where, flags=re.IGNORECASE):
        equals = _EQUALS.fullmatch(part)
        if equals is None or not 0 < int(equals["number"]) <= len(args):
            return None
        key[equals["column"]] = args[int(equals["number"]) - 1]
    return key if key.keys() == set(shape.key) else None


def _reads(logged: LogEntry | None) -> dict[str, list[Lock]]:
    if logged is None:
        return {}
    found: dict[str, list[Lock]] = {}
    for transaction in logged.transactions:
        for event in transaction.events:
            if event.body["reads"]:
                found[transaction.tx] = _decoder.decode(event.body["reads"])
    return found


def _checked(lock: Lock) -> tuple[str, ...]:
    return (TABLE,) if lock.key == TABLE else (lock.key, BY_STATEMENT)


def _broken(locks: Sequence[Lock], written: dict[tuple[str, str], int]) -> str | None:
    for lock in locks:
        for key in _checked(lock):
            number = written.get((lock.table, key), 0)
            if number > lock.position:
                what = f"{lock.table} {lock.key}".strip()
                return f"serialization: {what} was read at {lock.position} and changed by number {number}"
    return None


def _records(tx: TxId, footprint: set[tuple[str, str]], number: int) -> Member:
    """What was written when, beside the member itself: what its idempotency key is tied to is only what it says."""
    places = [{"table_name": table, "key": key} for table, key in sorted(footprint)]
    return Member(tx, tuple(Upsert(LAST_WRITES, place, {"number": number}) for place in places))


def _refused(number: int, tx: str, reason: str) -> Member:
    at = datetime.now(UTC).isoformat()
    line = conflict_row(
        f"{number}:{tx}", at, "serialization", "", "", "", None, [reason], "serializable", number, tx
    )  # fmt: skip
    return record_of(tx, line)
