"""A failed write or sync: no retry, no acknowledgement, and no more use of the journal."""

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.journal.journal_support import FailingDisk, GatedDisk
from tops.journal import Journal, JournalOptions
from tops.model.errors import JournalClosed, JournalFailed


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one MiB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"may not mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.parametrize("step", ["write", "datasync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("here_records_max", [0, 16])  # the writer's thread, the loop's
async def test_a_failure_reaches_every_pending_and_later_call_and_is_not_retried(
    tmp_path: Path, step: str, code: int, here_records_max: int
) -> None:
    disk = FailingDisk(step)
    options = JournalOptions(here_records_max=here_records_max, here_sync_max_s=60)
    journal = Journal.open(tmp_path / "journal", options, disk=disk)
    journal.append(b"safe")
    await journal.sync()
    acknowledged = []

    watch = asyncio.create_task(journal.failed())
    await asyncio.sleep(0)
    disk.error = OSError(code, os.strerror(code))
    journal.when_durable(journal.append(b"lost"), lambda: acknowledged.append("lost"))
    pending = await asyncio.gather(
        journal.sync(), journal.rewrite([b"state"]), journal.drop_before(9), journal.sync(), return_exceptions=True
    )

    assert [type(outcome) for outcome in pending] == [JournalFailed] * 4
    assert os.strerror(code) in str(pending[0])
    assert isinstance(pending[0], JournalFailed)
    assert (await watch).problem == pending[0].problem
    with pytest.raises(JournalFailed):
        journal.append(b"later")
    with pytest.raises(JournalFailed):
        journal.when_durable(1, lambda: None)
    for call in (journal.sync(), journal.rewrite([]), journal.drop_before(1)):
        with pytest.raises(JournalFailed):
            await call
    await journal.close()
    assert disk.failures == 1
    assert acknowledged == []
    assert journal.durable_sequence == 2
    async with Journal.open(tmp_path / "journal") as reopened:
        assert next(reopened.read(1)) == (1, b"safe")


async def test_a_full_disk_fails_the_journal_and_loses_nothing_acknowledged(small_file_system: Path) -> None:
    directory = small_file_system / "journal"
    journal = Journal.open(directory)
    acknowledged = 0

    async def fill() -> None:
        nonlocal acknowledged
        for number in range(1000):
            journal.append(f"{number:06d}".encode() * 1000)
            await journal.sync()
            acknowledged += 1

    with pytest.raises(JournalFailed, match="No space left on device"):
        await fill()
    with pytest.raises(JournalFailed):
        journal.append(b"later")
    await journal.close()

    assert acknowledged > 50
    async with Journal.open(directory) as reopened:
        assert [record[:6] for _, record in reopened.read(1)] == [b"%06d" % n for n in range(acknowledged)]
        assert reopened.recovery.torn_bytes > 0


async def test_a_full_disk_during_a_rewrite_keeps_the_old_records(small_file_system: Path) -> None:
    directory = small_file_system / "journal"
    journal = Journal.open(directory)
    journal.append(b"old")
    await journal.sync()

    with pytest.raises(JournalFailed, match="No space left on device"):
        await journal.rewrite([b"n" * 2**19] * 4)
    await journal.close()

    async with Journal.open(directory) as reopened:
        assert list(reopened.read(1)) == [(1, b"old")]
        assert len(reopened.recovery.removed_files) == 1


async def test_closing_tells_when_the_last_records_could_not_be_written(tmp_path: Path) -> None:
    disk = FailingDisk("datasync")
    journal = Journal.open(tmp_path / "journal", disk=disk)
    disk.error = OSError(errno.EIO, "Input/output error")
    journal.append(b"last words")

    with pytest.raises(JournalFailed, match="Input/output error"):
        await journal.close()

    async with Journal.open(tmp_path / "journal") as reopened:
        assert reopened.next_sequence >= 1, "the lock was released"


async def test_a_closed_journal_takes_nothing_and_has_written_what_it_took(tmp_path: Path) -> None:
    disk = GatedDisk()
    journal = Journal.open(tmp_path / "journal", JournalOptions(here_records_max=0), disk=disk)
    journal.append(b"taken")
    watch = asyncio.create_task(journal.failed())
    await asyncio.sleep(0)
    await journal.close()

    with pytest.raises(JournalClosed):
        journal.append(b"too late")
    with pytest.raises(JournalClosed):
        await journal.sync()
    with pytest.raises(JournalClosed):
        await watch
    async with Journal.open(tmp_path / "journal") as reopened:
        assert list(reopened.read(1)) == [(1, b"taken")]
