"""What the tests share."""

import pytest

from tests.support.polling import eventually, eventually_blocking


async def test_a_condition_that_becomes_true_is_waited_for() -> None:
    answers = iter([False, False, True])

    await eventually(lambda: next(answers))


async def test_a_condition_may_be_awaitable() -> None:
    async def there() -> bool:
        return True

    await eventually(there)


async def test_a_condition_that_never_holds_is_reported_with_its_last_value() -> None:
    with pytest.raises(AssertionError, match=r"three rows did not come true within 0\.1 s; at last it was \[\]"):
        await eventually(list, 0.1, "three rows")


async def test_a_condition_that_raises_is_reported_with_its_error() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        await eventually(lambda: 1 / 0, 0.1)


def test_without_an_event_loop_the_same_is_reported() -> None:
    with pytest.raises(AssertionError, match="at last it was 0"):
        eventually_blocking(lambda: 0, 0.1)
