"""The checker of reads finds what it is there to find."""

from dataclasses import replace

import pytest

from tests.integration.replication.observations import Observations, Seen, violations

FIRST = Seen("current", 2.0, 3.0, 100, frozenset({"1-1"}), {"1": 1})
SECOND = Seen("quorum", 4.0, 5.0, 100, frozenset({"1-1", "1-2"}), {"1": 2})


def history(*seen: Seen) -> Observations:
    begun = {"1-1": 0.0, "1-2": 1.5, "1-3": 3.5}
    return Observations(100, begun, {"1-1": 1.0, "1-2": 2.5}, {"1-3"}, list(seen))


def test_a_history_that_an_order_explains_has_no_violation() -> None:
    assert violations(history(FIRST, SECOND)) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (replace(FIRST, total=99), "half applied"),
        (replace(FIRST, transfers=frozenset(), registers={}), "acknowledged transfers are not there"),
        (replace(SECOND, transfers=frozenset({"1-1"}), registers={"1": 1}), "acknowledged transfers are not there"),
        (replace(SECOND, transfers=SECOND.transfers | {"1-3"}, registers={"1": 3}), "refused or not begun"),
        (replace(FIRST, began=0.5, ended=1.2, transfers=SECOND.transfers, registers={"1": 2}), "refused or not begun"),
        (replace(SECOND, registers={"1": 1}), "register 1 is 1"),
    ],
)
def test_a_read_that_no_order_explains_is_found(wrong: Seen, problem: str) -> None:
    (found,) = violations(history(wrong))

    assert problem in found


def test_a_write_that_was_seen_and_is_gone_is_found() -> None:
    unacknowledged = replace(history(FIRST, SECOND, replace(FIRST, began=6.0, ended=7.0)), told={"1-1": 1.0})

    (found,) = violations(unacknowledged)

    assert "seen before, and gone: ['1-2']" in found
