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
    opened = census()

    assert opened.add_reply(member("a"))
    assert not opened.add_reply(member("a", identity="somebody else"))
    assert [m.identity for m in opened.members.values()] == ["a"]


def test_answers_that_constraints_forbid_are_turned_away() -> None:
    opened = census(MaxParticipants(1), OnlyFrom(frozenset("ab")))

    assert not opened.add_reply(member("c"))
    assert opened.add_reply(member("a"))
    assert not opened.add_reply(member("b"))
    assert set(opened.members) == {"a"}


def test_an_initiators_own_resources_take_nobodys_place() -> None:
    opened = census(MaxParticipants(1), MinParticipants(1))
    opened.add_reply(member("own", counts=False))

    assert opened.unfulfilled() is not None
    assert opened.add_reply(member("a"))
    assert opened.unfulfilled() is None


def test_nobody_is_unfulfilled_without_constraints_and_fine_where_none_is_asked_for() -> None:
    assert census().unfulfilled() == Rejection(RejectionCode.CONSTRAINTS_UNMET, "no participant joined")
    assert census(MinParticipants(0)).unfulfilled() is None


def test_by_count_it_may_close_with_enough_answers_that_count() -> None:
    opened = census(policy=CensusPolicy(replies=2))
    opened.add_reply(member("own", counts=False))
    opened.add_reply(member("a"))
    assert not opened.may_close()

    opened.add_reply(member("b"))

    assert opened.may_close()


def test_by_condition_it_may_close_when_the_constraints_are_met_and_not_before() -> None:
    opened = census(Required(frozenset("b")), policy=CensusPolicy(when_met=True))
    opened.add_reply(member("a"))
    assert not opened.may_close()

    opened.add_reply(member("b"))

    assert opened.may_close()


def test_with_standing_answers_only_there_is_nothing_to_wait_for() -> None:
    only_standing = Census(TxId("P.1.1"), spec(census=None), {})

    assert only_standing.may_close()


@given(st.sets(st.text(min_size=1), max_size=20))
def test_the_published_list_lets_each_find_itself_and_shows_no_pseudonym(pseudonyms: set[str]) -> None:
    opened = census()
    for pseudonym in pseudonyms:
        opened.add_reply(member(pseudonym))

    published = opened.hashed_members()

    assert published == {hashed(p) for p in pseudonyms}
    assert published.isdisjoint(pseudonyms)
