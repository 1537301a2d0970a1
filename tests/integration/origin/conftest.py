"""One real server for all tests of origins; each test has a database of its own, and a login for writes."""

import asyncio
from collections.abc import AsyncIterator, Iterator

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
    made = await OriginDatabase.make(server)
    yield made
    await made.close()


@pytest.fixture
async def plain(database: OriginDatabase) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """Straight to the database, past everything."""
    connection = await asyncpg.connect(database.dsn)
    yield connection
    await connection.close()


@pytest.fixture(autouse=True)
def _scratch(monkeypatch, server):
    import asyncio, asyncpg
    from replication.databases import ReplicaDatabase
    from contextlib import suppress

    async def role():
        c = await asyncpg.connect(server.dsn)
        pw = server.dsn.split("//postgres:", 1)[1].split("@", 1)[0]
        with suppress(asyncpg.DuplicateObjectError):
            await c.execute(
                f"create role origin_write login password '{pw}'; grant pg_write_all_data, pg_read_all_data to origin_write; "
            )
        await c.execute("grant pg_write_all_data, pg_read_all_data to origin_write")
        await c.close()

    asyncio.run(role())
    monkeypatch.setattr(
        ReplicaDatabase, "write_dsn", property(lambda self: self.dsn.replace("//postgres:", "//origin_write:", 1))
    )


from tests.integration.replication.conftest import folder  # noqa
