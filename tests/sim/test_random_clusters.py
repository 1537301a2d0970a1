"""A few random clusters under faults, checked for every promise; `tops sim run` tries thousands."""

import os
import subprocess
import sys

import pytest

from tops.sim.faults import Faults
from tops.sim.runner import run_seed

HARSH = Faults(crash=1.0, cut=1.0, power_loss=0.15, crash_at_effect=0.002, move=0.4, resubscribe=0.4)


@pytest.mark.parametrize("seed", [*range(8), 10, 23, 31, 85])
def test_nothing_is_violated(seed: int) -> None:
    result, _ = run_seed(seed)

    assert not result.violations


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_violated_when_everything_breaks_often(seed: int) -> None:
    result, _ = run_seed(seed, HARSH)

    assert not result.violations


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    code = "from tops.sim.runner import run_seed; print(run_seed(3)[0].digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }

    assert len(digests) == 1
