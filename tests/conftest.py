"""Properties are tested for what they say, not for how long it takes to find out: machines may be busy. Secrets of the
tests' brokers lie in a folder of their own, which the processes that tests start inherit."""

import atexit
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="tops-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the golden transcripts again")
