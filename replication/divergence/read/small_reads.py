"""Reads what is small in the driver itself, and hands it to Spark as one Arrow table.

A Python worker of Spark costs seconds to start, and a read through the data source starts four of them. Rows that fit
in a corner of the driver's memory are there sooner without.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from replication.divergence.read.background import in_thread
from replication.divergence.read.rows import RowsRequest
from replication.divergence.read.source import canonical_batches, canonical_schema

ROWS_MAX = 200_000
BYTES_MAX = 64 << 20


async def read_here(requests: Sequence[RowsRequest]) -> pa.Table | None:
    """The rows of all requests, each replica read on a thread of its own; None when they turn out to be too big."""
    by_replica: dict[str, list[RowsRequest]] = {}
    for request in requests:
        by_replica.setdefault(request.handle.replica, []).append(request)
    share = BYTES_MAX // len(by_replica)
    read = await asyncio.gather(*(in_thread(partial(_batches, mine, share)) for mine in by_replica.values()))
    batches: list[pa.RecordBatch] = []
    for found in read:
        if found is None:
            return None
        batches += found
    return pa.Table.from_batches(batches, canonical_schema(requests[0].columns))


def _batches(requests: Sequence[RowsRequest], bytes_max: int) -> list[pa.RecordBatch] | None:
    batches, size = [], 0
    for request in requests:
        for batch in canonical_batches(request):
            batches.append(batch)
            size += batch.nbytes
            if size > bytes_max:
                return None
    return batches
