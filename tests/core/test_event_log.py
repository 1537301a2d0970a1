"""Numbers of a log across crashes of its broker."""

from tops.core.log.event_log import EventLog
from tops.protocol.messages import LogEntry


def test_a_number_that_was_never_decided_is_found_however_little_of_the_log_is_in_memory() -> None:
    log = EventLog("set", 2, lambda name: (name,), tail_max=1)

    for number in (1, 2, 4, 5, 6):
        log.fill(LogEntry(number=number))

    assert log.missing_numbers() == [3]
    assert log.decided_upto == 2


def test_a_number_that_was_decided_after_later_ones_is_not_missing() -> None:
    log = EventLog("set", 2, lambda name: (name,), tail_max=1)

    for number in (2, 3, 1):
        log.fill(LogEntry(number=number))

    assert log.missing_numbers() == []
    assert log.decided_upto == 3
