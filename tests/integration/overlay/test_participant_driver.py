"""What a participant's callbacks see of the machine's calls, with a journal on a real disk."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tops.model.ids import NodeId, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.effects import AbortTxCall, Call, CommitTxCall, Memo, NotifyTx, PrepareTx
from tops.protocol.messages import EpochId, Event
from tops.runtime.participant_driver import ParticipantDriver
from tops.runtime.participants import Participant, Received
from tops.runtime.site_journal import SiteJournal

TX, OTHER = TxId("client.1.1"), TxId("client.1.2")
EVENTS = (Event("set", {"n": 1}), Event("set", {"n": 2}))


class Early(Participant):
    """Commits at its promise, and keeps a list of what it was told."""

    compensatable = True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def on_prepare(self, tx: TxId) -> None:
        self.told.append("prepare")

    def on_commit(self, tx: TxId) -> None:
        self.told.append("commit")

    def on_abort(self, tx: TxId, reason: str) -> None:
        self.told.append("abort")

    def on_compensate(self, event: Received) -> None:
        self.told.append(f"undo {event.body['n']}")


class Driven:
    """One life of a participant: calls are made one after the other, as the machine does."""

    def __init__(self, journal: SiteJournal) -> None:
        self.participant, self.journal = Early(), journal
        self._answers: asyncio.Queue[object] = asyncio.Queue()
        self.driver = ParticipantDriver(
            self.participant, lambda _, result: self._answers.put_nowait(result), "s1", journal
        )

    async def call(self, call: Call) -> object:
        self.driver.call(call)
        return await asyncio.wait_for(self._answers.get(), 10)

    async def prepare_twice(self) -> None:
        """Of two members this participant can take only the first, which is then prepared anew without the second."""
        for sequence, event in enumerate(EVENTS, start=1):
            assert await self.call(NotifyTx(1, sequence, TX, sequence, event)) is None
        assert await self.call(PrepareTx(1, 3, TX, memo(1, TX, OTHER), EVENTS)) is None
        assert await self.call(PrepareTx(1, 4, TX, memo(2, TX), EVENTS)) is None


@pytest.fixture
async def driven(tmp_path: Path) -> AsyncIterator[Driven]:
    journal = SiteJournal.open(tmp_path)
    yield Driven(journal)
    await journal.close()


def memo(attempt: int, *transactions: TxId) -> Memo:
    return Memo(EpochId("set", 1, attempt, NodeId("b1"), 1), f"digest {attempt}", "voter", transactions)


async def test_an_early_commit_is_carried_out_once_however_often_its_promise_is_renewed(driven: Driven) -> None:
    await driven.prepare_twice()
    await driven.call(CommitTxCall(1, 5, TX))

    assert driven.participant.told == ["prepare", "commit"]


async def test_an_early_commit_that_was_promised_again_is_undone_once(driven: Driven) -> None:
    await driven.prepare_twice()
    await driven.call(AbortTxCall(1, 5, TX, Rejection(RejectionCode.ABORTED, "decided")))

    assert driven.participant.told == ["prepare", "commit", "undo 2", "undo 1", "abort"]


async def test_after_a_crash_the_promise_that_was_renewed_is_the_one_that_is_asked_about(
    driven: Driven, tmp_path: Path
) -> None:
    await driven.prepare_twice()
    await driven.journal.close()
    journal = SiteJournal.open(tmp_path)
    again = Driven(journal)

    (promise,), kept = again.driver.prepared_work()
    await again.call(CommitTxCall(1, 1, TX))

    assert (promise.memo, promise.transactions, kept) == (memo(2, TX), (TX,), [])
    assert again.participant.told == []  # it was carried out before the crash
    await journal.close()
