"""What one identity can make a replica's agent keep."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from replication.replica.apply.participant import ReplicaParticipant
from replication.replica.lag import LagTracker
from replication.rpc import conversation
from replication.rpc.calls import AnyRequest, Read, ReplicaFailed
from replication.rpc.conversation import UNDER_WAY_BYTES_MAX, Caller, Responder
from replication.rpc.rights import RequestGuard
from tests.replication.test_conversation import Line, response, write
from tests.support.polling import eventually
from tops.model.errors import LimitExceeded, NotReachable, code_of
from tops.model.event_types import EventType
from tops.protocol.messages import Follower, LogStateReported, Sender
from tops.security import Permissions

SQL_BYTES = 4_000_000
R1, R2 = "shop/r1", "shop/r2"


async def test_requests_that_wait_hold_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    line, reached = Line(), asyncio.Event()

    async def ready(request: AnyRequest) -> None:
        if isinstance(request, Read) and request.at_least:
            await reached.wait()

    caller, guard = Caller(cast(Any, line), "shop", ("b1",)), Everybody(tmp_path / "audit.log")
    await caller.start()
    await Responder(cast(Any, line), "shop", ("b1",), ready, response, write, guard).start()
    fit = UNDER_WAY_BYTES_MAX // SQL_BYTES

    long = Read(sql="x" * SQL_BYTES, args=b"", at_least=1)
    waiting = [asyncio.ensure_future(caller.request(R1, long, 60.0)) for _ in range(fit + 5)]
    ended, _ = await asyncio.wait(waiting, timeout=60.0, return_when=asyncio.FIRST_EXCEPTION)

    while len(ended) < 5:
        more, _ = await asyncio.wait(
            [one for one in waiting if one not in ended], timeout=60.0, return_when=asyncio.FIRST_EXCEPTION
        )
        ended |= more
    for one in ended:
        error = one.exception()
        assert isinstance(error, ReplicaFailed) and error.code == code_of(LimitExceeded)
    assert guard.over_quota["Read"] >= 5
    assert await caller.request(R1, Read(sql="short", args=b""), 60.0), "short ones go on"
    reached.set()
    await asyncio.gather(*waiting, return_exceptions=True)


class Everybody(RequestGuard):
    """May do everything."""

    def __init__(self, audit: Path) -> None:
        super().__init__("test", "shop", Permissions(), audit, frozenset())

    def check(self, sender: Sender, request: AnyRequest) -> None: ...


class Coordinator:
    """Says who follows a log, once for each answer."""

    def __init__(self, *responses: tuple[Follower, ...]) -> None:
        self._answers = list(responses)

    async def get_log_state(self, event_type: EventType, *, timeout_s: float) -> LogStateReported:
        if not self._answers:
            raise NotReachable("nothing more is said")
        followers = self._answers.pop(0)
        return LogStateReported(
            request=1, event_type=event_type.name, decided=5, oldest=1, in_sync=(R1, R2), followers=followers
        )


class Reached:
    reached = received = 5


async def test_an_agent_remembers_no_followers_but_the_replicas_of_its_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replication.replica.lag.ASK_EVERY_S", 0.0)
    replicas = (Follower(R1, 5, present=True, in_sync=True), Follower(R2, 4, present=True, in_sync=True))
    made_up = [
        (*replicas, *(Follower(f"mallory.{turn}-{n}", 5, present=True, in_sync=False) for n in range(100)))
        for turn in range(20)
    ]
    coordinator, members = Coordinator(*made_up), {R1, R2}
    tracker = LagTracker(
        cast(Any, coordinator),
        EventType("rs.shop"),
        cast(ReplicaParticipant, Reached()),
        lambda: frozenset(members),
    )
    running = asyncio.ensure_future(tracker.run())
    await eventually(lambda: not coordinator._answers)

    assert set(tracker.of_others()) == members

    members.discard(R2)
    coordinator._answers.append(replicas)
    await eventually(lambda: R2 not in tracker.of_others())
    running.cancel()
    assert set(tracker.of_others()) == {R1}


def test_the_two_quotas_agree_on_what_is_long() -> None:
    assert conversation.LONG_BYTES * conversation.UNDER_WAY_MAX <= UNDER_WAY_BYTES_MAX
