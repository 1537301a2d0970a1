"""Folders that the unprivileged user of an embedded server may enter."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tops-replication-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    """One real server for all small clusters of a session; each has databases of its own."""
    # It is never crashed, so nothing has to reach the disk; servers that are have their own in the tests of kills.
    settings = {"max_connections": "400", "max_prepared_transactions": "100", "fsync": "off"}
    with EmbeddedPostgres(settings=settings) as running:
        yield running
        asyncio.run(running.crash("kill"))  # its data is thrown away: nothing is worth an orderly end
