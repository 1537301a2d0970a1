from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.integration.overlay.secured import Secured, secured_broker


@pytest_asyncio.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    limits = "subscriptions_max = 50\nfollowers_max = 5\ntransactions_max = 20\ntypes_max = 20"
    async with secured_broker(tmp_path, limits=limits) as running:
        yield running
