import pytest
from hypothesis import given
from hypothesis import strategies as st

from tops.model.errors import ConfigError, LimitExceeded, ProtocolError
from tops.security import ConnectionBudget, FrameLimits, KeyedBuckets, TokenBucket
from tops.security.limits import network_of


@pytest.mark.parametrize("size", [0, -1, 8193, 2**31, 2**32 + 1])
def test_a_frame_beyond_the_limit_is_refused_before_authentication(size: int) -> None:
    with pytest.raises(ProtocolError, match=str(size)):
        FrameLimits().check(size, authenticated=False)


def test_an_authenticated_peer_may_send_more_but_not_without_end() -> None:
    limits = FrameLimits(before_authentication=10, after_authentication=100)

    limits.check(100, authenticated=True)

    with pytest.raises(ProtocolError):
        limits.check(101, authenticated=True)
    with pytest.raises(ProtocolError):
        limits.check(11, authenticated=False)


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=2, burst=4, now=0)

    assert [bucket.take(1, 0) for _ in range(5)] == [True] * 4 + [False]
    assert bucket.wait_s(1, 0) == 0.5
    assert bucket.take(1, 0.5)
    assert not bucket.take(1, 0.5)


def test_more_than_the_burst_never_comes() -> None:
    assert TokenBucket(1, 2, 0).wait_s(3, 1000) == float("inf")


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), max_size=60))
def test_no_schedule_gets_more_than_burst_plus_rate_times_time(steps: list[tuple[float, float]]) -> None:
    bucket, now, taken = TokenBucket(rate=3, burst=5, now=0), 0.0, 0.0

    for wait, amount in steps:
        now += wait
        taken += amount if bucket.take(amount, now) else 0

    assert taken <= 5 + 3 * now + 1e-6


@given(st.lists(st.floats(-100, 100), max_size=40))
def test_a_clock_that_goes_back_gives_nothing(times: list[float]) -> None:
    bucket = TokenBucket(rate=1, burst=1, now=0)

    taken = sum(bucket.take(1, now) for now in times)

    assert taken <= 1 + max([0.0, *times])


def test_a_clock_that_goes_back_takes_nothing() -> None:
    bucket = TokenBucket(rate=1, burst=2, now=100)

    assert [bucket.take(1, 0) for _ in range(3)] == [True, True, False]


def test_keys_have_separate_buckets_in_bounded_memory() -> None:
    buckets = KeyedBuckets(rate=1, burst=1, keys_max=100)

    assert buckets.take("a", 1, 0)
    assert buckets.take("b", 1, 0)
    with pytest.raises(LimitExceeded) as rejected:
        buckets.check("a", 1, 0.25)
    for n in range(1000):
        buckets.take(n, 1, 0)

    assert rejected.value.wait_s == 0.75
    assert len(buckets) == 100


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1)])
def test_a_limit_of_nothing_is_a_mistake(rate: float, burst: float) -> None:
    with pytest.raises(ConfigError):
        TokenBucket(rate, burst, 0)


def test_one_address_can_not_take_all_places() -> None:
    budget = ConnectionBudget(per_address=2, total=3, per_second=100)
    first = budget.admit("192.0.2.1", 0)
    budget.admit("192.0.2.1", 0)

    with pytest.raises(LimitExceeded, match=r"192\.0\.2\.1"):
        budget.admit("192.0.2.1", 0)
    assert budget.admit("192.0.2.2", 0).displaced is None
    assert budget.admit("192.0.2.3", 0).displaced == first.number
    with pytest.raises(LimitExceeded, match="3 connections wait"):
        budget.admit("192.0.2.4", 0)
    assert budget.waiting == 3


def test_who_waits_for_long_leaves_its_place_to_a_newcomer_from_the_same_address() -> None:
    budget = ConnectionBudget(per_address=2, total=10, per_second=100, sure_s=1.0)
    first, second = budget.admit("192.0.2.1", 0), budget.admit("192.0.2.1", 0.5)

    with pytest.raises(LimitExceeded, match=r"192\.0\.2\.1"):
        budget.admit("192.0.2.1", 0.9)

    assert budget.admit("192.0.2.1", 1.0).displaced == first.number
    budget.release(first)
    assert budget.admit("192.0.2.1", 1.6).displaced == second.number
    assert budget.waiting == 2


def test_an_identity_has_so_many_connections_and_no_more() -> None:
    budget = ConnectionBudget(per_identity=2)
    budget.identify("alice")
    budget.identify("alice")

    with pytest.raises(LimitExceeded, match="alice has 2 connections"):
        budget.identify("alice")
    budget.identify("bob")
    budget.leave("alice")

    budget.identify("alice")


def test_releasing_twice_frees_one_place() -> None:
    budget = ConnectionBudget(per_address=2, total=10, per_second=100)
    ticket = budget.admit("192.0.2.1", 0)
    budget.admit("192.0.2.1", 0)

    budget.release(ticket)
    budget.release(ticket)

    assert budget.waiting == 1
    budget.admit("192.0.2.1", 0)
    with pytest.raises(LimitExceeded):
        budget.admit("192.0.2.1", 0)


def test_connecting_over_and_over_is_slowed_down_though_each_leaves() -> None:
    budget = ConnectionBudget(per_address=5, total=10, per_second=5)

    for _ in range(5):
        budget.release(budget.admit("192.0.2.1", 0))

    with pytest.raises(LimitExceeded, match="per second"):
        budget.admit("192.0.2.1", 0)
    budget.release(budget.admit("192.0.2.1", 1))


def test_a_handshake_that_takes_too_long_is_named() -> None:
    budget = ConnectionBudget(wait_s=10)
    slow, quick = budget.admit("192.0.2.1", 0), budget.admit("192.0.2.1", 0)
    budget.release(quick)
    budget.admit("192.0.2.1", 5)

    assert budget.overdue(9.9) == []
    assert budget.overdue(10) == [slow]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1:1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
    ],
)
def test_addresses_that_one_party_holds_count_as_one(address: str, network: str) -> None:
    assert network_of(address) == network
