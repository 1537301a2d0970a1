"""The tx coordinator: census, sequence, constraints, and the hand-over to an epoch."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.core.machines import BROKER, PUBLISHER, disseminated, event, member, of, sender, sent_messages, spec
from tops.core.commit.census import Census
from tops.core.coordinator.tx_coordinator import TxCoordinator
from tops.model.constraints import AnyConstraint, Deadline, MinParticipants
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import LocalOutcome, ScopeLimit, TxState
from tops.protocol.effects import CancelTimer, Effect, SetTimer
from tops.protocol.messages import (
    CensusOpened,
    LocalCommitOrdered,
    TxAbandoned,
    TxBegan,
    TxOpened,
    TxPublished,
)

TX = TxId("P.1.1")


def coordinator(*constraints: AnyConstraint, **properties: Any) -> TxCoordinator:
    wanted = spec(*constraints, **properties)
    return TxCoordinator(TX, wanted, sender("P"), PUBLISHER, Census(TX, wanted, {}), keep_events=False)


def active(*constraints: AnyConstraint, voters: str = "abc", **properties: Any) -> TxCoordinator:
    made = coordinator(*constraints, **properties)
    made.open(BROKER, 1, [])
    for key in voters:
        made.on_replied(member(key))
    made.close_census()
    assert made.state is TxState.ACTIVE
    return made


def published(sequence: int) -> TxPublished:
    return TxPublished(tx=TX, event_type="plain", sequence=sequence, event=event())


def test_opening_announces_the_transaction_and_sets_its_times() -> None:
    effects = coordinator(Deadline(7.0)).open(BROKER, 1, [])

    assert len(disseminated(effects, CensusOpened)) == 1
    assert {(t.key, t.after_s) for t in of(effects, SetTimer)} == {(("deadline", TX), 7.0), (("census", TX), 1.0)}


def test_standing_answers_count_at_once_and_may_close_the_census() -> None:
    made = coordinator(census=None)

    effects = made.open(BROKER, 1, [member("a"), member("b")])

    assert made.state is TxState.ACTIVE
    assert len(disseminated(effects, TxBegan)[0].members) == 2
    assert sent_messages(effects, TxOpened) == [TxOpened(tx=TX, state=TxState.ACTIVE, incarnation=1)]


def test_an_answer_after_the_census_is_too_late() -> None:
    made = active(voters="a")

    assert made.on_replied(member("late")) == []
    assert set(made.members) == {"a"}


def test_an_unfulfilled_census_abandons_and_tells_the_initiator() -> None:
    made = coordinator(MinParticipants(2))
    made.open(BROKER, 1, [])

    effects = made.close_census()

    assert made.state is TxState.CENSUS_UNFULFILLED
    assert len(disseminated(effects, TxAbandoned)) == 1
    assert sent_messages(effects, TxOpened)[0].state is TxState.CENSUS_UNFULFILLED
    assert made.close_census() == []


@pytest.mark.parametrize("wrong", [0, 2, 5])
def test_an_event_out_of_sequence_ends_the_transaction(wrong: int) -> None:
    made = active()

    effects = made.on_event(published(wrong))

    assert made.failed == Rejection(RejectionCode.INCOMPLETE, f"event {wrong} arrived after event 0")
    assert len(disseminated(effects, TxAbandoned)) == 1


def test_a_commit_request_that_counts_other_events_ends_the_transaction() -> None:
    made = active()
    made.on_event(published(1))

    made.commit(2)

    assert made.failed == Rejection(RejectionCode.INCOMPLETE, "1 of 2 events arrived")


def test_a_drop_out_that_the_constraints_allow_goes_on_without_it() -> None:
    made = active(MinParticipants(2))

    assert made.on_participant_lost("a", "died") == []
    assert set(made.members) == {"b", "c"}
    assert made.on_participant_lost("b", "died") != []
    assert made.failed == Rejection(RejectionCode.CONSTRAINTS_UNMET, "died: 1 of at least 2 participants")


def test_the_failure_of_the_publishers_own_resources_ends_the_transaction_whatever_the_constraints() -> None:
    made = coordinator(MinParticipants(1))
    made.open(BROKER, 1, [])
    made.on_replied(member("own", counts=False))
    made.on_replied(member("a"))
    made.close_census()

    made.on_participant_lost("own", "disk full")

    assert made.failed is not None


def test_a_drop_out_leaves_independent_locals_to_the_publishers_word() -> None:
    made = active()

    effects = made.on_participant_lost("a", "died")

    assert disseminated(effects, TxAbandoned)[0].distributed_only
    assert made.detached
    assert made.on_event(published(1)) == []
    assert len(disseminated(made.commit(1), LocalCommitOrdered)) == 1


@pytest.mark.parametrize(
    ("local_outcome", "on_request", "on_commit"),
    [(LocalOutcome.INDEPENDENT, 1, 0), (LocalOutcome.FOLLOWS, 0, 1)],
)
def test_local_subscribers_hear_on_the_request_or_on_the_decision(
    local_outcome: LocalOutcome, on_request: int, on_commit: int
) -> None:
    made = active(local_outcome=local_outcome)

    assert len(disseminated(made.commit(0), LocalCommitOrdered)) == on_request
    assert len(disseminated(made.settled(True), LocalCommitOrdered)) == on_commit


def test_what_is_handed_over_is_what_is_left_of_those_who_joined() -> None:
    made = active(MinParticipants(1))
    made.on_participant_lost("b", "died")
    made.commit(0)

    handed = made.ready()

    assert handed.members is not None
    assert set(handed.members) == {"a", "c"}
    assert made.joined == {"a", "b", "c"}


# ------------------------------------------------------------------------------------ every message in every state

INPUTS: dict[str, Callable[[TxCoordinator], list[Effect]]] = {
    "reply": lambda m: m.on_replied(member("z")),
    "census time": lambda m: m.close_census(),
    "event": lambda m: m.on_event(published(m.last_sequence + 1)),
    "wrong event": lambda m: m.on_event(published(m.last_sequence + 5)),
    "lost": lambda m: m.on_participant_lost("a", "died"),
    "lost stranger": lambda m: m.on_participant_lost("nobody", "died"),
    "commit": lambda m: m.commit(m.last_sequence),
    "commit with a gap": lambda m: m.commit(m.last_sequence + 1),
    "abort": lambda m: m.abort(Rejection(RejectionCode.ABORTED, "changed its mind")),
}


def _states() -> dict[str, Callable[[], TxCoordinator]]:
    def census() -> TxCoordinator:
        made = coordinator()
        made.open(BROKER, 1, [member("a")])
        return made

    def then(step: str) -> Callable[[], TxCoordinator]:
        def build() -> TxCoordinator:
            made = active()
            INPUTS[step](made)
            return made

        return build

    return {"census": census, "active": active, "committing": then("commit"), "detached": then("lost")} | {
        "aborted": then("abort"),
        "out of sequence": then("wrong event"),
    }


@pytest.mark.parametrize("state", _states())
@pytest.mark.parametrize("name", INPUTS)
def test_every_input_meets_every_state_without_a_second_end(state: str, name: str) -> None:
    made = _states()[state]()
    was_failed, was_committing = made.failed, made.state is TxState.COMMITTING

    effects = INPUTS[name](made)

    orders, abandons = disseminated(effects, LocalCommitOrdered), disseminated(effects, TxAbandoned)
    assert not (orders and abandons)
    if was_failed is not None and not made.detached and name != "abort":
        assert not sent_messages(effects, TxOpened)
    if was_committing and name != "abort":
        assert made.state is TxState.COMMITTING
        assert effects == []


def test_nothing_of_local_subscribers_is_left_to_say_where_the_limit_keeps_them_out() -> None:
    made = active(limit=ScopeLimit.DISTRIBUTED)

    effects = made.on_participant_lost("a", "died")

    assert not disseminated(effects, TxAbandoned)[0].distributed_only
    assert not made.detached
    assert of(effects, CancelTimer)
