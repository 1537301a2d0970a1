"""Who commits what after differing votes: a prepared database transaction commits as a whole."""

from tops.core.commit.ballot import ReadyTx, Verdict, count_votes
from tops.core.commit.census import Member
from tops.model.constraints import AnyConstraint, AtLeast, MinParticipants
from tops.model.ids import NodeId, Pseudonym, TxId
from tops.model.rejections import Rejection, RejectionCode
from tops.model.transactions import TxType
from tops.protocol.messages import Address, EpochId, EpochVoted, TxSpec

EPOCH = EpochId("set", 1, 1, NodeId("b"), 1)
T1, T2 = TxId("s.1.1"), TxId("s.1.2")
ANY: tuple[AnyConstraint, ...] = (MinParticipants(1),)


def ready(tx: TxId, constraints: tuple[AnyConstraint, ...]) -> ReadyTx:
    spec = TxSpec("set", TxType.DISTRIBUTED, constraints=constraints)
    return ReadyTx(tx, spec, Address(NodeId("b"), "s"), 1, (), ())


NO = Rejection(RejectionCode.PARTICIPANT_FAILED, "refused")


def vote(voter: str, rows: tuple[tuple[int, ...], ...], *excluded: TxId) -> EpochVoted:
    return EpochVoted(epoch=EPOCH, digest="", voter=voter, excluded=dict.fromkeys(excluded, NO), rows=rows)


def count(votes: list[EpochVoted], constraints: tuple[AnyConstraint, ...] = ANY, *, replicas: bool = True) -> Verdict:
    members = [ready(T1, constraints), ready(T2, constraints)]
    voters = {v.voter: Member(v.voter, Pseudonym(""), v.voter, Address(NodeId("b")), 1) for v in votes}
    by_voter = {v.voter: v for v in votes}
    return count_votes(members, voters, by_voter, {}, frozenset(voters), {}, majority_first=replicas)


def test_voters_that_changed_other_rows_never_commit_as_if_they_had_left_the_member_out() -> None:
    verdict = count([vote("a", ((1,), (1,))), vote("b", ((2,), (1,))), vote("c", ((3,), (1,)))])

    assert verdict.committing == {"a"}
    assert not verdict.excluded


def test_a_voter_with_other_rows_never_commits_with_one_that_left_the_member_out() -> None:
    verdict = count([vote("a", ((), (1,)), T1), vote("b", ((2,), (1,))), vote("c", ((1,), (1,)))])

    assert len(verdict.committing) == 1


def test_members_with_differing_rows_are_left_out_of_the_next_attempt_when_nobody_can_be_dropped() -> None:
    everyone = (AtLeast(3, frozenset("abc")),)
    verdict = count([vote("a", ((1,), (1,))), vote("b", ((2,), (1,))), vote("c", ((1,), (1,)))], everyone)

    assert verdict.again
    assert set(verdict.excluded) == {T1}
    assert verdict.divergent


def test_the_majority_with_equal_rows_commits_and_the_odd_one_is_dropped() -> None:
    verdict = count([vote("a", ((1,), (1,))), vote("b", ((2,), (1,))), vote("c", ((1,), (1,)))])

    assert verdict.committing == {"a", "c"}
    assert not verdict.excluded


def test_rows_that_are_told_for_excluded_members_do_not_separate_voters() -> None:
    verdict = count([vote("a", ((), (1,)), T1), vote("b", ((0,), (1,)), T1)])

    assert verdict.committing == {"a", "b"}
    assert set(verdict.excluded) == {T1}


def test_a_voter_that_counts_no_rows_goes_along_with_those_that_prepared_the_same_members() -> None:
    verdict = count([vote("a", ((1,), (1,))), vote("b", ()), vote("c", ((2,), (1,)))])

    assert verdict.committing == {"a", "b"}


def test_what_most_replicas_refuse_is_not_committed_at_the_one_that_accepts_it() -> None:
    verdict = count([vote("a", ((), ()), T1, T2), vote("b", ((), ()), T1, T2), vote("c", ((1,), (1,)))])

    assert not verdict.committing
    assert set(verdict.excluded) == {T1, T2}


def test_independent_participants_that_can_t_are_left_out_even_if_they_are_many() -> None:
    verdict = count([vote("a", (), T1, T2), vote("b", (), T1, T2), vote("c", ())], replicas=False)

    assert verdict.committing == {"c"}
