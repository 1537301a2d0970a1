"""Entries of a set's log, read as what they did to the rows of one table.

Values in the log are what applications passed; they are written here as canonical text, so that they can be compared
with rows. A value whose text form only a server knows (an interval, an array) is left out: not known, not different.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import msgspec

from adapters.changes import Change, Delete, Insert, Member, Row, Statement, Update, Upsert, is_captured
from replication.conflicts.own_statements import REPAIR_CALL
from replication.conflicts.tables import CLOCKS, version_in
from replication.conflicts.versions import Ranking
from replication.divergence.explain.statement_rows import as_row_change
from replication.model.config import ReplicaSetConfig
from replication.model.events import batch_in, member_in
from replication.model.touched_rows import RowKey, keys_of, row_key, table_name, tables_named_in
from replication.policies import EntryKind, policy_of
from replication.rpc.control import repair_of
from replication.tables.canonical import NotOfType, sqlite_text
from replication.tables.endpoints import Key, LogRecord
from replication.tables.schema import Column, CommonTable, ValueKind
from tops.model.transactions import TxType
from tops.protocol.messages import LogEntry

FORCED_REPAIR = "a repair by force"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a transaction of the log comes from."""

    number: int
    tx: str
    site: str
    at: datetime


def members_of(entry: LogEntry, config: ReplicaSetConfig) -> Iterator[tuple[Origin, Member]]:
    """An entry's transactions, with who wrote them and when; barriers and repairs are no application's writes."""
    return ((origin, member) for origin, member in _every_member(entry, config) if member.control is None)


def overruled_in(entry: LogEntry, config: ReplicaSetConfig) -> Iterator[tuple[Origin, RowKey]]:
    """Rows that an operator has repaired by force: what the log wrote before does not count any more."""
    for origin, member in _every_member(entry, config):
        repair = repair_of(member)
        if repair is not None and repair.forced:
            for change in member.changes:
                if isinstance(change, Statement) and change.sql == REPAIR_CALL:
                    yield origin, msgspec.json.decode(change.args[0], type=RowKey)


def _every_member(entry: LogEntry, config: ReplicaSetConfig) -> Iterator[tuple[Origin, Member]]:
    replicas = {config.site_of(name): name for name in config.names}
    for logged in entry.transactions:
        publisher = logged.tx.rpartition(".")[0].rpartition(".")[0]
        # What a replica committed first is published by its agent; anything else by its writer.
        site = replicas.get(publisher) or publisher
        for event in logged.events:
            at = datetime.fromtimestamp(event.body["at"] / 1000, UTC)
            for member in batch_in([event]) or [member_in(event)]:
                tx = member.tx if logged.tx_type is TxType.LOCAL else logged.tx
                yield Origin(entry.number, tx, site, at), member


class TableRecords:
    """Reads transactions as records of one table's rows."""

    def __init__(self, table: CommonTable, config: ReplicaSetConfig) -> None:
        self._table = table
        self._columns = {column.name: column for column in table.columns}
        self._key = frozenset(table.key)
        self._name = table_name(table.label)
        versioned = policy_of(config).entry_kind is EntryKind.VERSIONED
        self._ranking = Ranking(config.resolver, config.site_priority) if versioned else None

    def of(self, origin: Origin, member: Member) -> Iterator[tuple[Key | None, LogRecord]]:
        """Records with the row that they are about; None for a statement that may be about any."""
        for position, logged in enumerate(member.changes):
            if not self._is_ours(logged):
                continue
            following = member.changes[position + 1] if position + 1 < len(member.changes) else None
            change = self._as_row(logged) if isinstance(logged, Statement) else logged
            keys = keys_of(change, self._key)
            if keys is None:
                if isinstance(change, Statement):
                    yield None, self._record(origin, (), change, following)
                continue
            for values in keys:
                key = self._key_text(values)
                if key is not None:
                    yield key, self._record(origin, key, change, following)

    def overruled(self, origin: Origin, key: Key) -> LogRecord:
        """A repair by force, of which the log does not tell what the row became."""
        at = (origin.number, origin.tx, origin.site, origin.at)
        return LogRecord(*at, self._table.label, key, None, None, FORCED_REPAIR)

    def row_key_of(self, key: Key) -> RowKey:
        return row_key(self._table.label, dict(zip(self._table.key, key, strict=True)))

    def _is_ours(self, change: Change) -> bool:
        if isinstance(change, Statement):
            return bool(tables_named_in(change.sql, [self._name]))
        return table_name(change.table) == self._name

    def _as_row(self, statement: Statement) -> Change:
        """The statement as a change of one of our rows, if it is one for sure."""
        change = as_row_change(statement, self._key)
        return change if change is not None and table_name(change.table) == self._name else statement

    def _key_text(self, values: Row) -> Key | None:
        texts = tuple(_text(self._columns[name], values[name], digest=False) for name in self._table.key)
        return tuple(text for text in texts if text is not None) if all(t is not None for t in texts) else None

    def _record(self, origin: Origin, key: Key, change: Change, following: Change | None) -> LogRecord:
        order: tuple[Any, ...] = ()
        if self._ranking is not None and isinstance(following, Upsert) and following.table == CLOCKS:
            order = self._ranking.rank(version_in(following))
        new, unknown, statement = self._effect(change)
        return LogRecord(
            origin.number,
            origin.tx,
            origin.site,
            origin.at,
            self._table.label,
            key,
            None,
            new,
            statement,
            order,
            unknown,
            creates=isinstance(change, Insert | Upsert),
            values=_passed(change),
            is_image=is_captured(change),
        )

    def _effect(self, change: Change) -> tuple[dict[str, str | None] | None, tuple[str, ...], str]:
        match change:
            case Statement(sql=sql):
                return None, (), sql
            case Delete():
                return None, (), ""
            case Insert(values=values):
                return *self._texts(values), ""
            case Upsert(values=values, add=add):
                texts, unknown = self._texts(values)
                return texts, (*unknown, *add), ""  # a row that is there adds the amounts to what it has
            case Update(values=values, add=add):
                texts, unknown = self._texts(values)
                return {n: t for n, t in texts.items() if n not in add}, (*unknown, *add), ""

    def _texts(self, values: Row) -> tuple[dict[str, str | None], tuple[str, ...]]:
        texts: dict[str, str | None] = {}
        unknown: list[str] = []
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None or name in self._key:
                continue
            text = None if value is None else _text(column, value)
            if value is not None and text is None:
                unknown.append(name)
            else:
                texts[name] = text
        return texts, tuple(unknown)


def _passed(change: Change) -> Row:
    """The values of a row change as they were passed, with those of the key."""
    match change:
        case Insert(values=values):
            return values
        case Upsert(key=key, values=values, add=add):
            return {**key, **values, **add}
        case Update(key=key, values=values):
            return {**key, **values}
    return {}


def _text(column: Column, value: Any, *, digest: bool = True) -> str | None:
    """Canonical text of a value from the log; None where only a server could write it."""
    if column.kind is ValueKind.OTHER:
        return None
    text = sqlite_text(column.kind, _plain(column.kind, value), digest=digest)
    return None if isinstance(text, NotOfType) else text


def _plain(kind: ValueKind, value: Any) -> Any:
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case dict() | list():
            return json.dumps(value, default=str)
        case str() if kind is ValueKind.BYTES and value.startswith("\\x"):
            return bytes.fromhex(value[2:])
    return value
