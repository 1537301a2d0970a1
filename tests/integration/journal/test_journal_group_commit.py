"""Appends, group commits, segments, reads, drops and rewrites on real files."""

import asyncio
import multiprocessing
import os
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.integration.journal.journal_support import SMALL, GatedDisk, opened
from tests.support.polling import eventually
from tops.journal import Disk, Journal, JournalOptions
from tops.journal.format import RECORD_BYTES_MAX
from tops.model.errors import JournalLocked, NotInJournal, RecordTooLarge


async def test_records_come_back_in_order_with_gap_free_numbers(tmp_path: Path) -> None:
    records = [os.urandom(number % 50) for number in range(300)]
    async with Journal.open(tmp_path / "journal", SMALL) as journal:
        assert [journal.append(record) for record in records] == list(range(1, 301))
        assert journal.next_sequence == 301

    async with Journal.open(tmp_path / "journal", SMALL) as journal:
        assert list(journal.read(1)) == list(enumerate(records, 1))
        assert (journal.first_sequence, journal.next_sequence, journal.durable_sequence) == (1, 301, 301)
        assert journal.recovery.records == 300
        assert journal.recovery.segments > 10
        assert journal.recovery.torn_bytes == 0
        assert journal.recovery.bytes == journal.size_bytes
        assert journal.size_bytes == sum(path.stat().st_size for path in (tmp_path / "journal").glob("*.segment"))


async def test_nobody_is_told_before_the_sync_and_all_who_wait_share_one(tmp_path: Path) -> None:
    disk = GatedDisk()
    async with Journal.open(
        tmp_path / "journal", JournalOptions(seal_after_s=60, here_records_max=0), disk=disk
    ) as journal:
        told: list[int] = []
        disk.gate.clear()
        disk.forget_syncs()
        first = asyncio.create_task(append_and_sync(journal, b"first"))
        assert await asyncio.to_thread(disk.syncs.acquire, timeout=60)
        fsyncs = journal.statistics.fsyncs

        waiters = [asyncio.create_task(append_and_sync(journal, b"w%d" % number)) for number in range(50)]
        for number in range(2, 102):
            journal.when_durable(number, partial(told.append, number))
        for number in range(50):
            journal.append(b"c%d" % number)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not first.done()
        assert told == []
        assert journal.durable_sequence == 1

        disk.gate.set()
        await asyncio.gather(first, *waiters)
        await journal.sync()
        assert told == list(range(2, 102))
        assert journal.statistics.fsyncs == fsyncs + 2, "one for the first record, one for the hundred behind it"


async def append_and_sync(journal: Journal, record: bytes) -> None:
    journal.append(record)
    await journal.sync()


async def test_what_one_turn_of_the_loop_appends_is_one_batch(tmp_path: Path) -> None:
    async with Journal.open(tmp_path / "journal") as journal:
        for number in range(1000):
            journal.append(b"%d" % number)
        await journal.sync()

        assert journal.statistics.batches == 1
        assert journal.statistics.records == 1000
        assert journal.statistics.last_fsync_s > 0
        assert journal.queued == 0


async def test_a_callback_for_a_durable_record_comes_at_once_and_a_raising_one_stops_no_other(tmp_path: Path) -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    async with Journal.open(tmp_path / "journal") as journal:
        journal.append(b"record")
        await journal.sync()
        called = asyncio.Event()

        journal.when_durable(1, lambda: 1 // 0)
        journal.when_durable(1, called.set)
        await asyncio.wait_for(called.wait(), 60)

        assert reported == ["a journal callback raised"]


async def test_a_cancelled_waiter_disturbs_neither_the_others_nor_the_record(tmp_path: Path) -> None:
    disk = GatedDisk()
    async with Journal.open(tmp_path / "journal", JournalOptions(here_records_max=0), disk=disk) as journal:
        disk.gate.clear()
        one, two = (asyncio.create_task(append_and_sync(journal, name)) for name in (b"one", b"two"))
        await asyncio.sleep(0)
        one.cancel()
        disk.gate.set()
        await two

        assert one.cancelled()
        assert [record for _, record in journal.read(1)] == [b"one", b"two"]


async def test_a_batch_larger_than_the_limit_is_split_and_a_record_larger_is_not(tmp_path: Path) -> None:
    options = JournalOptions(batch_bytes_max=1000)
    async with Journal.open(tmp_path / "journal", options) as journal:
        journal.append(b"L" * 5000)
        for _ in range(20):
            journal.append(b"s" * 100)
        await journal.sync()

        assert journal.statistics.batches == 3
        assert [len(record) for _, record in journal.read(1)] == [5000] + [100] * 20


async def test_an_oversized_record_is_refused_and_takes_no_number(tmp_path: Path) -> None:
    async with Journal.open(tmp_path / "journal") as journal:
        with pytest.raises(RecordTooLarge):
            journal.append(bytes(RECORD_BYTES_MAX + 1))
        with pytest.raises(RecordTooLarge):
            await journal.rewrite([bytes(RECORD_BYTES_MAX + 1)])

        assert journal.append(b"fits") == 1


async def test_reading_starts_anywhere_and_goes_across_segments(tmp_path: Path) -> None:
    options = JournalOptions(segment_bytes=200_000)
    async with Journal.open(tmp_path / "journal", options) as journal:
        records = [b"%07d" % number * 100 for number in range(1, 1001)]
        for record in records:
            journal.append(record)
            if len(record) % 7 == 0 and journal.next_sequence % 5 == 0:
                await journal.sync()
        await journal.sync()

        for start in (1, 2, 499, 500, 777, 1000):
            assert list(journal.read(start)) == list(enumerate(records[start - 1 :], start))
        assert list(journal.read(1001)) == []
        with pytest.raises(NotInJournal):
            journal.read(1002)
        with pytest.raises(NotInJournal):
            journal.read(0)


async def test_a_reader_in_another_thread_never_misses_a_record_while_the_writer_goes_on(tmp_path: Path) -> None:
    total = 3000
    async with Journal.open(tmp_path / "journal", JournalOptions(segment_bytes=2000)) as journal:

        def follow() -> list[int]:
            seen: list[int] = []
            while len(seen) < total:
                seen.extend(sequence for sequence, _ in journal.read(len(seen) + 1))
            return seen

        follower = asyncio.create_task(asyncio.to_thread(follow))
        for number in range(total):
            journal.append(b"%d" % number)
            if number % 10 == 0:
                await journal.sync()
        await journal.sync()

        assert await asyncio.wait_for(follower, 120) == list(range(1, total + 1))


async def test_dropping_deletes_whole_segments_and_never_a_record_that_is_kept(tmp_path: Path) -> None:
    async with Journal.open(tmp_path / "journal", SMALL) as journal:
        for number in range(100):
            await append_and_sync(journal, b"%d" % number)
        size = journal.size_bytes

        assert await journal.drop_before(50) > 0
        assert 1 < journal.first_sequence <= 50
        assert journal.size_bytes < size
        assert [sequence for sequence, _ in journal.read(50)] == list(range(50, 101))
        with pytest.raises(NotInJournal):
            journal.read(journal.first_sequence - 1)
        assert await journal.drop_before(1) == 0

    async with Journal.open(tmp_path / "journal", SMALL) as journal:
        assert [sequence for sequence, _ in journal.read(50)] == list(range(50, 101))
        await journal.drop_before(10_000)
        assert journal.append(b"next") == 101


async def test_a_rewrite_replaces_what_was_appended_before_it_and_precedes_what_comes_after(tmp_path: Path) -> None:
    async with Journal.open(tmp_path / "journal", SMALL) as journal:
        for number in range(30):
            journal.append(b"old %d" % number)
        rewriting = asyncio.create_task(journal.rewrite([b"state one", b"state two" * 30]))
        await asyncio.sleep(0)
        assert journal.append(b"after") == 33
        assert await rewriting == 31
        await journal.sync()

        expected = [(31, b"state one"), (32, b"state two" * 30), (33, b"after")]
        assert journal.first_sequence == 31
        assert list(journal.read(31)) == expected

    async with Journal.open(tmp_path / "journal", SMALL) as journal:
        assert list(journal.read(31)) == expected
        assert (journal.first_sequence, journal.next_sequence) == (31, 34)


async def test_a_reader_that_a_rewrite_overtakes_is_told_so(tmp_path: Path) -> None:
    async with Journal.open(tmp_path / "journal", SMALL) as journal:
        for number in range(30):
            await append_and_sync(journal, b"old %d" % number)
        reader = journal.read(1)
        assert next(reader) == (1, b"old 0")

        await journal.rewrite([b"state"])

        with pytest.raises(NotInJournal):
            list(reader)


async def test_the_watermark_is_synced_when_the_journal_falls_idle(tmp_path: Path) -> None:
    disk = GatedDisk()
    options = JournalOptions(seal_after_s=0.001, here_records_max=0)
    async with Journal.open(tmp_path / "journal", options, disk=disk) as journal:
        disk.forget_syncs()
        await append_and_sync(journal, b"record")

        for which in ("the record's", "the watermark's"):
            assert await asyncio.to_thread(disk.syncs.acquire, timeout=60), which


class SyncingThreads(Disk):
    """Remembers which thread synced."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def datasync(self, descriptor: int) -> None:
        self.names.append(threading.current_thread().name)
        super().datasync(descriptor)


async def test_few_records_are_synced_in_the_loops_thread_and_the_writer_syncs_the_watermark(tmp_path: Path) -> None:
    disk = SyncingThreads()
    options = JournalOptions(seal_after_s=0.001, here_sync_max_s=60)
    async with Journal.open(tmp_path / "journal", options, disk=disk) as journal:
        disk.names.clear()
        await append_and_sync(journal, b"record")

        assert disk.names[0] == threading.current_thread().name
        async with asyncio.timeout(60):
            await eventually(lambda: not journal._store.unsealed)
        assert disk.names[-1] == "tops-journal"


@pytest.mark.parametrize(
    "options", [JournalOptions(here_sync_max_s=60, here_records_max=2), JournalOptions(here_sync_max_s=0)]
)
async def test_many_records_or_a_slow_disk_are_the_writers(tmp_path: Path, options: JournalOptions) -> None:
    disk = SyncingThreads()
    async with Journal.open(tmp_path / "journal", options, disk=disk) as journal:
        disk.names.clear()
        for number in range(3):
            journal.append(b"%d" % number)
        await journal.sync()

        assert set(disk.names) == {"tops-journal"}


async def test_with_no_delay_the_watermark_is_synced_before_each_acknowledgement(tmp_path: Path) -> None:
    async with Journal.open(tmp_path / "journal", JournalOptions(seal_after_s=0)) as journal:
        fsyncs = journal.statistics.fsyncs
        await append_and_sync(journal, b"record")

        assert journal.statistics.fsyncs == fsyncs + 2


def open_and_hold(directory: Path, ready: Connection) -> None:
    with opened(directory):
        ready.send(os.getpid())
        ready.recv()


def test_a_journal_that_is_open_elsewhere_is_refused_with_the_process_that_holds_it(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=open_and_hold, args=(tmp_path / "journal", theirs))
    holder.start()
    pid = ours.recv()

    with pytest.raises(JournalLocked, match=f"process {pid}"):
        Journal.open(tmp_path / "journal")

    ours.send("done")
    holder.join(60)
    with opened(tmp_path / "journal"), pytest.raises(JournalLocked):
        Journal.open(tmp_path / "journal")
