"""Random clusters under faults, from seeds; a seed that once failed stays in the list for good."""

import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from tops.sim.faults import Faults
from tops.sim.runner import Totals, run_seed, run_seeds

FEWER_FAULTS = Faults(
    until_s=12.0, crash=0.3, cut=0.5, partition=0.1, pause=0.1, power_loss=0.02, crash_at_effect=0.0003, move=0.1,
    gathering=0, narrow_windows=0, resubscribe=0.1,
)  # fmt: skip
REGRESSIONS_WITH_FEWER_FAULTS = (
    *(3, 10, 16, 18, 41, 66, 80, 84, 87, 100, 108, 234, 1054, 1164, 11_765),
    *(20014, 20028, 20078, 30028, 30032, 30129, 1_000_983),
)
REGRESSIONS = (
    *(422, 1_007_511, 1_016_242, 1_019_386, 1_019_712, 1_026_997, 1_032_513),
    *(1_056_139, 1_067_304, 1_073_119, 1_087_045),
)
FRESH = range(10_000, 12_000)
RESTLESS = range(20_000, 20_200)


@pytest.mark.timeout(1200)
def test_seeds_that_once_failed_and_two_thousand_others_keep_every_promise() -> None:
    totals = Totals()

    for result in run_seeds(REGRESSIONS, Faults(gathering=0, narrow_windows=0)):
        totals.add(result)
    for result in run_seeds(FRESH):
        totals.add(result)
    for result in run_seeds(REGRESSIONS_WITH_FEWER_FAULTS, FEWER_FAULTS):
        totals.add(result)
    for result in run_seeds(RESTLESS, Faults.restless()):
        totals.add(result)

    assert {r.seed: r.violations[:3] for r in totals.bad} == {}
    assert totals.runs == len(REGRESSIONS) + len(FRESH) + len(REGRESSIONS_WITH_FEWER_FAULTS) + len(RESTLESS)
    assert totals.transactions > 50_000
    assert totals.crashes > 10_000


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_cluster_answers_every_request_with_certainty(seed: int) -> None:
    result, world = run_seed(seed, Faults.none())

    assert result.violations == []
    assert not [t.tx for t in world.history.transactions.values() if t.outcome == "unknown"]


def test_nothing_of_a_run_stays_in_memory() -> None:
    worlds = [weakref.ref(run_seed(seed)[1]) for seed in range(10_000, 10_016)]

    gc.collect()

    assert [world() for world in worlds] == [None] * 16


def test_the_same_seed_gives_the_same_trace_whatever_the_hash_seed() -> None:
    program = "import sys; from tops.sim.runner import run_seed; print(run_seed(int(sys.argv[1]))[0].digest)"

    for seed in ("7", "234", "1054"):
        digests = {
            subprocess.run(
                [sys.executable, "-c", program, seed],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for hash_seed in ("1", "2", "77")
        }
        assert len(digests) == 1


def test_the_command_reports_runs_as_json_and_exits_zero() -> None:
    command = [sys.executable, "-m", "tops", "sim", "run", "--seeds", "4", "--start", "50", "--format", "json"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["runs"] == 4
    assert report["violations"] == []


def test_a_run_that_is_interrupted_says_where_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tops", "sim", "run", "--seeds", "5000", "--start", "70", "--format", "json"]
    with (tmp_path / "errors").open("w") as errors:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    while not _children(running.pid):
        assert running.poll() is None

    running.send_signal(signal.SIGINT)
    report = json.loads(running.communicate(timeout=120)[0])

    assert running.returncode == 130
    assert report["next_start"] == 70 + report["runs"]
    told = (tmp_path / "errors").read_text()
    assert f"--seeds {5000 - report['runs']} --start {report['next_start']}" in told


def _children(pid: int) -> str:
    """The workers of a run: once it has them it is under way."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_an_unknown_fault_is_refused_with_the_names_of_those_there_are() -> None:
    command = [sys.executable, "-m", "tops", "sim", "run", "--seed", "1", "--faults", "meteor=1"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "there is no fault 'meteor'" in done.stderr
