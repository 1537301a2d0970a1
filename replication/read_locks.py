"""What a read of a serializable transaction depends on: rows by primary key, or whole tables.

A place is a table and a key. Two spellings of one row must give one key, or a conflict is missed; so only keys that
have one spelling here lock a row, and every other read or write counts for the whole table.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from replication.conflicts.tables import Shapes, TableShape
from tops.changes import Change, Insert, InvalidChange, Row, Statement, is_captured
from tops.ports import Resource

TABLE = ""  # as a key: any row of the table
BY_STATEMENT = "*"  # as a key: rows that nobody listed
Place = tuple[str, str]

_WORD = re.compile(r'"((?:[^"]|"")+)"|([A-Za-z_]\w*)')
_BY_KEY = re.compile(
    r"\s*select\s[^()]+?\sfrom\s+(?P<table>[\w.\"]+)\s+where\s+(?P<where>.+?)\s*;?\s*", re.IGNORECASE | re.DOTALL
)
_EQUALS = re.compile(r'\s*"?(?P<column>\w+)"?\s*=\s*\$(?P<number>\d+)\s*')
_INTEGERS = frozenset({"smallint", "integer", "bigint"})
_REACHING = """
select c.relname as name from pg_constraint f join pg_class c on c.oid = f.confrelid
 where f.contype = 'f' and (f.confdeltype in ('c', 'n', 'd') or f.confupdtype in ('c', 'n', 'd'))
union select c.relname from pg_trigger t join pg_class c on c.oid = t.tgrelid join pg_proc f on f.oid = t.tgfoid
 where not t.tgisinternal and f.pronamespace is distinct from to_regnamespace('tops')
"""
_OPAQUE = """
select viewname as name from pg_views where schemaname not in ('pg_catalog', 'information_schema')
union select matviewname from pg_matviews
union select p.proname from pg_proc p join pg_namespace n on n.oid = p.pronamespace
 where n.nspname not in ('pg_catalog', 'information_schema', 'tops')
"""


class Lock(msgspec.Struct, frozen=True, array_like=True):
    """Something that was read at a position of the log: a row, or (with an empty key) a whole table."""

    table: str
    key: str
    position: int

    @property
    def places(self) -> tuple[Place, ...]:
        """Where a later write would break it."""
        keys = (TABLE,) if self.key == TABLE else (self.key, BY_STATEMENT)
        return tuple((self.table, key) for key in keys)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Lock])


def encode_locks(locks: Sequence[Lock]) -> bytes:
    return _encoder.encode(locks)


def decode_locks(data: bytes) -> list[Lock]:
    return _decoder.decode(data)


class _Written(NamedTuple):
    """A table that is written: the name that the set's list has for it, and what its changes touch."""

    listed: str
    shape: TableShape | None
    reaches_others: bool


class Places:
    """The places that queries read and changes write, in the tables of one replica set."""

    def __init__(self, resource: Resource, tables: Sequence[str]) -> None:
        self._resource, self._tables, self._shapes = resource, list(tables), Shapes(resource)
        self._opaque: frozenset[str] | None = None  # views and functions, which may read any table
        self._reaching: frozenset[str] | None = None  # tables whose changes change others: cascades, triggers

    async def read_by(self, sql: str, args: Sequence[Any]) -> list[Place]:
        """A read by primary key locks the row; any other locks the tables that it names, or all if it may hide some."""
        by_key = _BY_KEY.fullmatch(sql)
        if by_key is not None and (table := self._listed(by_key["table"])) in self._tables:
            shape = await self._shapes.of(table)
            key = _key_in(by_key["where"], shape, args)
            if key is not None:
                return [(table, key)]
        words = _words(sql)
        named = self._named_by(words)
        if not named or await self._hides_tables(words):
            named = self._tables
        return [(table, TABLE) for table in named]

    async def written_by(self, changes: Sequence[Change]) -> frozenset[Place]:
        """Rows and their tables; for what does not tell all its rows, the tables as a whole."""
        places: set[Place] = set()
        tables: dict[str, _Written] = {}
        for change in changes:
            if isinstance(change, Statement):
                words = _words(change.sql)
                hidden = await self._reaches_others(words) or await self._hides_tables(words)
                places |= _whole(self._tables if hidden else self._named_by(words) or self._tables)
            elif not change.table.startswith("tops."):
                known = tables.get(change.table)
                if known is None:
                    known = tables[change.table] = await self._written(change.table)
                    places.add((known.listed, TABLE))
                if known.reaches_others and not is_captured(change):  # else all that it reached is in the write set
                    places |= _whole(self._tables)
                row = change.values if isinstance(change, Insert) else change.key
                key = spelled(known.shape, row) if known.shape is not None else None
                places.add((known.listed, BY_STATEMENT if key is None else key))
        return frozenset(places)

    async def _written(self, table: str) -> _Written:
        listed, shape = self._listed(table), None
        with suppress(InvalidChange):  # the database is going to refuse the change
            shape = await self._shapes.of(table)
        return _Written(listed, shape, await self._reaches_others({listed.split(".")[-1]}))

    def _listed(self, name: str) -> str:
        """The table under the name that the set's list has for it."""
        plain = name.replace('"', "")
        if plain in self._tables:
            return plain
        same = [table for table in self._tables if table.split(".")[-1] == plain.split(".")[-1]]
        return same[0] if len(same) == 1 else plain

    def _named_by(self, words: set[str]) -> list[str]:
        return [table for table in self._tables if table.split(".")[-1].strip('"') in words]

    async def _hides_tables(self, words: set[str]) -> bool:
        """Whether a view or a function of the user's is used, which may read any table."""
        if self._opaque is None:
            self._opaque = await self._names(_OPAQUE)
        return not self._opaque.isdisjoint(words)

    async def _reaches_others(self, words: set[str]) -> bool:
        """Whether a change of one of these tables may change rows of others."""
        if self._reaching is None:
            self._reaching = await self._names(_REACHING)
        return not self._reaching.isdisjoint(words)

    async def _names(self, sql: str) -> frozenset[str]:
        return frozenset(row["name"] for row in (await self._resource.read_own(sql)).rows)


def _whole(tables: Sequence[str]) -> set[Place]:
    return {(table, key) for table in tables for key in (TABLE, BY_STATEMENT)}


def _words(sql: str) -> set[str]:
    return {quoted or plain.lower() for quoted, plain in _WORD.findall(sql)}


def _key_in(where: str, shape: TableShape, args: Sequence[Any]) -> str | None:
    """The primary key that a condition such as `a = $1 and b = $2` fixes; None if it is any other condition."""
    key: Row = {}
    for part in re.split(r"\s+and\s+", where, flags=re.IGNORECASE):
        equals = _EQUALS.fullmatch(part)
        if equals is None or not 0 < int(equals["number"]) <= len(args):
            return None
        key[equals["column"]] = args[int(equals["number"]) - 1]
    return spelled(shape, key) if key.keys() == set(shape.key) else None


def spelled(shape: TableShape, row: Row) -> str | None:
    """A row's key in its one spelling; None where only the database could tell which spellings are the same."""
    if len(shape.key) == 1 and type(value := row.get(shape.key[0])) is int:
        return f"[{value}]" if shape.types[shape.key[0]] in _INTEGERS else None
    values: list[Any] = []
    for column in shape.key:
        value, sql_type = row.get(column), shape.types[column].partition("(")[0]
        try:
            if sql_type in _INTEGERS and isinstance(value, int | str):
                values.append(int(value))
            elif sql_type in ("text", "character varying") and isinstance(value, str):
                values.append(value)
            elif sql_type == "uuid" and isinstance(value, UUID | str):
                values.append(str(UUID(str(value))))
            else:
                return None
        except ValueError:
            return None
    return msgspec.json.encode(values).decode()
