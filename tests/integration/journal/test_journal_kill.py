"""kill -9 at random moments: every acknowledged record is there afterwards."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.journal.appending_process import record_for
from tests.integration.journal.journal_support import opened, records_in


def round_of(directory: Path, chance: random.Random) -> int:
    """Runs the process until it is killed; returns the last number that it acknowledged."""
    program = Path(__file__).with_name("appending_process.py")
    child = subprocess.Popen([sys.executable, str(program), str(directory)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = ""
    try:
        for _ in range(chance.randint(1, 400)):
            printed = child.stdout.readline()
            assert printed, "the process ended by itself"
        for _ in range(chance.randint(0, 100_000)):
            pass  # some microseconds to a few milliseconds, to meet every phase of a commit
    finally:
        child.kill()
        printed += child.stdout.read()
        child.wait()
        child.stdout.close()
    # The last line may be cut short; those before it were acknowledged.
    return int(printed[: printed.rindex("\n")].split()[-1])


def check_rounds(directory: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(rounds):
        acknowledged = round_of(directory, chance)
        with opened(directory) as store:
            records = records_in(store)
            assert store.next_sequence > acknowledged
            assert [sequence for sequence, _ in records] == list(range(store.first_sequence, store.next_sequence))
            assert all(record == record_for(sequence) for sequence, record in records)


def test_ten_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    check_rounds(tmp_path / "journal", rounds=10, seed=1)


@pytest.mark.long
def test_a_hundred_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    check_rounds(tmp_path / "journal", rounds=100, seed=2)
