"""What one simulated run consists of, drawn from its seed."""

from random import Random

import msgspec

from tops.model.ids import NodeId
from tops.model.ordering import Order, OrderingDomain, Placement, Unreliable


class OrderingFaults(msgspec.Struct, frozen=True):
    """Rates of what goes wrong, relative to the usual ones."""

    crash: float = 1.0  # of brokers
    site_crash: float = 1.0
    change: float = 1.0  # of subscriptions
    loss: float = 1.0  # of events on their way to a site, where the domain allows for it

    @classmethod
    def none(cls) -> "OrderingFaults":
        return cls(0.0, 0.0, 0.0, 0.0)


class Shape(msgspec.Struct):
    """Sizes and rates of one run."""

    domain: OrderingDomain
    brokers: tuple[NodeId, ...]
    broker_of: dict[str, NodeId]  # where each type meets
    sites: int
    events: int
    publish_every_s: float
    retry_s: float  # when sites repeat requests without a response
    slow_messages: float
    slow_links: float
    greedy: float  # the share of sites that subscribe to everything
    crashes: int
    site_crashes: int
    changes: int
    filters: float  # the share of subscriptions that have one
    loss: float
    checkpoints: int


def draw(seed: int, faults: OrderingFaults) -> Shape:
    """The run of a seed: most are small, since most mistakes show in small ones, and a few are large."""
    rng = Random(f"shape {seed}")
    large = rng.random() < 0.02
    topics = rng.randint(10, 50) if large else rng.choice((2, 2, 2, 3, 3, 4, 5, 8))
    sites = rng.randint(50, 200) if large else rng.choice((2, 3, 3, 4, 5, 6, 12))
    durable = rng.random() < 0.5
    lossy = not durable and rng.random() < 0.3 and faults.loss > 0
    unreliable = Unreliable(rng.choice((3, 50, 1000)), rng.choice((0.05, 0.3))) if lossy else None
    names = tuple(f"t{number}" for number in range(topics))
    domain = OrderingDomain("d", names, rng.choice((Order.TOTAL, Order.CAUSAL)), durable, Placement.SPREAD, unreliable)
    brokers = tuple(NodeId(f"b{number}") for number in range(rng.choice((1, 2, 3, 3, 4, 5))))
    troubled = rng.random() < 0.6
    return Shape(
        domain=domain,
        brokers=brokers,
        broker_of={name: rng.choice(brokers) for name in names},
        sites=sites,
        events=rng.randint(40, 80) if large else rng.randint(20, 200),
        publish_every_s=rng.choice((0.002, 0.005, 0.02)),
        slow_messages=rng.choice((0.0, 0.02, 0.2)),
        slow_links=rng.choice((0.0, 0.1, 0.3)),
        greedy=rng.choice((0.1, 0.5, 0.9)),
        retry_s=rng.choice((0.05, 0.2, 1.0)),
        crashes=round(faults.crash * rng.randint(0, 5)) if troubled else 0,
        site_crashes=round(faults.site_crash * rng.randint(0, 4)) if troubled else 0,
        changes=round(faults.change * rng.choice((0, 20, 60, 120))),
        filters=rng.choice((0.0, 0.3)),
        loss=0.05 * faults.loss if lossy else 0.0,
        checkpoints=rng.randint(0, 3),
    )


def draw_quiet(seed: int, crashes: int = 0) -> Shape:
    """Few types, each at its own broker, few sites, few events at a time. Where many events are under way, each of them
    waits for others anyway, and hides that one lacks an entry."""
    rng = Random(seed)
    topics = rng.choice((2, 2, 3))
    names = tuple(f"t{number}" for number in range(topics))
    brokers = tuple(NodeId(f"b{number}") for number in range(topics))
    return Shape(
        domain=OrderingDomain("d", names, Order.TOTAL, durable=False, placement=Placement.SPREAD),
        brokers=brokers,
        broker_of=dict(zip(names, brokers, strict=True)),
        sites=rng.choice((2, 3, 3)),
        events=200,
        publish_every_s=0.08,
        retry_s=rng.choice((0.02, 0.2)),
        slow_messages=rng.choice((0, 0.02)),
        slow_links=0.3,
        greedy=0.9,
        crashes=crashes,
        site_crashes=0,
        changes=0 if crashes else 60,
        filters=0,
        loss=0,
        checkpoints=0,
    )
