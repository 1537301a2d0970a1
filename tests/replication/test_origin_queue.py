"""The queue of an origin: identities in rotation, the requests of each in order."""

from typing import Any, cast

from replication.replica.origin.executor import CHAIN_MAX, _Queue, _Waiting


def waiting(who: str) -> _Waiting:
    nothing = cast(Any, None)
    return _Waiting(nothing, who, nothing, nothing)


def test_a_request_waits_for_one_of_each_other_identity_and_not_for_all_of_one() -> None:
    queue, many, one = _Queue(), [waiting("greedy") for _ in range(2 * CHAIN_MAX)], waiting("modest")
    for each in (*many, one):
        queue.append(each)

    chain = queue.take()

    assert chain[:3] == [many[0], one, many[1]]
    assert len(chain) == CHAIN_MAX


def test_who_comes_while_a_chain_is_executed_is_first_in_the_next_one() -> None:
    queue, many, late = _Queue(), [waiting("greedy") for _ in range(CHAIN_MAX + 1)], waiting("modest")
    for each in many:
        queue.append(each)
    queue.take()
    queue.append(late)

    assert queue.take() == [late, many[-1]]


def test_an_identity_that_is_executed_alone_shares_no_chain() -> None:
    queue, slow, others = _Queue(), [waiting("slow") for _ in range(2)], [waiting("a"), waiting("b")]
    queue.keep_alone(slow[:1])
    for each in (*others[:1], *slow, *others[1:]):
        queue.append(each)

    assert [queue.take() for _ in range(4)] == [others[:1], slow[:1], others[1:], slow[1:]]
    assert not queue
