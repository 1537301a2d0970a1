import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.resource import Resource
from tests.contract.harness import Database, PostgresDatabase, SqliteDatabase

_names = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off", "max_prepared_transactions": 20}) as server:
        yield server


@pytest.fixture(params=["postgres", "sqlite"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    found: Database
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        found = await PostgresDatabase.create(server, f"contract_{next(_names)}")
    else:
        found = await SqliteDatabase.create(tmp_path / "contract.db")
    yield found
    await found.drop()


@pytest.fixture
async def resource(database: Database) -> AsyncIterator[Resource]:
    opened = database.open()
    await opened.start()
    yield opened
    await opened.close()
