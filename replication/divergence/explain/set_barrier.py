"""The barrier of a replica set: an entry in the set's log, at which every replica takes its snapshot.

The agents are told first; then the barrier is published, and ordered with all writes. A replica that has applied
exactly up to it exports a snapshot and goes on; the check imports that and holds it from then on. Whatever a replica
has not reached, or has applied beyond, is in no snapshot.

Where a replica commits before it publishes (peer-to-peer, and the primary of a primary-site set), there is no moment at
which all replicas hold the same: its snapshot is the log up to the barrier and, beyond that, its own transactions that
the others do not have yet. `leads.py` knows these.
"""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import asyncpg

from adapters.changes import Barrier
from replication.divergence.explain.set_link import SetLink
from replication.divergence.read.snapshots import HeldSnapshots
from replication.rpc import calls
from replication.rpc.calls import ReplicaFailed
from replication.tables.catalog import CONNECT_TIMEOUT_S, enter_snapshot, postgres
from replication.tables.endpoints import ReplicaEndpoint, SnapshotHandle
from tops.model.errors import NotReachable, OutcomeUnknown, TopsError, TransactionAborted

WAIT_S = 60.0
RESPONSE_S = 30.0  # an agent under load answers late
TRIES = 3


class SetBarrier(HeldSnapshots):
    """Snapshots of a set's replicas at one number of its log."""

    def __init__(self, link: SetLink, wait_s: float = WAIT_S) -> None:
        super().__init__()
        self._link, self._wait_s = link, wait_s

    async def open(self, endpoints: Sequence[ReplicaEndpoint]) -> Mapping[str, SnapshotHandle]:
        """Snapshots at the barrier; replicas that did not answer, or did not get there in time, are absent."""
        reason = ""
        for _ in range(TRIES):
            try:
                handles = await self._open(endpoints)
            except (TransactionAborted, OutcomeUnknown) as error:  # it was empty: trying again does no harm
                reason = str(error)
                continue
            if len({handle.position for handle in handles.values()}) <= 1:
                return handles
            reason = "the replicas did not stop at it"
            await self.release()
        raise NotReachable(f"no barrier could be set in the log of {self._link.config.name}: {reason}; try again")

    async def _open(self, endpoints: Sequence[ReplicaEndpoint]) -> dict[str, SnapshotHandle]:
        barrier = secrets.token_hex(8)
        self.absent.clear()
        responses = await asyncio.gather(
            *(self._asked(e.name, calls.PrepareBarrier(barrier=barrier)) for e in endpoints)
        )
        ready = [endpoint for endpoint, response in zip(endpoints, responses, strict=True) if response is not None]
        try:
            if not ready:
                return {}
            lags = await self._lags([endpoint.name for endpoint in ready])
            await self._link.publish(Barrier(barrier))
            taken = await asyncio.gather(*(self._snapshot(endpoint, barrier) for endpoint in ready))
        finally:
            await asyncio.gather(*(self._asked(e.name, calls.BarrierDone(barrier=barrier)) for e in ready))
        return {h.replica: replace(h, lag_entries=lags.get(h.replica)) for h in taken if h is not None}

    async def _lags(self, replicas: Sequence[str]) -> dict[str, int]:
        """How many entries each replica was behind, before anybody stopped for us."""
        head = (await self._link.log()).decided
        told = await asyncio.gather(*(self._asked(replica, calls.Where()) for replica in replicas))
        return {t.replica: max(0, head - t.position) for t in told if isinstance(t, calls.Located)}

    async def _snapshot(self, endpoint: ReplicaEndpoint, barrier: str) -> SnapshotHandle | None:
        request = calls.BarrierSnapshot(barrier=barrier, wait_s=self._wait_s)
        told = await self._asked(endpoint.name, request, self._wait_s + CONNECT_TIMEOUT_S)
        if not isinstance(told, calls.SnapshotReported):
            return None
        at = datetime.fromisoformat(told.at)
        if told.path:
            return await self._copied(endpoint.name, told, at)
        try:
            holder = await self._held.enter_async_context(postgres(endpoint.name, endpoint.dsn))
            await enter_snapshot(holder, SnapshotHandle(endpoint.name, endpoint.dsn, told.snapshot, told.position, at))
            # Exported again, it no longer depends on the agent.
            name = await holder.fetchval("SELECT pg_export_snapshot()")
        except (TopsError, asyncpg.PostgresError) as error:
            self.absent[endpoint.name] = str(error)
            return None
        self._holders[endpoint.name] = holder
        return SnapshotHandle(endpoint.name, endpoint.dsn, name, told.position, at)

    async def _asked(
        self, replica: str, request: calls.ReplicaRequest[calls.R], timeout_s: float | None = None
    ) -> calls.R | None:
        try:
            return await self._link.request(replica, request, timeout_s or min(self._wait_s, RESPONSE_S))
        except (NotReachable, ReplicaFailed) as error:
            self.absent.setdefault(replica, str(error))
            return None

    async def _copied(self, replica: str, told: calls.SnapshotReported, at: datetime) -> SnapshotHandle:
        """The agent's copy of an SQLite file lives as long as its promise; ours as long as the barrier."""
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="tops-snapshot-"))
        copy = await asyncio.to_thread(shutil.copy, told.path, folder)
        return SnapshotHandle(replica, f"sqlite:///{copy}", None, told.position, at)
