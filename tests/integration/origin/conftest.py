"""One real server for all tests of origins; each test has a database of its own, and a login for writes."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from tests.integration.origin.databases import OriginDatabase


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    settings = {"max_connections": "200", "max_prepared_transactions": "100", "fsync": "off"}
    with EmbeddedPostgres(settings=settings) as running:
        yield running
        asyncio.run(running.crash("kill"))  # its data is thrown away


@pytest.fixture
async def database(server: EmbeddedPostgres) -> AsyncIterator[OriginDatabase]:
    """Closed also after a test that failed, so that nothing that it left open holds locks."""
    made = await OriginDatabase.make(server)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def plain(database: OriginDatabase) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """Straight to the database, past everything."""
    connection = await asyncpg.connect(database.dsn)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tops-origin-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)
