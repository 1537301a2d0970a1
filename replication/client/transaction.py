"""A transaction on a replica set: its changes are collected and carried out together when it is committed.

Nothing is locked in a database while it is open. What guards a row that was read is its expected version or, in a
serializable set, the record of what was read: the transaction commits only if that is still so.
"""

from typing import Any

from adapters.changes import Change, Delete, Insert, Row, Statement, Update, Upsert
from replication.client.reads import Consistency, Reader
from replication.client.writes import Writer, WriteResult
from replication.conflicts.read_locks import Lock, encode_locks
from tops.model.errors import InvalidTransaction, TransactionClosed


class Executed:
    """What a statement of a transaction has done, once the transaction has committed."""

    def __init__(self, transaction: "Transaction", row_key: int) -> None:
        self._transaction, self._row_key = transaction, row_key

    @property
    def rows(self) -> int:
        return self._transaction.done(self._row_key)[0]

    @property
    def returned(self) -> tuple[Row, ...]:
        return self._transaction.done(self._row_key)[1]


class Transaction:
    """Changes that are committed together or not at all."""

    def __init__(self, writer: Writer, reader: Reader, idempotency_key: str, *, serializable: bool = False) -> None:
        self._writer, self._reader, self._key = writer, reader, idempotency_key
        self._serializable = serializable
        self._changes: list[Change] = []
        self._locks: list[Lock] = []
        self.result: WriteResult | None = None

    async def insert(self, table: str, values: Row) -> None:
        self._add(Insert(table, values))

    async def update(
        self,
        table: str,
        key: Row,
        values: Row | None = None,
        *,
        add: Row | None = None,
        expect_version: int | None = None,
    ) -> None:
        """New values for, or amounts added to, the row with that primary key."""
        self._add(Update(table, key, values or {}, add or {}, expect_version))

    async def upsert(
        self, table: str, key: Row, values: Row | None = None, *, expect_version: int | None = None
    ) -> None:
        self._add(Upsert(table, key, values or {}, expect_version))

    async def delete(self, table: str, key: Row, *, expect_version: int | None = None) -> None:
        self._add(Delete(table, key, expect_version))

    async def execute(self, sql: str, *args: Any) -> "Executed":
        """The statement runs when the transaction commits; what it did is known then."""
        self._add(Statement(sql, args))
        return Executed(self, len(self._changes) - 1)

    async def fetch(self, sql: str, *args: Any, consistency: Consistency = "any") -> list[Row]:
        """Read; the transaction's own changes are not visible before it commits. In a serializable set it commits only
        if what was read is unchanged, and reads nothing older than what was written through the same object before."""
        if self._serializable:
            rows, locks = await self._reader.locked(sql, args, self._writer.token)
            self._locks += locks
            return rows
        return (await self._reader.read(sql, args, consistency, "", None, None, None)).rows

    async def commit(self) -> WriteResult:
        if self.result is not None:
            raise TransactionClosed(self.result.tx, "committed")
        self.result = await self._writer.write(tuple(self._changes), self._key, self._reads())
        return self.result

    def done(self, row_key: int) -> tuple[int, tuple[Row, ...]]:
        """Rows affected and rows returned by the change at that place; to be asked for after the commit."""
        if self.result is None:
            raise InvalidTransaction("what a statement did is known when its transaction has committed")
        rows, returned = self.result.rows, self.result.returned
        return rows[row_key] if row_key < len(rows) else 0, returned[row_key] if row_key < len(returned) else ()

    def _reads(self) -> bytes:
        one_snapshot = len({lock.position for lock in self._locks}) <= 1
        if not self._locks or (one_snapshot and not self._changes):
            return b""  # a reader of one snapshot is serial where that snapshot is
        return encode_locks(self._locks)

    def _add(self, change: Change) -> None:
        if self.result is not None:
            raise TransactionClosed(self.result.tx, "committed")
        self._changes.append(change)
