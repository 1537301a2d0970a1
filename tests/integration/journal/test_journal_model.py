"""Any sequence of operations, crashes and reopenings agrees with a list of records."""

import asyncio
import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.integration.journal.journal_support import FailingDisk
from tops.journal import Journal, JournalOptions
from tops.model.errors import JournalFailed

OPTIONS = JournalOptions(segment_bytes=400, batch_bytes_max=150, seal_after_s=60)
RECORDS = st.binary(max_size=60)


class JournalModel(RuleBasedStateMachine):
    """`durable` and `queued` are what a journal without files would hold."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="journal-model-"))
        self.durable: dict[int, bytes] = {}
        self.queued: dict[int, bytes] = {}
        self.following = 1
        self.open()

    def open(self) -> None:
        self.disk = FailingDisk("datasync")
        self.journal = Journal.open(self.directory, OPTIONS, disk=self.disk)
        self.old_mark = (self.directory / "durable").read_bytes()

    def last_segment(self) -> Path:
        return max(self.directory.glob("*.segment"))

    @rule(record=RECORDS)
    def append(self, record: bytes) -> None:
        async def call() -> int:
            return self.journal.append(record)

        assert self.loop.run_until_complete(call()) == self.following
        self.queued[self.following] = record
        self.following += 1

    @rule()
    def sync(self) -> None:
        segments = len(list(self.directory.glob("*.segment")))
        self.loop.run_until_complete(self.journal.sync())
        self.durable |= self.queued
        self.queued = {}
        if len(list(self.directory.glob("*.segment"))) != segments:
            self.old_mark = (self.directory / "durable").read_bytes()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        before = data.draw(st.integers(1, self.following + 5))
        self.sync()
        self.loop.run_until_complete(self.journal.drop_before(before))
        assert all(sequence < before for sequence in self.durable if sequence < self.journal.first_sequence)
        self.durable = {
            sequence: record for sequence, record in self.durable.items() if sequence >= self.journal.first_sequence
        }
        self.old_mark = (self.directory / "durable").read_bytes()

    @rule(records=st.lists(RECORDS, max_size=8))
    def rewrite(self, records: list[bytes]) -> None:
        first = self.loop.run_until_complete(self.journal.rewrite(records))

        assert first == self.following
        self.durable, self.queued = dict(enumerate(records, first)), {}
        self.following += len(records)
        self.old_mark = (self.directory / "durable").read_bytes()

    @rule()
    def close_and_open(self) -> None:
        self.loop.run_until_complete(self.journal.close())
        self.durable |= self.queued
        self.queued = {}
        self.open()
        assert self.journal.recovery.torn_bytes == 0
        assert self.journal.next_sequence == self.following

    @rule(data=st.data(), garbage=st.binary(max_size=80), mark_is_lost=st.booleans())
    def crash(self, data: st.DataObject, garbage: bytes, mark_is_lost: bool) -> None:
        """The sync of what is queued fails; of its bytes any part is left, perhaps with garbage for the rest."""
        # What ran ahead of this rule in the writer counts as synced.
        self.loop.run_until_complete(asyncio.sleep(0))
        self.sync()
        lost = data.draw(st.lists(RECORDS, min_size=1, max_size=6))
        # Not the length of the file: zeros behind its end are room, which the next batch overwrites.
        path, synced = self.last_segment(), self.journal._store.segments[-1].end
        self.disk.error = OSError(errno.EIO, "Input/output error")

        async def append_all() -> None:
            for record in lost:
                self.journal.append(record)
            await self.journal.sync()

        with pytest.raises(JournalFailed):
            self.loop.run_until_complete(append_all())
        self.loop.run_until_complete(self.journal.close())
        written = path.read_bytes()
        # A share, not a length: how records fall into batches depends on the writer's pace.
        kept = synced + (len(written) - synced) * data.draw(st.integers(0, 100)) // 100
        path.write_bytes(written[:kept] + garbage)
        if mark_is_lost:
            (self.directory / "durable").write_bytes(self.old_mark)
        self.open()

        found = dict(self.journal.read(self.journal.first_sequence))
        survivors = len(found) - len(self.durable)
        expected = self.durable | dict(enumerate(lost[:survivors], self.following))
        assert survivors >= 0
        assert found == expected
        if kept == len(written) or survivors == 0:
            torn = garbage if kept == len(written) else written[synced:kept] + garbage
            # Zeros alone are room that was made and not used.
            assert self.journal.recovery.torn_bytes == (len(torn) if any(torn) else 0)
        self.durable = found
        self.following += survivors

    @invariant()
    def serves_what_is_durable_and_nothing_else(self) -> None:
        if not hasattr(self, "journal"):
            return
        found = dict(self.journal.read(self.journal.first_sequence))
        # A record that was queued may already be durable; it may only be the right one, in its place.
        assert found.items() >= self.durable.items()
        assert found.items() <= (self.durable | self.queued).items()
        assert list(found) == list(range(self.journal.first_sequence, self.journal.first_sequence + len(found)))

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.loop.run_until_complete(self.journal.close())
            self.loop.close()
            shutil.rmtree(self.directory)


TestJournalModel = JournalModel.TestCase
TestJournalModel.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class LongJournalModel(JournalModel):
    """The same claim, over more and longer histories."""


TestLongJournalModel = pytest.mark.long(LongJournalModel.TestCase)
TestLongJournalModel.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
