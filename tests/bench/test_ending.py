"""A benchmark that is told to end takes the servers and processes that it has started with it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

TIMEOUT_S = 120.0


@pytest.mark.parametrize("interrupt", ["SIGTERM", "SIGINT"])
def test_nothing_that_it_started_stays_behind(tmp_path: Path, interrupt: str) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # servers' sockets take no long names
    folder.chmod(0o755)  # and they run as another user than root
    output = (tmp_path / "output").open("wb")
    figure = ["--figures", "write_all.c64.vs_hand_2pc", "--results", str(tmp_path)]
    bench = subprocess.Popen(
        [sys.executable, "-m", "tops", "bench", "policies", "--quick", *figure],
        stdout=output,
        stderr=output,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        started = _once_agents_run(bench)
        bench.send_signal(signal.Signals[interrupt])
        assert bench.wait(TIMEOUT_S) != 0
        _, alive = psutil.wait_procs(started, TIMEOUT_S)
        assert not alive
        left = {found.name for found in folder.iterdir() if not found.name.startswith("tops-embedded-postgres")}
        assert not left, "the copies that servers are made of may stay, for the next run"
    finally:
        bench.kill()
        output.close()
        shutil.rmtree(folder)


def _once_agents_run(bench: subprocess.Popen[bytes]) -> list[psutil.Process]:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        children = psutil.Process(bench.pid).children(recursive=True)
        if sum("replica" in _command(child) for child in children) == 3:
            return children
        assert bench.poll() is None
        time.sleep(0.05)
    raise AssertionError("the agents were not started")


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
