import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that the server's unprivileged user can enter (pytest's own are closed to others)."""
    path = Path(tempfile.mkdtemp(prefix="tops-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
