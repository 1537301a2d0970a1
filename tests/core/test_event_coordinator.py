"""The event coordinator: the only place where sequence numbers are made."""

import pytest

from tests.core.machines import event
from tops.core.coordinator.event_coordinator import EventCoordinator
from tops.model.errors import TransactionClosed
from tops.model.ids import NodeId, TxId
from tops.model.transactions import TxState

ENDED = (TxState.COMMITTING, TxState.COMMITTED, TxState.ABORTED, TxState.CENSUS_UNFULFILLED)


def coordinator() -> EventCoordinator:
    return EventCoordinator(TxId("P.1.1"), "plain")


def test_events_are_numbered_from_one_without_gaps_under_the_transactions_type() -> None:
    numbering = coordinator()
    numbering.open()

    published = [numbering.admit(event(mark)) for mark in ("a", "b", "c")]

    assert [p.sequence for p in published] == [1, 2, 3]
    assert {p.event_type for p in published} == {"plain"}
    assert [p.event.body["mark"] for p in published] == ["a", "b", "c"]


def test_no_event_is_admitted_before_the_census_has_ended() -> None:
    numbering = coordinator()

    with pytest.raises(TransactionClosed, match="census"):
        numbering.admit(event())
    assert numbering.last_sequence == 0


@pytest.mark.parametrize("state", ENDED)
def test_no_event_is_admitted_after_the_end_and_opening_again_does_not_help(state: TxState) -> None:
    numbering = coordinator()
    numbering.open()
    numbering.admit(event())
    numbering.close(state)

    numbering.open()

    with pytest.raises(TransactionClosed, match=state.value):
        numbering.admit(event())
    assert numbering.last_sequence == 1


def test_a_public_publisher_is_remembered_with_its_requests() -> None:
    numbering = coordinator()
    numbering.open()

    numbering.admit(event("a"), (NodeId("P"), 1), 7)
    numbering.admit(event("b"), (NodeId("Q"), 2), 7)

    assert numbering.publishing == {(NodeId("P"), 1), (NodeId("Q"), 2)}
    assert numbering.admitted == {(NodeId("P"), 1, 7): 1, (NodeId("Q"), 2, 7): 2}
