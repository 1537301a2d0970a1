"""Bucket checksums computed inside a PostgreSQL server.

A row's checksum is the exclusive-or of its columns' hashes, each seeded with the row's key and the column's name; a
bucket's is the number of its rows and the exact sum of their checksums. Seeds keep swapped values, swapped rows and
equal changes from cancelling out, and an exact sum does not wrap.

The server's whole-record hash is not used. It is slower, it takes -1.5 for 1.5 (the hash of a numeric ignores the sign,
inside jsonb too), 0 for 4294967297 (a bigint is folded to 32 bits), `1 mon` for `30 days`, and the same enum label on
two servers for two values. Each column is hashed here with a function that tells all values apart that differ, or by
its text. Whatever `canonical.py` writes differently must be hashed differently; the reverse may cost a second look,
never a difference.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from replication.tables.buckets import Buckets, KeyRange, RangeBuckets
from replication.tables.schema import Column, CommonTable, TableSchema, ValueKind, quoted


@dataclass(frozen=True, slots=True)
class Checksum:
    """Equal for two buckets that hold the same rows."""

    rows: int
    total: str


def seed_of(column: str) -> int:
    """A constant of the column's name that fits a signed 64-bit integer."""
    return int.from_bytes(hashlib.blake2b(column.encode(), digest_size=8).digest(), "big", signed=True)


_KEY = "tops_key"  # as no column of a user's is called
# The hash of a double tells microseconds apart between these years; beyond, and for infinity, the text is hashed.
_EPOCH_EXACT = ("'1700-01-01'", "'2240-01-01'")


def column_hash(column: Column, seed: str) -> str:
    """An SQL expression for a column's 64-bit hash under a seed; NULL for NULL."""
    name = quoted(column.name)
    match column.kind:
        case ValueKind.BOOLEAN:
            return f"hashint4extended({name}::int4, {seed})"
        case ValueKind.INTEGER if column.declared in ("smallint", "integer"):
            return f"hashint4extended({name}::int4, {seed})"
        case ValueKind.INTEGER:
            # The server folds the two halves of a bigint into one word; hashing the upper half too tells them apart.
            return f"hashint8extended({name}::int8, hashint8extended({name}::int8 >> 32, {seed}))"
        case ValueKind.NUMERIC:
            return f'hashtextextended(trim_scale({name}::numeric)::text COLLATE "C", {seed})'
        case ValueKind.FLOAT4 | ValueKind.FLOAT8:
            return f"hashfloat8extended({name}::float8, {seed})"
        case ValueKind.TEXT | ValueKind.CHAR:
            return f'hashtextextended({name}::text COLLATE "C", {seed})'
        case ValueKind.UUID:
            return f"uuid_hash_extended({name}, {seed})"
        case ValueKind.BYTES:
            return f"hashtextextended(encode(sha256({name}), 'hex') COLLATE \"C\", {seed})"
        case ValueKind.TIMESTAMP | ValueKind.TIMESTAMPTZ:
            first, last = _EPOCH_EXACT
            return (
                f"CASE WHEN {name} BETWEEN {first} AND {last} "
                f"THEN hashfloat8extended(date_part('epoch', {name}), {seed}) "
                f'ELSE hashtextextended({name}::text COLLATE "C", {seed}) END'
            )
        case _:
            return f'hashtextextended({name}::text COLLATE "C", {seed})'


def key_expression(table: CommonTable, schema: TableSchema) -> str:
    """A 64-bit number per key: an integer key itself, otherwise its hash."""
    if table.integer_key:
        return f"{quoted(table.key[0])}::int8"
    expression = "0"
    for name in table.key:
        expression = column_hash(schema.column(name), expression)
    return expression


def bucket_expression(buckets: Buckets, key: str = _KEY) -> str:
    if isinstance(buckets, RangeBuckets):
        return f"({key} >> {buckets.shift})"
    return f"(({key} >> 20) & {buckets.count - 1})"


def checksum_query(
    table: CommonTable, schema: TableSchema, buckets: Buckets, ranges: Sequence[KeyRange] = (KeyRange(),)
) -> str:
    """SQL for (bucket, rows, total) of a table, or of these key ranges of it."""
    key_number = key_expression(table, schema)
    hashes = [f"hashint8extended({_KEY} >> 32, {_KEY} # {_number(seed_of('key'))})"]
    for column in table.columns:
        if column.name not in table.key:
            seed = _number(seed_of("column " + column.name))
            expression = column_hash(column, f"{_KEY} # {seed}")
            hashes.append(f"coalesce({expression}, {seed})" if column.nullable else expression)
    inner = ", ".join([f"{key_number} AS {_KEY}", *(quoted(c.name) for c in table.columns if c.name not in table.key)])
    total = " # ".join(f"({expression})" for expression in hashes)
    # OFFSET 0 keeps the hash of a compound key from being computed once per column; an integer key is free.
    fence = "" if table.integer_key else " OFFSET 0"
    where = range_condition(table, ranges)
    return (
        f"SELECT {bucket_expression(buckets)} AS bucket, count(*) AS rows, sum({total}) AS total "
        f"FROM (SELECT {inner} FROM {schema.qualified}{where}{fence}) AS rows_of_table GROUP BY 1"
    )


def range_condition(table: CommonTable, ranges: Sequence[KeyRange]) -> str:
    if tuple(ranges) == (KeyRange(),):
        return ""
    name = quoted(table.key[0])
    alternatives = " OR ".join(f"{name} BETWEEN {_number(r.low)} AND {_number(r.high)}" for r in ranges)
    return f" WHERE ({alternatives})"


def _number(value: int) -> str:
    """A 64-bit constant; the lowest one has no literal of its own in SQL."""
    return f"({value})::int8" if value > -(2**63) else "((-9223372036854775807)::int8 - 1)"


def from_records(records: Iterable[Any]) -> dict[int, Checksum]:
    return {r["bucket"]: Checksum(r["rows"], format(Decimal(r["total"]), "f")) for r in records}


def differing(by_replica: Mapping[str, Mapping[int, Checksum]]) -> dict[int, int]:
    """Buckets whose checksums are not the same on all replicas, with the largest number of rows any of them has there.

    A bucket that only some replicas have differs: the union of all bucket numbers is looked at.
    """
    every = set().union(*by_replica.values())
    found = {}
    for bucket in every:
        sums = [checksums.get(bucket) for checksums in by_replica.values()]
        if any(s != sums[0] for s in sums):
            found[bucket] = max(s.rows for s in sums if s is not None)
    return found
