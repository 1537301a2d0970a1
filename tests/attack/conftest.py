"""One cluster with keys and replica sets for all attacks that need one, and single brokers with small quotas."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from adapters import EmbeddedPostgres
from tests.attack.secured_sets import SecuredSets, secured_sets
from tests.integration.overlay.secured import Secured, secured_broker


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


@pytest_asyncio.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    limits = "\n".join(
        [
            "subscriptions_max = 50",
            "followers_max = 5",
            "transactions_max = 20",
            "types_max = 20",
            'filter_bytes_max = "64 KiB"',
        ]
    )
    async with secured_broker(tmp_path, limits=limits) as running:
        yield running
