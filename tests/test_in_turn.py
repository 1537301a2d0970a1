"""Pieces of work are done in their order, one at a time, and none of them ends the others."""

import asyncio

import pytest

from tops.runtime.in_turn import InTurn


async def test_pieces_are_done_in_order_and_never_overlap() -> None:
    turns, seen, done = InTurn(), [], asyncio.Event()

    async def piece(number: int) -> None:
        seen.append(("begins", number))
        await asyncio.sleep(0)
        seen.append(("ends", number))
        if number == 2:
            done.set()

    for number in range(3):
        turns.put(piece(number))
    await done.wait()

    assert seen == [(what, number) for number in range(3) for what in ("begins", "ends")]


async def test_what_comes_while_there_is_nothing_to_do_is_done() -> None:
    turns, loop = InTurn(), asyncio.get_running_loop()
    for number in range(3):
        done = loop.create_future()

        async def piece(done: "asyncio.Future[int]" = done, number: int = number) -> None:
            done.set_result(number)

        turns.put(piece())
        assert await done == number
        await asyncio.sleep(0)  # the task waits again


async def test_neither_an_error_nor_a_cancellation_inside_a_piece_ends_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns, done = InTurn(), asyncio.Event()

    async def broken() -> None:
        raise ValueError("broken")

    async def cancelled() -> None:
        nobody = asyncio.get_running_loop().create_future()
        nobody.cancel()
        await nobody

    async def last() -> None:
        done.set()

    for piece in (broken(), cancelled(), last()):
        turns.put(piece)
    async with asyncio.timeout(10):
        await done.wait()

    assert "an unhandled error" in caplog.text


async def test_stopping_cancels_what_is_done_and_begins_nothing_more() -> None:
    turns, began, ended = InTurn(), asyncio.Event(), asyncio.Event()
    later: list[str] = []

    async def long() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def never() -> None:
        later.append("begun")

    turns.put(long())
    turns.put(never())
    await began.wait()
    turns.stop()
    async with asyncio.timeout(10):
        await ended.wait()

    assert later == []


async def test_after_stopping_it_can_be_used_again() -> None:
    turns, done = InTurn(), asyncio.Event()

    async def piece() -> None:
        done.set()

    turns.put(piece())
    await done.wait()
    turns.stop()
    done.clear()
    turns.put(piece())
    async with asyncio.timeout(10):
        await done.wait()
