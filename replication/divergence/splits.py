"""Cuts one read into several that together see every row once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from replication.divergence.buckets import HIGHEST, LOWEST, KeyRange
from replication.divergence.ports import Engine
from replication.divergence.rows import RowsRequest, Where
from replication.divergence.schema import TableSchema

PARTITION_ROWS = 250_000


def split(request: RowsRequest, parts: int) -> list[RowsRequest]:
    """Shares of a whole table: key ranges where an index reads them, else ranges of pages within the snapshot."""
    schema = request.schema
    if parts > 1 and schema.integer_key and schema.key_follows_storage:
        return [request.at(replace(request.where, ranges=(r,))) for r in key_ranges(schema, parts)]
    if parts > 1 and schema.engine is Engine.POSTGRES and schema.pages and request.handle.snapshot is not None:
        return [request.at(replace(request.where, blocks=blocks)) for blocks in page_ranges(schema.pages, parts)]
    return [request]


def key_ranges(schema: TableSchema, parts: int) -> list[KeyRange]:
    """Even cuts between the smallest and the largest key seen at planning; the outer ranges have no end."""
    low, high = schema.key_low or 0, schema.key_high or 0
    cuts = sorted({low + (high - low) * i // parts for i in range(1, parts)})
    bounds = [LOWEST, *cuts, HIGHEST + 1]
    return [KeyRange(first, end - 1) for first, end in pairwise(bounds) if first < end]


def page_ranges(pages: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of a table's pages; the last is open, for pages that came after the estimate."""
    step = max(1, -(-pages // parts))
    starts = range(0, pages, step)
    return [(first, first + step if first + step < pages else 2**32 - 2) for first in starts]


def share_ranges(request: RowsRequest, ranges: Sequence[KeyRange], parts: int) -> list[RowsRequest]:
    """These key ranges dealt out to at most `parts` readers, neighbours together."""
    step = max(1, -(-len(ranges) // parts))
    return [request.at(Where(ranges=tuple(ranges[i : i + step]))) for i in range(0, len(ranges), step)]
