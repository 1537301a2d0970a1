"""A replica that stops: it waits for the end of what it has promised, and for nothing else."""

import asyncio
from typing import Any, cast

import pytest

from adapters.resource import Attempt
from replication.replica.apply import participant as module
from replication.replica.apply.participant import ReplicaParticipant
from tops.model.ids import NodeId
from tops.model.log_points import BEGINNING
from tops.model.transactions import Scope
from tops.protocol.effects import Memo
from tops.protocol.messages import EpochId


class Ending:
    """What of a resource the end of an epoch uses."""

    async def commit(self, attempt: Attempt) -> None: ...

    async def rollback(self, attempt: Attempt) -> None: ...


def prepared(number: int) -> tuple[ReplicaParticipant, Memo]:
    replica = ReplicaParticipant(cast(Any, Ending()), "rs.shop", "shop-r1", Scope.DISTRIBUTED)
    replica.prepared.add(number)
    return replica, Memo(EpochId("rs.shop", number, 1, NodeId("b1"), 1), "digest", "voter", ())


@pytest.mark.parametrize("committed", [True, False])
async def test_it_leaves_when_its_promise_has_ended_either_way(committed: bool) -> None:
    replica, memo = prepared(7)
    leaving = asyncio.ensure_future(replica.leave())
    await asyncio.sleep(0)
    assert not leaving.done()

    await replica.finish_batch(memo, committed)

    async with asyncio.timeout(module.LEAVE_S / 2):
        await leaving


async def test_it_does_not_wait_for_promises_that_another_agent_has_taken_over() -> None:
    replica, _ = prepared(7)
    leaving = asyncio.ensure_future(replica.leave())
    await asyncio.sleep(0)

    replica.disown()

    async with asyncio.timeout(module.LEAVE_S / 2):
        await leaving


async def test_it_says_what_it_leaves_behind(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "LEAVE_S", 0.01)
    replica, _ = prepared(7)

    await replica.leave()

    assert [getattr(record, "epochs", None) for record in caplog.records] == [[7]]


async def test_what_comes_while_it_leaves_gets_no_vote() -> None:
    replica, memo = prepared(7)
    leaving = asyncio.ensure_future(replica.leave())
    await asyncio.sleep(0)
    later = Memo(EpochId("rs.shop", 8, 1, NodeId("b1"), 1), "digest", "voter", ())
    vote = asyncio.ensure_future(replica.prepare_batch(later, (), BEGINNING))
    await replica.finish_batch(memo, True)
    await leaving

    assert not vote.done()
    vote.cancel()
