"""Ranges of keys or pages that together cover a table, each row once."""

from itertools import pairwise

from replication.tables.buckets import HIGHEST, LOWEST, KeyRange
from replication.tables.schema import TableSchema


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
