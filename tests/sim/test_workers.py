"""Many runs at once: in order, stopped at once, and never waiting for a process that is gone."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tops.sim.workers import WorkerDied, in_order


def nothing() -> None:
    pass


def never() -> bool:
    return False


def test_results_come_in_the_order_of_the_jobs() -> None:
    assert list(in_order(abs, range(-40, 0), 3, nothing, never)) == list(range(40, 0, -1))


def kill_oneself_at_three(job: int) -> int:
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return job


def test_a_worker_that_is_killed_ends_the_work_with_an_error() -> None:
    results = in_order(kill_oneself_at_three, range(1000), 1, nothing, never)

    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(WorkerDied, match="ended with code -9"):
        next(results)


def wait_for_ever(job: int) -> None:
    threading.Event().wait()


def test_work_under_way_is_dropped_when_it_is_stopped() -> None:
    asked: list[None] = []

    def at_the_third_question() -> bool:
        asked.append(None)
        return len(asked) >= 3

    assert list(in_order(wait_for_ever, range(4), 2, nothing, at_the_third_question)) == []


@pytest.mark.parametrize(
    ("blow", "exit_code", "told"), [("kill a worker", 2, "ended with code -9"), ("terminate", 130, "continue with")]
)
def test_many_runs_end_with_the_totals_so_far(blow: str, exit_code: int, told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tops", "sim", "run", "--seeds", "5000", "--start", "70", "--format", "json"]
    with (tmp_path / "errors").open("w") as errors:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    while not (workers := Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()):
        assert running.poll() is None

    if blow == "terminate":
        running.terminate()
    else:
        os.kill(int(workers[0]), signal.SIGKILL)
    report = json.loads(running.communicate(timeout=120)[0])

    assert running.returncode == exit_code
    assert report["next_start"] == 70 + report["runs"]
    assert told in (tmp_path / "errors").read_text()
