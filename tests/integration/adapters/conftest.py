import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from adapters import EmbeddedPostgres, PostgresAdapter
from tests.contract.harness import AlwaysShip, PostgresDatabase

_names = itertools.count(1)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that the server's unprivileged user can enter (pytest's own are closed to others)."""
    path = Path(tempfile.mkdtemp(prefix="tops-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off", "max_prepared_transactions": 20}) as server:
        yield server


@pytest.fixture
async def database(shared_server: EmbeddedPostgres) -> AsyncIterator[PostgresDatabase]:
    found = await PostgresDatabase.create(shared_server, f"traps_{next(_names)}")
    yield found
    left_over = await found.sql("select gid from pg_prepared_xacts where database = current_database()")
    await found.drop()
    assert left_over == [], "a test left a prepared transaction behind"


@pytest.fixture
async def adapter(database: PostgresDatabase) -> AsyncIterator[PostgresAdapter]:
    async with database.open(lock_timeout_s=0.3) as opened:
        yield opened
        for doubt in await opened.recover():
            await opened.rollback(doubt.attempt)


@pytest.fixture
async def unproved_adapter(database: PostgresDatabase) -> AsyncIterator[PostgresAdapter]:
    """One that carries out what is not proved: triggers, functions of the user's, deferrable keys."""
    async with database.open(lock_timeout_s=0.3, prover=AlwaysShip) as opened:
        yield opened
        for doubt in await opened.recover():
            await opened.rollback(doubt.attempt)


@pytest.fixture(scope="module")
def literal_server(shared_server: EmbeddedPostgres) -> Iterator[tuple[Callable[..., Any], asyncpg.Connection]]:
    """A way to run one query from a test that is not asynchronous."""
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(shared_server.dsn))
        yield runner.run, connection
        runner.run(connection.close())
