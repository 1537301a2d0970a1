"""Counting votes: pure, so that every case can be put as a table, and every rule as a property."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.machines import BROKER, member, members, ready
from tops.core.commit.ballot import ReadyTx, Verdict, count_votes, shortfall
from tops.model.constraints import AtLeast, MinParticipants, unmet
from tops.model.ids import TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.protocol.messages import EpochId, EpochVoted

EPOCH = EpochId("plain", 1, 1, BROKER, 1)


def vote(key: str, *excluded: str, rows: tuple[tuple[int, ...], ...] = ()) -> EpochVoted:
    why = {TxId(tx): Rejection(RejectionCode.PARTICIPANT_FAILED, f"{key} can't") for tx in excluded}
    return EpochVoted(epoch=EPOCH, digest="d", voter=key, excluded=why, rows=rows)


def count(
    ready_ones: list[ReadyTx],
    votes: Mapping[str, EpochVoted],
    lost: Mapping[str, str] | None = None,
    *,
    majority_first: bool = True,
) -> Verdict:
    missing = lost or {}
    everyone = members([*votes, *missing])
    return count_votes(ready_ones, everyone, votes, missing, frozenset(everyone), {}, majority_first=majority_first)


def summary(verdict: Verdict) -> tuple[set[str], set[str], bool]:
    """Who commits, which members are left out, and whether it is tried again."""
    return set(verdict.committing), set(verdict.excluded), verdict.again


def by_key(*votes: EpochVoted) -> dict[str, EpochVoted]:
    return {v.voter: v for v in votes}


def test_when_all_say_yes_all_commit() -> None:
    verdict = count([ready("t1"), ready("t2")], by_key(vote("a"), vote("b")))

    assert summary(verdict) == ({"a", "b"}, set(), False)


def test_members_that_all_exclude_are_left_out_in_the_same_attempt() -> None:
    verdict = count([ready("t1"), ready("t2")], by_key(vote("a", "t2"), vote("b", "t2")))

    assert summary(verdict) == ({"a", "b"}, {"t2"}, False)


def test_the_odd_one_out_is_dropped_where_constraints_allow() -> None:
    need_two = MinParticipants(2)
    verdict = count(
        [ready("t1", None, need_two), ready("t2", None, need_two)], by_key(vote("a"), vote("b"), vote("c", "t1"))
    )

    assert summary(verdict) == ({"a", "b"}, set(), False)


def test_where_nobody_can_be_spared_the_member_goes_and_the_rest_is_tried_again() -> None:
    verdict = count([ready("t1"), ready("t2")], by_key(vote("a"), vote("b", "t1")))

    assert summary(verdict) == ({"a", "b"}, {"t1"}, True)


def test_who_is_gone_is_missing_for_those_that_need_it_and_for_no_other() -> None:
    needs_three, needs_two = ready("t1", None, MinParticipants(3)), ready("t2", None, MinParticipants(2))

    verdict = count([needs_three, needs_two], by_key(vote("a"), vote("b")), {"c": "died"})

    assert set(verdict.excluded) == {"t1"}
    assert "c: died" in verdict.excluded[TxId("t1")].text
    assert verdict.again


def test_if_nothing_is_left_nobody_commits() -> None:
    verdict = count([ready("t1")], by_key(vote("a")), {"b": "died"})

    assert summary(verdict) == (set(), {"t1"}, False)


def test_replicas_follow_the_majority_and_independent_participants_who_excludes_least() -> None:
    one = MinParticipants(1)
    votes = by_key(vote("a"), vote("b", "t1"), vote("c", "t1"))
    both = [ready("t1", None, one), ready("t2", None, one)]

    assert count(both, votes, majority_first=True).committing == {"b", "c"}
    assert count(both, votes, majority_first=False).committing == {"a"}


def test_rows_that_differ_are_differing_exclusions_and_are_reported() -> None:
    verdict = count(
        [ready("t1", None, MinParticipants(2))],
        by_key(vote("a", rows=((1,),)), vote("b", rows=((1,),)), vote("c", rows=((0,),))),
    )

    assert verdict.committing == {"a", "b"}
    assert len(verdict.divergent) == 1


def test_equal_totals_of_different_changes_are_a_difference() -> None:
    verdict = count(
        [ready("t1", None, MinParticipants(1))],
        by_key(vote("a", rows=((1, 0),)), vote("b", rows=((1, 0),)), vote("c", rows=((0, 1),))),
    )

    assert verdict.committing == {"a", "b"}


def test_a_voter_with_other_rows_has_prepared_the_member_and_never_commits_without_it() -> None:
    """Its prepared work commits as a whole: left to commit, it would apply a member that aborted everywhere."""
    needs_any, needs_b = ready("t1", None, MinParticipants(1)), ready("t2", None, AtLeast(1, frozenset("b")))

    verdict = count([needs_any, needs_b], by_key(vote("a", rows=((1,), (1,))), vote("b", rows=((2,), (1,)))))

    assert verdict.again or "b" not in verdict.committing or not verdict.excluded


def test_without_the_publishers_own_resources_nothing_commits() -> None:
    one = ready("t1", "a", MinParticipants(1))
    assert one.members is not None
    one.members["own"] = member("own", counts=False)

    assert shortfall(one, frozenset({"a", "own"}), members("a"), {}) is not None
    assert shortfall(one, frozenset({"a", "own"}), dict(one.members), {}) is None


@st.composite
def ballots(draw: Any) -> tuple[list[ReadyTx], dict[str, EpochVoted], dict[str, str], bool]:
    keys = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True))
    names = ["t1", "t2", "t3"][: draw(st.integers(1, 3))]
    constraint = st.sampled_from(
        [(), (MinParticipants(1),), (MinParticipants(2),), (MinParticipants(4),), (AtLeast(1, frozenset("b")),)]
    )
    ones = [ready(name, None, *draw(constraint)) for name in names]
    votes: dict[str, EpochVoted] = {}
    lost: dict[str, str] = {}
    for key in keys:
        if draw(st.booleans()) or not votes:
            rows = tuple((draw(st.sampled_from([1, 1, 1, 2])),) for _ in names)
            votes[key] = vote(key, *draw(st.lists(st.sampled_from(names), unique=True)), rows=rows)
        else:
            lost[key] = "died"
    return ones, votes, lost, draw(st.booleans())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ballots())
def test_whatever_the_votes_those_who_commit_prepared_the_same_and_constraints_hold_among_them(
    ballot: tuple[list[ReadyTx], dict[str, EpochVoted], dict[str, str], bool],
) -> None:
    ones, votes, lost, majority_first = ballot

    verdict = count(ones, votes, lost, majority_first=majority_first)

    left = [r for r in ones if r.tx not in verdict.excluded]
    assert verdict.committing <= votes.keys()
    if verdict.again:
        assert left
        assert len(left) < len(ones)  # each attempt is smaller, so it ends
        return
    for key in verdict.committing:
        # What a voter has prepared commits as a whole: it must be what the verdict lets commit, no more and no less.
        assert set(votes[key].excluded) == set(verdict.excluded)
    for one in left if verdict.committing else []:
        assert len({votes[key].rows[ones.index(one)] for key in verdict.committing}) == 1
        if lost or verdict.committing != votes.keys():
            assert unmet(one.spec.constraints, sorted(verdict.committing), {}) is None
    assert verdict.committing or not left
