"""Clusters of real broker processes, one per topology and module."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.overlay.cluster import TOPOLOGIES, Cluster

UNHURRIED = "[broker.limits]\nfinish_s = 15"  # who is told that it is committed must find it everywhere


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(TOPOLOGIES))
async def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Every topology in turn."""
    running = Cluster(tmp_path_factory.mktemp(request.param), TOPOLOGIES[request.param], UNHURRIED)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


@pytest_asyncio.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Cluster]:
    """One broker process."""
    running = Cluster(tmp_path, TOPOLOGIES["single"])
    try:
        await running.start()
        yield running
    finally:
        await running.stop()
