import os
import subprocess
import sys
import time

from bench.machine import CLIENT, CpuMeter, describe_machine, fdatasync_us

BUSY = "import sys\nprint('up', flush=True)\nwhile True: pass"


def spend_cpu(seconds: float) -> None:
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


def test_cpu_time_is_charged_to_whoever_spent_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        meter = CpuMeter({"idle": idle.pid})
        spend_cpu(0.2)
        used = meter.used()
        idle.kill()

    assert used[CLIENT] >= 0.15
    assert used["idle"] < used[CLIENT]


def test_work_shorter_than_a_tick_of_the_kernel_is_charged_too() -> None:
    meter = CpuMeter({})

    spend_cpu(0.003)

    assert meter.used()[CLIENT] >= 0.003


def test_the_children_of_a_process_count_with_it() -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True) as family:
        assert family.stdout is not None
        family.stdout.readline()
        meter = CpuMeter({"family": family.pid})
        while not (used := meter.used()["family"]):
            spend_cpu(0.01)
        os.killpg(family.pid, 9)

    assert used > 0


def test_work_that_is_not_ours_shows_as_disturbance() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        meter = CpuMeter({})
        while not (disturbance := meter.used_by_others()):
            spend_cpu(0.01)
        stranger.kill()

    assert disturbance > 0


def test_a_process_that_has_ended_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()

    assert CpuMeter({"gone": gone.pid}).used()["gone"] == 0


def test_the_machine_is_described_well_enough_to_compare_records() -> None:
    machine = describe_machine()

    assert machine["cores"] == os.cpu_count()
    assert fdatasync_us(writes=3) > 0
