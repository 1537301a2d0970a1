"""One check of one replica set, from the first connection to the written result.

Owns the order of things: who is reachable, which tables, one barrier, table after table, the result. How one table is
compared is `table_check.py`'s business.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from replication.divergence.check.merge import merged
from replication.divergence.check.options import CheckOptions, Method
from replication.divergence.check.second_look import Progress, Surroundings
from replication.divergence.check.table_check import TableCheck
from replication.divergence.read import jvm, session
from replication.divergence.read.background import MemoryWatch, in_thread, while_alive
from replication.divergence.read.snapshots import SnapshotBarrier
from replication.divergence.results.folder import RunFolder, RunState, Unit
from replication.divergence.results.history import history_table
from replication.divergence.results.model import CheckResult, Limit, LimitKind, ReplicaState
from replication.tables import catalog
from replication.tables.buckets import KeyRange
from replication.tables.catalog import LostConnection, Server
from replication.tables.cuts import key_ranges
from replication.tables.endpoints import Barrier, Engine, ReplicaEndpoint, SnapshotHandle, TransactionLog
from replication.tables.errors import CheckRejected
from replication.tables.schema import CommonTable, common_table
from tops.model.errors import ConfigError, InvariantBroken, NotReachable

if TYPE_CHECKING:
    from replication.divergence.explain.leads import SetKnowledge


class Quiet:
    """Progress for nobody."""

    def step(self, table: str, phase: str, done: int, total: int) -> None:
        pass


class Check:
    """Finds what differs between the replicas of a set; `run` once, or `resume` a run that was stopped."""

    def __init__(
        self,
        endpoints: Sequence[ReplicaEndpoint],
        options: CheckOptions,
        out: Path,
        *,
        set_name: str = "databases",
        policy: str = "",
        log: TransactionLog | None = None,
        knowledge: "SetKnowledge | None" = None,
        new_barrier: Callable[[], Barrier] = SnapshotBarrier,
        progress: Progress | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        names = [endpoint.name for endpoint in endpoints]
        if len(endpoints) < 2:
            raise ConfigError("a check compares at least two replicas; name them with --dsn name=… each")
        if len(set(names)) < len(names):
            raise ConfigError(f"two replicas have the same name: {', '.join(sorted(names))}")
        if options.primary and options.primary not in names:
            raise ConfigError(f"the primary {options.primary!r} is none of the replicas {', '.join(names)}")
        self._endpoints, self._options, self._out = list(endpoints), options, out
        self._set_name, self._policy, self._log, self._knowledge = set_name, policy, log, knowledge
        self._new_barrier = new_barrier
        self._progress = progress or Quiet()
        self._given_spark = spark
        self._limits: list[Limit] = []
        self._lost: set[str] = set()
        self._seconds: dict[str, float] = {}

    async def run(self) -> CheckResult:
        now = datetime.now(UTC)
        run = f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        names = [endpoint.name for endpoint in self._endpoints]
        return await self._go(RunFolder(self._out, run), RunState(run, self._set_name, names, now.isoformat()))

    async def resume(self, run: str) -> CheckResult:
        """Go on where a run was stopped: tables and key ranges that were done are not read again."""
        folder = RunFolder(self._out, run)
        state = folder.load_state()
        names = [endpoint.name for endpoint in self._endpoints]
        if state.replicas != names or state.set_name != self._set_name:
            raise ConfigError(
                f"run {run} compared {', '.join(state.replicas)} of {state.set_name}, not {', '.join(names)} of "
                f"{self._set_name}; resume it with the same replicas"
            )
        state.resumed += 1
        return await self._go(folder, state)

    async def _go(self, folder: RunFolder, state: RunState) -> CheckResult:
        began = time.monotonic()
        jvm.require_java()
        servers = await self._servers()
        with MemoryWatch() as memory:
            spark = asyncio.ensure_future(self._spark())
            try:
                tables = await self._tables(servers)
                with folder.locked():
                    folder.save_state(state)
                    handles = await self._compare(folder, state, servers, tables, spark)
                    await spark
                    self._seconds["total"] = time.monotonic() - began
                    result = self._result(state, servers, handles, memory.peak_mb)
                    folder.finish(result, [folder.part(u.name) for u in state.units], history_table(result))
            finally:
                spark.cancel()
        return result

    async def _spark(self) -> SparkSession:
        """Starts beside the first checksums, which the databases compute without it."""
        began = time.monotonic()
        spark = self._given_spark
        if spark is None:
            spark = await in_thread(lambda: session.start(self._options.master))
        self._seconds["spark start"] = time.monotonic() - began
        return spark

    async def _servers(self) -> dict[str, Server]:
        outcomes = await asyncio.gather(*map(catalog.server_of, self._endpoints), return_exceptions=True)
        servers = {}
        for endpoint, outcome in zip(self._endpoints, outcomes, strict=True):
            if isinstance(outcome, Server):
                servers[endpoint.name] = outcome
            elif isinstance(outcome, NotReachable):
                self._unreachable(endpoint.name, str(outcome))
            else:
                raise outcome
        if len(servers) < 2:
            raise NotReachable(f"fewer than two replicas can be read: {'; '.join(x.reason for x in self._limits)}")
        return servers

    def _unreachable(self, replica: str, reason: str) -> None:
        self._limits.append(Limit(LimitKind.UNREACHABLE, replica, reason))

    async def _tables(self, servers: Mapping[str, Server]) -> list[CommonTable]:
        endpoints = [endpoint for endpoint in self._endpoints if endpoint.name in servers]
        labels = list(self._options.tables)
        if not labels:
            listed = await asyncio.gather(*map(catalog.tables_of, endpoints))
            labels = [table for table in listed[0] if all(table in tables for tables in listed)]
            for table in sorted(set().union(*listed) - set(labels)):
                lacking = [e.name for e, tables in zip(endpoints, listed, strict=True) if table not in tables]
                self._limits.append(
                    Limit(LimitKind.SKIPPED, table, f"table {table} is missing on {', '.join(lacking)}")
                )
        if not labels:
            raise CheckRejected("the replicas have no table in common; name the tables with --table")
        return [await self._common(table, endpoints) for table in labels]

    async def _common(self, table: str, endpoints: Sequence[ReplicaEndpoint]) -> CommonTable:
        schemas = await asyncio.gather(*(catalog.describe(endpoint, table) for endpoint in endpoints))
        by_name = {endpoint.name: schema for endpoint, schema in zip(endpoints, schemas, strict=True)}
        return common_table(table, by_name, self._options.common_columns)

    async def _compare(
        self,
        folder: RunFolder,
        state: RunState,
        servers: Mapping[str, Server],
        tables: Sequence[CommonTable],
        spark: "asyncio.Future[SparkSession]",
    ) -> Mapping[str, SnapshotHandle]:
        """Compare the replicas that answer; one that is lost on the way is left out of what is still to be compared."""
        while True:
            endpoints = [e for e in self._endpoints if e.name in servers and e.name not in self._lost]
            try:
                return await self._compare_these(endpoints, folder, state, servers, tables, spark)
            except LostConnection as error:
                self._lose(error.replica, str(error), len(endpoints) - 1)

    def _lose(self, replica: str, reason: str, left: int) -> None:
        self._lost.add(replica)
        self._unreachable(replica, reason)
        if left < 2:
            raise NotReachable(f"fewer than two replicas can be read: {'; '.join(x.reason for x in self._limits)}")

    async def _compare_these(
        self,
        endpoints: Sequence[ReplicaEndpoint],
        folder: RunFolder,
        state: RunState,
        servers: Mapping[str, Server],
        tables: Sequence[CommonTable],
        spark: "asyncio.Future[SparkSession]",
    ) -> Mapping[str, SnapshotHandle]:
        barrier = self._new_barrier()
        try:
            handles = await barrier.open(endpoints)
            for endpoint in endpoints:
                if endpoint.name not in handles:
                    self._lose(endpoint.name, barrier.absent.get(endpoint.name, "it gave no snapshot"), len(handles))
            if len({handle.position for handle in handles.values()}) > 1:
                raise InvariantBroken(f"the barrier gave different positions: {handles}")
            around = Surroundings(
                [endpoint for endpoint in endpoints if endpoint.name in handles],
                handles,
                self._new_barrier,
                spark,
                self._log,
                self._knowledge,
                self._progress,
                self._options.primary,
                self._options.cap,
                self._options.settle_s,
                self._options.looks_max,
            )
            await while_alive(barrier, self._units(folder, state, around, servers, tables))
        finally:
            await barrier.release()
        return handles

    async def _units(
        self,
        folder: RunFolder,
        state: RunState,
        around: Surroundings,
        servers: Mapping[str, Server],
        tables: Sequence[CommonTable],
    ) -> None:
        # What was compared without a replica that is here now is compared again.
        state.units = [unit for unit in state.units if around.handles.keys() <= unit.result.rows.keys()]
        done = {unit.name for unit in state.units}
        for table in tables:
            native = self._hash_alike(table, servers)
            # A table that has grown would be cut elsewhere, and rows between two cuts never compared.
            shards = state.shards.setdefault(table.label, self._shards(table))
            for number, key_range in enumerate(shards):
                name = f"{table.label} {number + 1} of {len(shards)}"
                if name in done:
                    continue
                check = TableCheck(around, table, key_range, native=native, part=folder.part(name))
                result, limits = await check.run()
                state.units.append(Unit(name, result, limits))
                folder.save_state(state)

    def _hash_alike(self, table: CommonTable, servers: Mapping[str, Server]) -> bool:
        """Servers of one kind, major version and encoding compute the same hashes of columns of the same type."""
        alike = (
            all(s.engine is Engine.POSTGRES and s.major >= 14 for s in servers.values())
            and len({(s.major, s.encoding) for s in servers.values()}) == 1
            and all(len({s.column(c.name).declared for s in table.schemas.values()}) == 1 for c in table.columns)
        )
        if self._options.method is Method.NATIVE and not alike:
            raise CheckRejected(
                f"table {table.label}: the replicas do not hash alike (kind, major version, encoding and column types "
                "must be the same); leave --method at auto"
            )
        return alike and self._options.method is not Method.CANONICAL

    def _shards(self, table: CommonTable) -> list[KeyRange]:
        shards = -(-table.rows_estimate // self._options.shard_rows)
        if shards < 2 or not table.integer_key or not all(s.key_follows_storage for s in table.schemas.values()):
            return [KeyRange()]
        widest = max(table.schemas.values(), key=lambda s: (s.key_high or 0) - (s.key_low or 0))
        return key_ranges(widest, shards)

    def _result(
        self, state: RunState, servers: Mapping[str, Server], handles: Mapping[str, SnapshotHandle], peak_mb: float
    ) -> CheckResult:
        return CheckResult(
            id=state.run,
            set_name=self._set_name,
            policy=self._policy,
            started_at=datetime.fromisoformat(state.started_at),
            finished_at=datetime.now(UTC),
            replicas=[self._replica(e, servers.get(e.name), handles.get(e.name)) for e in self._endpoints],
            tables=merged([unit.result for unit in state.units]),
            limits=self._limits + [limit for unit in state.units for limit in unit.limits],
            resumed=state.resumed,
            seconds=self._seconds,
            peak_memory_mb=round(peak_mb, 1),
        )

    def _replica(self, endpoint: ReplicaEndpoint, server: Server | None, handle: SnapshotHandle | None) -> ReplicaState:
        return ReplicaState(
            name=endpoint.name,
            engine=endpoint.engine.value,
            version=server.version if server else "",
            reachable=server is not None and endpoint.name not in self._lost,
            position=handle.position if handle else None,
            lag_entries=handle.lag_entries if handle else None,
            snapshot_at=handle.taken_at if handle else None,
        )
