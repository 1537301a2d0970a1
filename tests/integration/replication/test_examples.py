"""Every example runs with one command, and says at its end that it went right."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("example", ["bank", "dispatch", "inventory", "meeting", "web_shop"])
def test_an_example_runs_to_its_end(example: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"examples.{example}"], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout
