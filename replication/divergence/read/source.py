"""The Spark data source `replica`: a table of one replica as a DataFrame.

    spark.dataSource.register(ReplicaSource)
    spark.read.format("replica").option("set", "shop").option("replica", "r1").option("table", "accounts").load()

Options: `dsn`, or `set` and `replica` with `config` (default tops.toml); `table`; `columns` (comma-separated; a schema
given to the reader does the same); `partitions`; `snapshot` (an exported snapshot to read in); `form`: `native` types,
or `canonical` text. Filters on numbers, and equality on anything, run in the database. The check itself passes `plan`:
the exact reads of all replicas, made by `encode_plan`.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import LongType, StringType, StructField, StructType

from replication.divergence.read import typed_rows
from replication.divergence.read.rows import BUCKET, RowsRequest, Where, arrow_schema, read
from replication.divergence.read.splits import split
from replication.divergence.read.task_errors import task_failed
from replication.tables.buckets import RangeBuckets
from replication.tables.catalog import describe
from replication.tables.endpoints import ReplicaEndpoint, SnapshotHandle
from replication.tables.schema import Column, TableSchema, quoted
from tops.model.errors import ConfigError, TopsError

REPLICA = "tops_replica"
_COMPARISONS = {EqualTo: "=", GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<="}


def encode_plan(requests: Sequence[RowsRequest]) -> str:
    return msgspec.json.encode(requests).decode()


class Share(InputPartition):
    """One partition: one reader's share of one table on one replica."""

    def __init__(self, request: RowsRequest) -> None:
        super().__init__(request)
        self.request = request


class ReplicaSource(DataSource):
    """`spark.read.format("replica")`."""

    @classmethod
    def name(cls) -> str:
        return "replica"

    def schema(self) -> StructType:
        if plan := self.options.get("plan"):
            columns = msgspec.json.decode(plan, type=list[RowsRequest])[0].columns
            return canonical_type(columns)
        table = _TableRead(self.options)
        return canonical_type(table.columns) if table.canonical else typed_rows.spark_type(table.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        if plan := self.options.get("plan"):
            return PlanReader(msgspec.json.decode(plan, type=list[RowsRequest]))
        return TableReader(_TableRead(self.options, schema.fieldNames()))


def canonical_type(columns: Iterable[Column]) -> StructType:
    own = [StructField(REPLICA, StringType()), StructField(BUCKET, LongType())]
    return StructType([*own, *(StructField(column.name, StringType()) for column in columns)])


class PlanReader(DataSourceReader):
    """Reads what the check decided to read; rows of several replicas in one frame."""

    def __init__(self, requests: Sequence[RowsRequest]) -> None:
        self._requests = requests

    def partitions(self) -> Sequence[InputPartition]:
        return [Share(request) for request in self._requests]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Share)
        try:
            yield from canonical_batches(partition.request)
        except TopsError as error:
            raise task_failed(error) from None


def canonical_batches(request: RowsRequest) -> Iterator[pa.RecordBatch]:
    for batch in read(request):
        name = pa.array([request.handle.replica] * batch.num_rows, pa.string())
        yield pa.record_batch([name, *batch.columns], canonical_schema(request.columns))


def canonical_schema(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([(REPLICA, pa.string()), *arrow_schema(columns)])


class _TableRead:
    """A user's read of one table, from the options."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str] = ()) -> None:
        endpoint = _endpoint(options)
        table = options.get("table")
        if not table:
            raise ConfigError('data source "replica": set the option "table"')
        self.schema: TableSchema = asyncio.run(describe(endpoint, table))
        self.canonical = options.get("form", "native") == "canonical"
        self.partitions = int(options.get("partitions", "2"))
        wanted = [n.strip() for n in options.get("columns", "").split(",") if n.strip()] or list(names)
        self.columns = self._columns([name for name in wanted if name not in (REPLICA, BUCKET)])
        self.handle = SnapshotHandle(endpoint.name, endpoint.dsn, options.get("snapshot"), None, datetime.now(UTC))

    def _columns(self, wanted: Sequence[str]) -> tuple[Column, ...]:
        known = {column.name: column for column in self.schema.columns}
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise ConfigError(f"table {self.schema.name} has no column {', '.join(unknown)}; it has {', '.join(known)}")
        return tuple(known[name] for name in wanted) if wanted else self.schema.columns

    def requests(self) -> list[RowsRequest]:
        key = self.schema.key if self.schema.key else (self.schema.columns[0].name,)
        whole = RowsRequest(self.handle, self.schema, self.columns, key, RangeBuckets(0), native_buckets=True)
        return split(whole, self.partitions)


def _endpoint(options: Mapping[str, str]) -> ReplicaEndpoint:
    if dsn := options.get("dsn"):
        return ReplicaEndpoint(options.get("replica", "replica"), dsn)
    if (set_name := options.get("set")) and (replica := options.get("replica")):
        from replication.divergence.read.sets import endpoint_of  # the cluster's file is read by nobody else here

        return endpoint_of(options.get("config", "tops.toml"), set_name, replica)
    raise ConfigError('data source "replica": set the option "dsn", or both "set" and "replica"')


class TableReader(DataSourceReader):
    """Reads one table of one replica for a user's own query."""

    def __init__(self, table: _TableRead) -> None:
        self._table = table
        self._pushed: list[str] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Takes what every database decides alike: equality, and order among numbers (text order is a collation's)."""
        for condition in filters:
            sql = self._as_sql(condition)
            if sql is None:
                yield condition
            else:
                self._pushed.append(sql)

    def _as_sql(self, condition: Filter) -> str | None:
        match condition:
            case In(attribute=(name,), value=values) if all(isinstance(v, int) for v in values):
                return f"{quoted(name)} IN ({', '.join(map(str, values))})"
            case IsNotNull(attribute=(name,)):
                return f"{quoted(name)} IS NOT NULL"
            case IsNull(attribute=(name,)):
                return f"{quoted(name)} IS NULL"
            case EqualTo(attribute=(name,), value=str() as text):
                return f"{quoted(name)} = {typed_rows.text_constant(self._table.schema.column(name), text)}"
            case EqualTo() | GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual():
                if len(condition.attribute) == 1 and type(condition.value) is int:
                    return f"{quoted(condition.attribute[0])} {_COMPARISONS[type(condition)]} {condition.value}"
        return None

    def partitions(self) -> Sequence[InputPartition]:
        return [Share(request) for request in self._table.requests()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Share)
        request = partition.request
        request = replace(request, where=replace(request.where, conditions=tuple(self._pushed)))
        if self._table.canonical:
            yield from canonical_batches(request)
        else:
            yield from typed_rows.read(request)


__all__ = ["BUCKET", "REPLICA", "ReplicaSource", "Where", "encode_plan"]
