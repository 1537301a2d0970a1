"""The one poller of the tests: wait for a condition, and say what was there instead when it does not come true."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

INTERVAL_S = 0.05
Condition = Callable[[], object] | Callable[[], Awaitable[object]]


async def eventually(condition: Condition, timeout_s: float = 30.0, what: str = "the condition") -> None:
    """Returns when the condition, asked again and again, is true. One that raises is not true yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = condition()
            last = await found if inspect.isawaitable(found) else found
            if last:
                return
        except Exception as error:
            last = error
        assert time.monotonic() < deadline, _missed(what, timeout_s, last)
        await asyncio.sleep(INTERVAL_S)


def eventually_blocking(condition: Callable[[], object], timeout_s: float = 60.0, what: str = "the condition") -> None:
    """The same where there is no event loop."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            last = condition()
            if last:
                return
        except Exception as error:
            last = error
        assert time.monotonic() < deadline, _missed(what, timeout_s, last)
        time.sleep(INTERVAL_S)


def _missed(what: str, timeout_s: float, last: object) -> str:
    return f"{what} did not come true within {timeout_s:g} s; at last it was {last!r}"
