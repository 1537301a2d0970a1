"""Folders that the unprivileged user of an embedded server may enter."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tops-replication-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)
