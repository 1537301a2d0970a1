"""A replica that nobody waits for takes its time; one that was asked does not."""

import asyncio
import time

from replication.replica.apply.pace import Pace

LONG_S, TIMEOUT_S = 3_600.0, 30.0


async def test_whoever_waits_ends_the_gathering() -> None:
    pace = Pace(LONG_S)
    gathering = asyncio.ensure_future(pace.gathered(time.monotonic()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not gathering.done()

    pace.hurry()

    await asyncio.wait_for(gathering, TIMEOUT_S)


async def test_one_that_was_asked_lately_does_not_gather() -> None:
    pace = Pace(LONG_S)
    pace.hurry()

    await asyncio.wait_for(pace.gathered(time.monotonic()), TIMEOUT_S)


async def test_gathering_ends_by_itself() -> None:
    await asyncio.wait_for(Pace(0.01).gathered(time.monotonic()), TIMEOUT_S)


async def test_a_voter_never_gathers() -> None:
    await asyncio.wait_for(Pace(0.0).gathered(time.monotonic()), TIMEOUT_S)
