"""The census: who takes part."""

from hypothesis import given
from hypothesis import strategies as st

from tests.core.machines import member, spec
from tops.core.commit.census import Census
from tops.model.constraints import AnyConstraint, MaxParticipants, MinParticipants, OnlyFrom, Required
from tops.model.ids import TxId, hashed
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.messages import CensusPolicy


def census(*constraints: AnyConstraint, policy: CensusPolicy | None = None) -> Census:
    return Census(TxId("P.1.1"), spec(*constraints, census=policy or CensusPolicy()), {})


def test_a_repeated_answer_changes_nothing() -> None:
    asked = census()

    assert asked.answer(member("a"))
    assert not asked.answer(member("a", identity="somebody else"))
    assert [m.identity for m in asked.members.values()] == ["a"]


def test_answers_that_constraints_forbid_are_turned_away() -> None:
    asked = census(MaxParticipants(1), OnlyFrom(frozenset("ab")))

    assert not asked.answer(member("c"))
    assert asked.answer(member("a"))
    assert not asked.answer(member("b"))
    assert set(asked.members) == {"a"}


def test_an_initiators_own_resources_take_nobodys_place() -> None:
    asked = census(MaxParticipants(1), MinParticipants(1))
    asked.answer(member("own", counts=False))

    assert asked.unfulfilled() is not None
    assert asked.answer(member("a"))
    assert asked.unfulfilled() is None


def test_nobody_is_unfulfilled_without_constraints_and_fine_where_none_is_asked_for() -> None:
    assert census().unfulfilled() == Rejection(RejectionCode.CONSTRAINTS_UNMET, "nobody joined")
    assert census(MinParticipants(0)).unfulfilled() is None


def test_by_count_it_may_close_with_enough_answers_that_count() -> None:
    asked = census(policy=CensusPolicy(replies=2))
    asked.answer(member("own", counts=False))
    asked.answer(member("a"))
    assert not asked.may_close()

    asked.answer(member("b"))

    assert asked.may_close()


def test_by_condition_it_may_close_when_the_constraints_are_met_and_not_before() -> None:
    asked = census(Required(frozenset("b")), policy=CensusPolicy(when_met=True))
    asked.answer(member("a"))
    assert not asked.may_close()

    asked.answer(member("b"))

    assert asked.may_close()


def test_with_standing_answers_only_there_is_nothing_to_wait_for() -> None:
    only_standing = Census(TxId("P.1.1"), spec(census=None), {})

    assert only_standing.may_close()


@given(st.sets(st.text(min_size=1), max_size=20))
def test_the_published_list_lets_each_find_itself_and_shows_no_pseudonym(pseudonyms: set[str]) -> None:
    asked = census()
    for pseudonym in pseudonyms:
        asked.answer(member(pseudonym))

    published = asked.hashed_members()

    assert published == {hashed(p) for p in pseudonyms}
    assert published.isdisjoint(pseudonyms)
