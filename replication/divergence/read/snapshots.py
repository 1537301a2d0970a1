"""The barrier that plain databases can have: one snapshot per replica, each held open by one connection.

All partitions of a replica read the same snapshot; the snapshots of two replicas are taken within milliseconds, not at
one log number. On quiet databases that is the same thing; on live ones the check looks at suspicious rows again. A
running replica set has a barrier that travels in its log: `set_barrier.py`.
"""

import asyncio
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from datetime import UTC, datetime
from pathlib import Path

import asyncpg

from replication.tables.catalog import CONNECT_TIMEOUT_S, LostConnection, postgres, sqlite
from replication.tables.endpoints import Engine, ReplicaEndpoint, SnapshotHandle


class HeldSnapshots:
    """Snapshots that stay readable for as long as a connection of ours holds them."""

    def __init__(self) -> None:
        self._held = AsyncExitStack()
        self._holders: dict[str, asyncpg.Connection] = {}
        self.absent: dict[str, str] = {}

    async def alive(self) -> None:
        for replica, holder in self._holders.items():
            try:
                await holder.fetchval("SELECT 1", timeout=CONNECT_TIMEOUT_S)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                raise LostConnection(replica, error) from error

    async def release(self) -> None:
        self._holders.clear()
        held, self._held = self._held, AsyncExitStack()
        await held.aclose()


class SnapshotBarrier(HeldSnapshots):
    """`pg_export_snapshot` held by a connection per PostgreSQL replica; a consistent copy of each SQLite file."""

    async def open(self, endpoints: Sequence[ReplicaEndpoint]) -> Mapping[str, SnapshotHandle]:
        """Snapshots of all replicas that answer; the others are absent."""
        outcomes = await asyncio.gather(*(self._connect(endpoint) for endpoint in endpoints))
        # Connecting takes its time; the snapshots themselves are taken together.
        taken = await asyncio.gather(*(self._take(e) for e, up in zip(endpoints, outcomes, strict=True) if up))
        return {handle.replica: handle for handle in taken}

    async def _connect(self, endpoint: ReplicaEndpoint) -> bool:
        try:
            if endpoint.engine is Engine.SQLITE:
                with sqlite(endpoint.name, endpoint.path):
                    return True
            self._holders[endpoint.name] = await self._held.enter_async_context(postgres(endpoint.name, endpoint.dsn))
        except LostConnection as error:
            self.absent[endpoint.name] = str(error)
            return False
        return True

    async def _take(self, endpoint: ReplicaEndpoint) -> SnapshotHandle:
        if endpoint.engine is Engine.SQLITE:
            copy = await asyncio.to_thread(self._copy, endpoint)
            return SnapshotHandle(endpoint.name, f"sqlite:///{copy}", None, None, datetime.now(UTC))
        holder = self._holders[endpoint.name]
        await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        snapshot = await holder.fetchval("SELECT pg_export_snapshot()")
        return SnapshotHandle(endpoint.name, endpoint.dsn, snapshot, None, datetime.now(UTC))

    def _copy(self, endpoint: ReplicaEndpoint) -> Path:
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="tops-snapshot-"))
        copy = Path(folder) / "snapshot.db"
        with sqlite(endpoint.name, endpoint.path) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)  # all pages in one step: writers wait for milliseconds, readers not at all
        return copy
