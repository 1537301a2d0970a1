"""A stop between any two steps leaves the journal as it was before the operation, or as it is after it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.journal.journal_support import (
    ROOMY,
    SMALL,
    PowerCut,
    PowerCutDisk,
    opened,
    records_in,
    write_sample,
)
from tops.journal import JournalOptions
from tops.journal.store import Store

Operation = Callable[[Store], object]


def commit_twice(store: Store) -> None:
    store.commit([b"z" * 200])
    store.commit([b"new"])


COMMITS = [[b"alpha", b"beta"], [b"x" * 150], [b"gamma"], [b"y" * 150], [b"delta"]]
OPERATIONS: dict[str, Operation] = {
    "commit": lambda store: store.commit([b"new", b"newer"]),
    "commit into a new segment": commit_twice,
    "seal": lambda store: store.seal(),
    "drop": lambda store: store.drop_before(5),
    "rewrite": lambda store: store.rewrite([b"state", b"s" * 120, b"more state"]),
    "rewrite to nothing": lambda store: store.rewrite([]),
}


def allowed_after(operation: str, before: list[tuple[int, bytes]], image: list[tuple[int, bytes]]) -> bool:
    following = before[-1][0] + 1
    match operation:
        case "commit":
            return image in (before, [*before, (following, b"new"), (following + 1, b"newer")])
        case "commit into a new segment":
            steps = [(following, b"z" * 200), (following + 1, b"new")]
            return image in (before, [*before, *steps[:1]], [*before, *steps])
        case "seal":
            return image == before
        case "drop":  # record 4 shares a segment with record 5
            return image in (before, [each for each in before if each[0] >= 4])
        case "rewrite":
            state = [(following, b"state"), (following + 1, b"s" * 120), (following + 2, b"more state")]
            return image in (before, state)
        case "rewrite to nothing":
            return image in (before, [])
    raise AssertionError(operation)


@pytest.mark.parametrize("options", [SMALL, ROOMY], ids=["as long as needed", "with room"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stop_at_any_step_leaves_the_state_before_or_after(
    tmp_path: Path, operation: str, options: JournalOptions
) -> None:
    outcomes = set()
    for stop_at in range(1000):
        directory = tmp_path / str(stop_at)
        before = write_sample(directory, COMMITS, options)
        disk = PowerCutDisk(directory, stop_at)
        finished = stopped(lambda store: OPERATIONS[operation](store), directory, disk, options)

        for image in disk.left_behind(tmp_path / "images"):
            with opened(image, options) as store:
                found, following = records_in(store), store.next_sequence
                assert allowed_after(operation, before, found), f"step {stop_at}, {image.name}: {found}"
                assert not found or following == found[-1][0] + 1
                assert following >= before[-1][0] + 1, "sequence numbers never go back"
                outcomes.add(tuple(found) == tuple(before))
                store.commit([b"life goes on"])
            with opened(image, options) as store:
                assert records_in(store) == [*found, (following, b"life goes on")]
                assert store.recovery.torn_bytes == 0
                assert store.recovery.removed_files == ()
        if finished:
            break
    else:
        pytest.fail("the operation never finished")
    if operation != "seal":
        assert outcomes == {True, False}, "stops before and after the moment it counts were both met"


def stopped(operation: Operation, directory: Path, disk: PowerCutDisk, options: JournalOptions = SMALL) -> bool:
    """Runs until the cut; True when the operation was through before it came."""
    try:
        with opened(directory, options, disk) as store:
            operation(store)
    except PowerCut:
        return False
    return True


def test_what_a_finished_operation_did_survives_a_power_cut_right_after_it(tmp_path: Path) -> None:
    for name, operation in OPERATIONS.items():
        directory = tmp_path / name
        write_sample(directory, COMMITS)
        disk = PowerCutDisk(directory, stop_at=-1)
        with opened(directory, disk=disk) as store:
            operation(store)
            after = records_in(store)

        for image in disk.left_behind(tmp_path / "images"):
            with opened(image) as store:
                assert records_in(store) == after, f"{name}, {image.name}"


def test_a_stop_at_any_step_of_creating_a_journal_leaves_one_that_opens(tmp_path: Path) -> None:
    for stop_at in range(1000):
        directory = tmp_path / str(stop_at)
        directory.mkdir()
        disk = PowerCutDisk(directory, stop_at)
        finished = stopped(lambda store: store.commit([b"first"]), directory, disk)

        for image in disk.left_behind(tmp_path / "images"):
            with opened(image) as store:
                assert records_in(store) in ([], [(1, b"first")])
                following = store.next_sequence
                store.commit([b"life goes on"])
            with opened(image) as store:
                assert records_in(store)[-1] == (following, b"life goes on")
        if finished:
            return
    pytest.fail("the creation never finished")


def test_a_stop_at_any_step_of_a_recovery_leaves_the_same_to_recover(tmp_path: Path) -> None:
    for stop_at in range(1000):
        directory = tmp_path / str(stop_at)
        records = write_sample(directory, COMMITS)
        mark = (directory / "durable").read_bytes()
        with opened(directory) as store:
            store.commit([b"unmarked"])
            last = store.segments[-1].path
        (directory / "durable").write_bytes(mark)
        last.write_bytes(last.read_bytes() + b"torn garbage")
        (directory / "0000000000000099.segment.new").write_bytes(b"never finished")
        disk = PowerCutDisk(directory, stop_at)
        finished = stopped(lambda store: None, directory, disk)

        for image in disk.left_behind(tmp_path / "images"):
            with opened(image) as store:
                assert records_in(store) == [*records, (records[-1][0] + 1, b"unmarked")]
        if finished:
            return
    pytest.fail("the recovery never finished")


def test_what_a_recovery_serves_survives_a_power_cut_right_after_it(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    records = write_sample(directory, COMMITS)
    mark = (directory / "durable").read_bytes()
    with opened(directory) as store:
        synced = store.segments[-1].end
        store.commit([b"written, never synced"])
        last = store.segments[-1].path
    (directory / "durable").write_bytes(mark)
    disk = PowerCutDisk(directory, stop_at=-1, synced_bytes={last.name: synced})

    with opened(directory, disk=disk) as store:
        served = records_in(store)

    assert served == [*records, (records[-1][0] + 1, b"written, never synced")]
    for image in disk.left_behind(tmp_path / "images"):
        with opened(image) as store:
            assert records_in(store) == served, image.name
