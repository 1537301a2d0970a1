"""What one change of a subscription costs a broker: a bounded number of comparisons, whatever the filters are."""

from collections.abc import Callable
from itertools import count
from time import process_time

import pytest

from tests.core.machines import sender
from tops.core.broker.broker import BrokerCore
from tops.core.overlay.topology import Topology
from tops.model.event_types import EventType
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.protocol.effects import Effect, Reject, SendOnLink
from tops.protocol.messages import RouteAdded, RouteRemoved, SubscriptionChanged

QUOTA = 10_000
COMPARISONS_MAX = 1_200  # of one change
SECONDS = 30.0  # for 20,000 changes; a machine that compared all with all would take hours

KINDS: dict[str, Callable[[int], Filter]] = {
    "one range": lambda n: Filter.where("a", ">=", n).where("a", "<=", 10**6 + n),
    "ranges": lambda n: (
        Filter.where("a", ">=", n).where("a", "<=", 10**6 + n).where("b", "!=", n).where("c", "prefix", f"p{n % 7}")
    ),
    "nested": lambda n: Filter.where("a", "range", (-n, n)),
    "equal": lambda n: Filter.where("a", "=", n),
    "unequal": lambda n: Filter.where("a", "!=", n),
    "rays": lambda n: Filter.where("a", ">", -n).where("b", ">", n),
    "several": lambda n: Filter.where("a", "in", [n, n + 2, n + 4]),
}
B1, B2, SITE = NodeId("b1"), NodeId("b2"), NodeId("s1")


class Upstream:
    """A broker with one site, and what its neighbour was told of the type that meets there."""

    def __init__(self) -> None:
        topology = Topology({B1: [B2], B2: []})
        self.core = BrokerCore(B1, 1, topology, bytes)
        self.core.broker_up(B2, 1, 0.0)
        self.core.site_up(sender(SITE), 0.0)
        name = next(n for n in (f"t{k}" for k in count()) if topology.rendezvous(n) == B2)
        self.definitions = (EventType(name, {"a": int, "b": int, "c": str}),)
        self.told: dict[Filter, None] = {}

    def subscribe(self, number: int, interest: Filter | None) -> None:
        changed = SubscriptionChanged(
            subscription=number, definitions=self.definitions, filter=interest, scope=None, durable=False
        )
        self.deliver(self.core.receive(SITE, changed, 0.0))

    def deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not isinstance(effect, Reject), effect
            if isinstance(effect, SendOnLink) and isinstance(effect.message, RouteAdded):
                assert effect.message.filter not in self.told
                self.told[effect.message.filter] = None
            elif isinstance(effect, SendOnLink) and isinstance(effect.message, RouteRemoved):
                del self.told[effect.message.filter]


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many filters were compared since the list was cleared."""
    compared: list[int] = []
    covers = Filter.covers

    def counted(one: Filter, other: Filter) -> bool:
        compared.append(1)
        return covers(one, other)

    monkeypatch.setattr(Filter, "covers", counted)
    return compared


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_ten_thousand_subscriptions_comes_and_goes_with_bounded_work(kind: str, comparisons: list[int]) -> None:
    upstream, began = Upstream(), process_time()
    for number in range(QUOTA):
        comparisons.clear()
        upstream.subscribe(number + 1, KINDS[kind](number))
        assert len(comparisons) <= COMPARISONS_MAX, f"change {number}"
    wanted = [KINDS[kind](number) for number in range(0, QUOTA, 97)]
    assert all(any(told.covers(each) for told in upstream.told) for each in wanted)
    for number in range(QUOTA):
        comparisons.clear()
        upstream.subscribe(number + 1, None)
        assert len(comparisons) <= COMPARISONS_MAX, f"end of {number}"

    assert upstream.told == {}
    assert process_time() - began < SECONDS


def test_a_broad_filter_that_comes_and_goes_over_many_narrow_ones_is_bounded_work(comparisons: list[int]) -> None:
    upstream = Upstream()
    for number in range(2_000):
        upstream.subscribe(number + 1, Filter.where("a", "=", number))
    for turn in range(200):
        comparisons.clear()
        upstream.subscribe(5_000, Filter.where("a", ">", -1 - turn % 3))
        upstream.subscribe(5_000, None)
        assert len(comparisons) <= 2 * COMPARISONS_MAX
        assert any(told.covers(Filter.where("a", "=", 1_999)) for told in upstream.told)


def test_long_lists_of_values_are_not_compared_with_each_other() -> None:
    upstream, began = Upstream(), process_time()
    for number in range(150):
        upstream.subscribe(number + 1, Filter.where("a", "in", list(range(number, 4_000, 2))))

    assert process_time() - began < SECONDS


def test_ends_of_many_sessions_leave_nothing_behind() -> None:
    upstream = Upstream()
    for number in range(3_000):
        upstream.subscribe(number + 1, KINDS["ranges"](number))

    upstream.deliver(upstream.core.site_lost(SITE, 1.0))

    assert upstream.told == {}
