"""Three real PostgreSQL servers and one real Spark session for the whole folder; a fresh database per test."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from replication.divergence.check.check import Check
from replication.divergence.check.options import CheckOptions
from replication.divergence.read import jvm, session
from replication.divergence.results.folder import read_differences
from replication.divergence.results.model import CheckResult, Difference
from replication.tables.endpoints import ReplicaEndpoint

_numbers = itertools.count(1)
QUICK = CheckOptions(settle_s=0.0)


@pytest.fixture(scope="session")
def event_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Spark writes down what it was asked to do."""
    return tmp_path_factory.mktemp("spark-events")


@pytest.fixture(scope="session")
def spark(event_log: Path) -> Iterator[SparkSession]:
    # This JVM lives long: that it leaves an archive of classes behind would only delay the end of the tests.
    settings = {
        "spark.driver.extraJavaOptions": jvm.SHORT_LIVED,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": event_log.as_uri(),
        "spark.eventLog.compress": "false",
    }
    started = session.start("local[2]", settings)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def servers() -> Iterator[list[EmbeddedPostgres]]:
    started = asyncio.run(EmbeddedPostgres.start_many(3, settings={"fsync": "off", "shared_buffers": "64MB"}))
    yield started
    for server in started:
        server.__exit__(None, None, None)


@pytest.fixture(scope="session")
def cluster_server() -> Iterator[EmbeddedPostgres]:
    """One real server for the replica sets of a session; each replica has a database of its own."""
    settings = {"max_connections": "400", "max_prepared_transactions": "100", "fsync": "off"}
    with EmbeddedPostgres(settings=settings) as running:
        yield running
        asyncio.run(running.crash("kill"))  # its data is thrown away: nothing is worth an orderly end


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tops-divergence-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@dataclass
class Databases:
    """The same test database on every server."""

    endpoints: list[ReplicaEndpoint]
    out: Path
    spark: SparkSession

    async def everywhere(self, *statements: str) -> None:
        await asyncio.gather(*(self.on(endpoint.name, *statements) for endpoint in self.endpoints))

    async def on(self, replica: str, *statements: str) -> None:
        connection = await self._connect(replica)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    async def fetch(self, replica: str, query: str, *args: object) -> list[Any]:
        connection = await self._connect(replica)
        try:
            return await connection.fetch(query, *args)
        finally:
            await connection.close()

    async def _connect(self, replica: str) -> asyncpg.Connection:
        endpoint = next(e for e in self.endpoints if e.name == replica)
        return await asyncpg.connect(endpoint.dsn)

    def check(self, *tables: str, options: CheckOptions = QUICK, **more: Any) -> Check:
        endpoints = more.pop("endpoints", self.endpoints)
        return Check(endpoints, replace(options, tables=tables), self.out, spark=self.spark, **more)

    async def compare(self, *tables: str, options: CheckOptions = QUICK, **more: Any) -> CheckResult:
        return await self.check(*tables, options=options, **more).run()

    def differences(self, result: CheckResult) -> list[Difference]:
        return list(read_differences(self.out / result.id))


@pytest.fixture
async def databases(servers: list[EmbeddedPostgres], spark: SparkSession, tmp_path: Path) -> AsyncIterator[Databases]:
    name = f"test{next(_numbers)}"

    async def create(server: EmbeddedPostgres, statement: str) -> None:
        connection = await asyncpg.connect(server.dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    await asyncio.gather(*(create(server, f"CREATE DATABASE {name}") for server in servers))
    endpoints = [ReplicaEndpoint(f"r{i}", server.dsn_for(name)) for i, server in enumerate(servers, start=1)]
    yield Databases(endpoints, tmp_path / "runs", spark)
    await asyncio.gather(*(create(s, f"DROP DATABASE {name} WITH (FORCE)") for s in servers if s.running))


def kinds(found: list[Difference]) -> set[tuple[tuple[str, ...], str, str, tuple[str, ...]]]:
    """Differences as (key, replica, kind, columns)."""
    return {(d.key, d.replica, d.kind.value, d.columns) for d in found}
