"""What is handed over in one event-loop iteration travels together, in order and within limits."""

from collections.abc import Sequence
from typing import Any

import pytest

from tops.core.client.gathering import EVENTS_MAX, GATHERED_BYTES_MAX, ONE_SHOTS_MAX, GatheredEvent, Gathering
from tops.model.errors import ProtocolError
from tops.model.transactions import TxType
from tops.protocol.effects import Effect
from tops.protocol.messages import Event, TxSpec

LOCAL, DISTRIBUTED = TxSpec("a", TxType.LOCAL), TxSpec("a", TxType.DISTRIBUTED)
EVENTS = (Event("a", {"key": "k"}),)


class Sent:
    """The batches that were handed to the publisher and to transactions."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []
        self.one_shots: list[tuple[TxSpec, list[int]]] = []
        self.gathering = Gathering(self._publish, self._execute)

    def _publish(self, event_type: str, events: Sequence[GatheredEvent]) -> list[Effect]:
        self.events.append((event_type, [request for request, _, _ in events]))
        return []

    def _execute(self, spec: TxSpec, one_shots: Sequence[tuple[int, Any]]) -> list[Effect]:
        self.one_shots.append((spec, [request for request, _ in one_shots]))
        return []


def test_nothing_is_sent_before_the_end_of_the_iteration_and_everything_once_then() -> None:
    sent = Sent()
    sent.gathering.add_event(1, "a", {"x": 1})
    sent.gathering.add_event(2, "a", {"x": 2})
    sent.gathering.add_one_shot(3, LOCAL, EVENTS, 10)
    assert (sent.events, sent.one_shots, sent.gathering.is_empty) == ([], [], False)

    sent.gathering.send()
    sent.gathering.send()

    assert sent.events == [("a", [1, 2])]
    assert sent.one_shots == [(LOCAL, [3])]
    assert sent.gathering.is_empty


def test_events_of_another_type_go_behind_those_before_them() -> None:
    sent = Sent()
    for request, event_type in enumerate(["a", "b", "b", "a"]):
        sent.gathering.add_event(request, event_type, {})

    sent.gathering.send()

    assert sent.events == [("a", [0]), ("b", [1, 2]), ("a", [3])]


def test_transactions_of_another_kind_go_behind_those_before_them() -> None:
    sent = Sent()
    for request, spec in enumerate([LOCAL, DISTRIBUTED, TxSpec("a", TxType.DISTRIBUTED), LOCAL]):
        sent.gathering.add_one_shot(request, spec, EVENTS, 10)

    sent.gathering.send()

    assert sent.one_shots == [(LOCAL, [0]), (DISTRIBUTED, [1, 2]), (LOCAL, [3])]


def test_a_message_takes_a_bounded_number_of_events_and_of_transactions() -> None:
    sent = Sent()
    for request in range(EVENTS_MAX + 1):
        sent.gathering.add_event(request, "a", {})
    for request in range(ONE_SHOTS_MAX + 1):
        sent.gathering.add_one_shot(request, LOCAL, EVENTS, 10)

    sent.gathering.send()

    assert [len(requests) for _, requests in sent.events] == [EVENTS_MAX, 1]
    assert [len(requests) for _, requests in sent.one_shots] == [ONE_SHOTS_MAX, 1]


def test_a_message_takes_a_bounded_number_of_bytes() -> None:
    sent = Sent()
    for request in range(3):
        sent.gathering.add_event(request, "a", {"text": "x" * (GATHERED_BYTES_MAX // 2 - 100)})
        sent.gathering.add_one_shot(request, LOCAL, EVENTS, GATHERED_BYTES_MAX // 2)

    sent.gathering.send()

    assert sent.events == [("a", [0, 1]), ("a", [2])]
    assert sent.one_shots == [(LOCAL, [0, 1]), (LOCAL, [2])]


def test_an_event_that_no_message_could_hold_is_rejected_and_nothing_is_lost() -> None:
    sent = Sent()
    sent.gathering.add_event(1, "a", {})

    with pytest.raises(ProtocolError):
        sent.gathering.add_event(2, "a", {"text": "x" * GATHERED_BYTES_MAX})
    sent.gathering.send()

    assert sent.events == [("a", [1])]
