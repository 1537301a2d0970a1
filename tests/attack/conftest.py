"""One cluster with keys for all attacks."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from adapters import EmbeddedPostgres
from tests.attack.secured_sets import SecuredSets, secured_sets


@pytest.fixture(scope="package")
def attacked_server() -> Iterator[EmbeddedPostgres]:
    settings = {"max_connections": "200", "max_prepared_transactions": "50", "fsync": "off"}
    with EmbeddedPostgres(settings=settings) as running:
        yield running
        asyncio.run(running.crash("kill"))  # its data is thrown away


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sets(attacked_server: EmbeddedPostgres) -> AsyncIterator[SecuredSets]:
    async with secured_sets(attacked_server) as running:
        yield running
