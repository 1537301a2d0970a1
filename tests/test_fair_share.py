"""Slots that identities share."""

import asyncio
from contextlib import suppress

import pytest

from adapters.fair_share import FairShare
from tops.model.errors import LimitExceeded


class Work:
    """Tasks that hold a slot until they are let go."""

    def __init__(self, count: int, share: int) -> None:
        self.shares = FairShare(count, share)
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """The first character of a name is the identity."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.ensure_future(self._hold(name))
        await self.settle()

    async def _hold(self, name: str) -> None:
        async with self.shares.slot(name[0]):
            self.running.append(name)
            await self._ends[name].wait()
        self.running.remove(name)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self.tasks[name]
        if name in self.running:
            self.running.remove(name)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_an_identity_holds_no_more_than_its_share_and_the_others_begin_at_once() -> None:
    work = Work(4, 2)

    await work.begin("a1", "a2", "a3", "b1")

    assert work.running == ["a1", "a2", "b1"]
    await work.end("a1")
    assert work.running == ["a2", "b1", "a3"]


async def test_identities_that_wait_are_served_in_turn() -> None:
    work = Work(2, 2)
    await work.begin("a1", "a2", "a3", "a4", "b1", "c1")

    for name in ("a1", "a2", "a3"):
        await work.end(name)

    assert work.running == ["b1", "c1"]
    await work.end("b1")
    assert work.running == ["c1", "a4"]


async def test_a_cancelled_wait_takes_no_slot_and_a_cancelled_holder_gives_its_back() -> None:
    work = Work(1, 1)
    await work.begin("a1", "b1", "c1")

    await work.cancel("b1")
    await work.cancel("a1")

    assert work.running == ["c1"]


async def test_a_wait_that_is_cancelled_just_when_it_is_served_passes_its_slot_on() -> None:
    work = Work(1, 1)
    await work.begin("a1", "b1", "c1")

    work.tasks["a1"].cancel()
    await asyncio.sleep(0)  # the slot is granted to b1, which has not gone on yet
    work.tasks["b1"].cancel()
    await work.settle()

    assert "c1" in work.running


async def test_the_last_quarter_is_for_identities_that_hold_none() -> None:
    work = Work(8, 4)

    await work.begin(*(f"{who}{number}" for who in "ab" for number in range(6)), "c1", "d1", "d2")

    assert work.running == ["a0", "a1", "a2", "a3", "b0", "b1", "c1", "d1"]


async def test_requests_that_wait_can_be_turned_away() -> None:
    work = Work(2, 1)
    await work.begin("a1", "a2", "b1")

    work.shares.fail_waiting("a", LimitExceeded("enough"))
    await work.settle()

    with pytest.raises(LimitExceeded):
        await work.tasks["a2"]
    await work.end("a1")
    await work.begin("a3")
    assert work.running == ["b1", "a3"]
