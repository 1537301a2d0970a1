"""Rows of one replica in the types of Spark, for a user's own queries; the check itself compares canonical text."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from replication.divergence.read.rows import BATCH_ROWS, RowsRequest, conditions_of, session
from replication.tables.catalog import LostConnection
from replication.tables.endpoints import Engine
from replication.tables.schema import Column, ValueKind, literal, quoted

_TYPES: dict[ValueKind, tuple[DataType, pa.DataType]] = {
    ValueKind.BOOLEAN: (BooleanType(), pa.bool_()),
    ValueKind.INTEGER: (LongType(), pa.int64()),
    ValueKind.FLOAT4: (FloatType(), pa.float32()),
    ValueKind.FLOAT8: (DoubleType(), pa.float64()),
    ValueKind.BYTES: (BinaryType(), pa.binary()),
    ValueKind.DATE: (DateType(), pa.date32()),
    ValueKind.TIMESTAMP: (TimestampNTZType(), pa.timestamp("us")),
    ValueKind.TIMESTAMPTZ: (TimestampType(), pa.timestamp("us", "UTC")),
}
_TEXT: tuple[DataType, pa.DataType] = (StringType(), pa.string())
"""Numerics of any size, JSON, UUIDs and the rest are strings: no type of Spark holds them all without loss."""

# What Spark's calendar can hold; infinity becomes the end of it.
_FIRST, _LAST = "'0001-01-01'", "'9999-12-31'"


def spark_type(columns: Iterable[Column]) -> StructType:
    return StructType([StructField(c.name, _TYPES.get(c.kind, _TEXT)[0]) for c in columns])


def text_constant(column: Column, text: str) -> str:
    """A constant to compare a column with; the database reads it as a value of the column's type."""
    return literal(text) if column.kind is not ValueKind.BYTES else f"decode({literal(text)}, 'hex')"


def read(request: RowsRequest) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([(c.name, _TYPES.get(c.kind, _TEXT)[1]) for c in request.columns])
    if request.schema.engine is Engine.SQLITE:
        yield from _read_sqlite(request, schema)
        return
    source, filtered = conditions_of(request)
    names = ", ".join(f"{_typed(column)} AS {quoted(column.name)}" for column in request.columns)
    with session(request.handle) as cursor:
        cursor.execute(f"SELECT {names} FROM {source}{filtered}")
        for batch in cursor.fetch_record_batch():
            arrays = [array.cast(field.type) for array, field in zip(batch.columns, schema, strict=True)]
            yield pa.record_batch(arrays, schema)


def _typed(column: Column) -> str:
    name = quoted(column.name)
    match column.kind:
        case ValueKind.INTEGER:
            return f"{name}::int8"
        case ValueKind.DATE | ValueKind.TIMESTAMP | ValueKind.TIMESTAMPTZ:
            return f"least(greatest({name}, {_FIRST}), {_LAST})"
        case kind if kind in _TYPES:
            return name
        case _:
            return f"{name}::text"


def _read_sqlite(request: RowsRequest, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    path = request.handle.dsn.removeprefix("sqlite:///")
    names = ", ".join(quoted(column.name) for column in request.columns)
    source, filtered = conditions_of(request)
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            cursor = connection.execute(f"SELECT {names} FROM {source}{filtered}")
            while rows := cursor.fetchmany(BATCH_ROWS):
                yield pa.record_batch(
                    [
                        _typed_array(values, field)
                        for values, field in zip(zip(*rows, strict=True), schema, strict=True)
                    ],
                    schema,
                )
    except sqlite3.OperationalError as error:
        raise LostConnection(request.handle.replica, error) from error


def _typed_array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    if pa.types.is_boolean(field.type):
        return pa.array([None if v is None else bool(v) for v in values], field.type)
    if pa.types.is_temporal(field.type) or pa.types.is_string(field.type):
        return pa.array([None if v is None else str(v) for v in values], pa.string()).cast(field.type)
    return pa.array(values, field.type)
