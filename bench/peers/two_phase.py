"""Two-phase commit as one writes it by hand: a client that drives three PostgreSQL servers through PREPARE and COMMIT.

There is no decision log: a coordinator that survives its own crash writes one more record to disk, so these figures
are an upper bound for such a coordinator.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import count

import asyncpg

from adapters import EmbeddedPostgres
from bench.peers.postgres import CUT_OFF, Connection, PostgresSystem, PreparedStatements, load_accounts
from bench.systems import Client, OperationAborted, OperationUnknown
from bench.workloads import Dataset, Operation, Read

NODES = ("node1", "node2", "node3")


class HandWrittenTwoPhaseCommit(PostgresSystem):
    name = "hand_2pc"
    description = "two-phase commit over 3 PostgreSQL by the client: BEGIN, UPDATE, PREPARE, then COMMIT PREPARED"
    promise = "on disk at all three; a crash of the client between the phases leaves the outcome to a person"

    def __init__(self, *, profile: bool = False) -> None:
        super().__init__()
        self._profile = profile
        self._names = count(1)
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._transactions = 0

    async def start(self) -> None:
        # Two clients that meet in different orders at two servers wait for each other, and no server can see it.
        settings = {**self.settings, "lock_timeout": "500ms"}
        servers = await EmbeddedPostgres.start_many(len(NODES), settings=settings)
        self.servers.update(zip(NODES, servers, strict=True))

    async def load(self, dataset: Dataset) -> None:
        await asyncio.gather(*(load_accounts(server.dsn, dataset) for server in self.servers.values()))

    async def client(self) -> Client:
        branches = [await Branch.connect(server.dsn) for server in self.servers.values()]
        return TwoPhaseClient(branches, self._names, self._record if self._profile else None)

    async def settle(self) -> None:
        """A client is answered when all three have committed."""

    def phases(self, operations: int) -> Mapping[str, float]:
        """By statement, averaged over the nodes; `slowest node` is the wait for the last one of each phase."""
        means = {name: seconds / self._transactions for name, seconds in self._phases.items()}
        self._phases.clear()
        self._transactions = 0
        return means

    def _record(self, branches: "list[Branch]", elapsed_s: float) -> None:
        busy_s = 0.0
        for branch in branches:
            for name, seconds in branch.spent.items():
                self._phases[name] += seconds / len(branches)
                busy_s += seconds / len(branches)
        self._phases["slowest node"] += elapsed_s - busy_s
        self._transactions += 1


class TwoPhaseClient(Client):
    """One transaction at a time over one connection to each server."""

    def __init__(
        self, branches: "list[Branch]", names: "count[int]", record: "Callable[[list[Branch], float], None] | None"
    ) -> None:
        self._branches, self._names, self._record = branches, names, record

    async def execute(self, operation: Operation) -> None:
        if isinstance(operation, Read):
            await self._branches[0].read(operation)
            return
        began = time.perf_counter()
        name = f"bench-{next(self._names)}"
        votes = await asyncio.gather(*(branch.prepare(name, operation) for branch in self._branches))
        reasons = [reason for reason in votes if reason is not None]
        if reasons:
            prepared = (branch for branch, reason in zip(self._branches, votes, strict=True) if reason is None)
            await asyncio.gather(*(branch.finish("ROLLBACK PREPARED", name) for branch in prepared))
            raise OperationAborted(reasons[0])
        await asyncio.gather(*(branch.finish("COMMIT PREPARED", name) for branch in self._branches))
        if self._record is not None:
            self._record(self._branches, time.perf_counter() - began)

    async def close(self) -> None:
        for branch in self._branches:
            await branch.close()


class Branch:
    """One server's part in a transaction; `spent` is the time of each statement of the last one."""

    def __init__(self, connection: Connection, statements: PreparedStatements) -> None:
        self._connection, self._statements = connection, statements
        self.spent: dict[str, float] = {}

    @classmethod
    async def connect(cls, dsn: str) -> "Branch":
        connection = await asyncpg.connect(dsn)
        return cls(connection, await PreparedStatements.on(connection))

    async def prepare(self, name: str, operation: Operation) -> str | None:
        """None: prepared. Otherwise why not, with everything rolled back here."""
        try:
            begun = time.perf_counter()
            await self._connection.execute("BEGIN")
            updating = time.perf_counter()
            await self._statements.run(operation)
            preparing = time.perf_counter()
            tag = await self._connection.execute(f"PREPARE TRANSACTION '{name}'")
            prepared = time.perf_counter()
        except CUT_OFF as error:
            raise OperationUnknown(f"{name}: {error}") from error
        except (asyncpg.PostgresError, OperationAborted) as error:
            await self._connection.execute("ROLLBACK")
            return str(error)
        self.spent = {"begin": updating - begun, "statements": preparing - updating, "prepare": prepared - preparing}
        # In a transaction that has already failed the server answers ROLLBACK, without an error.
        return None if tag == "PREPARE TRANSACTION" else f"{name}: the server answered {tag}"

    async def finish(self, command: str, name: str) -> None:
        began = time.perf_counter()
        try:
            await self._connection.execute(f"{command} '{name}'")
        except (*CUT_OFF, asyncpg.PostgresError) as error:
            raise OperationUnknown(f"{name}: {error}") from error
        self.spent["commit prepared"] = time.perf_counter() - began

    async def read(self, operation: Read) -> None:
        try:
            await self._statements.run(operation)
        except (*CUT_OFF, asyncpg.PostgresError) as error:
            raise OperationUnknown(str(error)) from error

    async def close(self) -> None:
        await self._connection.close()
