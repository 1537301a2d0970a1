"""Cuts one read into several that together see every row once."""

from collections.abc import Sequence
from dataclasses import replace

from replication.divergence.read.rows import RowsRequest, Where
from replication.tables.buckets import KeyRange
from replication.tables.cuts import key_ranges, page_ranges
from replication.tables.endpoints import Engine

PARTITION_ROWS = 250_000


def split(request: RowsRequest, parts: int) -> list[RowsRequest]:
    """Shares of a whole table: key ranges where an index reads them, else ranges of pages within the snapshot."""
    schema = request.schema
    if parts > 1 and schema.integer_key and schema.key_follows_storage:
        return [request.at(replace(request.where, ranges=(r,))) for r in key_ranges(schema, parts)]
    if parts > 1 and schema.engine is Engine.POSTGRES and schema.pages and request.handle.snapshot is not None:
        return [request.at(replace(request.where, blocks=blocks)) for blocks in page_ranges(schema.pages, parts)]
    return [request]


def share_ranges(request: RowsRequest, ranges: Sequence[KeyRange], parts: int) -> list[RowsRequest]:
    """These key ranges dealt out to at most `parts` readers, neighbours together."""
    step = max(1, -(-len(ranges) // parts))
    return [request.at(Where(ranges=tuple(ranges[i : i + step]))) for i in range(0, len(ranges), step)]
