"""Ordering domains: how large timestamps are and how fast the topic managers make them, beside the paper's figures.

The set-up is that of section 5 of *Efficient Notification Ordering for Geo-Distributed Pub/Sub Systems*: 1,000 topics
in five blocks of 200, each block at one broker; 10,000 clients with 10 topics each. Popularity follows a power law,
whose exponent is 1 + the shape that the paper names: with it the sizes of timestamps are the paper's. A random choice
is then among the five most popular topics (0.5 %) with 86 % in the geographic pattern, and among the first 400 (40 %)
with 97 % in the other; the paper has 80 % in both. A mean is over topics; events follow popularity, and theirs is
larger (`entries.*.per_event`).

Managers run in one process here, without brokers and sockets; what they pass to each other is encoded and decoded as on
a link. `timestamps` is per second of processor time of one core.

The paper does not state its law of popularity in full. The law here was selected from about eight because its means
are near the paper's, so agreement with the paper is a fit and no independent confirmation. A plain power law that gives
0.5 % or 40 % of the topics exactly 80 % of the subscriptions has means of about 24 and 119 entries.
"""

import time
from bisect import bisect
from collections import deque
from itertools import accumulate
from random import Random
from statistics import fmean, median, pstdev
from typing import Any

import msgspec

from bench.harness import say
from bench.machine import describe_machine, package_versions
from bench.results import Result, spread
from tops.core.ordering.managers import TopicManagers
from tops.model.ids import NodeId
from tops.model.ordering import OrderingDomain, Placement
from tops.protocol.effects import Effect, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    ChainPassed,
    ChainTaken,
    Event,
    KnownSubscription,
    Origin,
    Sender,
    StageOpening,
    Waiting,
)
from tops.runtime.garbage import collect_rarely

TOPICS, BROKERS, CLIENTS, PER_CLIENT = 1000, 5, 10_000, 10
SHAPES = {"geographic": 0.901, "spray": 0.349}
PAPER_ENTRIES = {"geographic": 17.0, "spray": 46.0}  # mean entries of a timestamp, figure 7
BATCH = 50  # events that are published before what stages pass to each other is sent


class Popularity:
    """Topics by a power law, the most popular one first."""

    def __init__(self, shape: float, seed: int) -> None:
        self.rng = Random(seed)
        self._sums = list(accumulate(rank ** -(1 + shape) for rank in range(1, TOPICS + 1)))

    def topic(self) -> int:
        return min(bisect(self._sums, self.rng.random() * self._sums[-1]), TOPICS - 1)

    def subscription(self, count: int) -> tuple[int, ...]:
        topics: set[int] = set()
        while len(topics) < count:
            topics.add(self.topic())
        return tuple(sorted(topics))


class Stages:
    """The topic managers of five brokers, and what is on its way between them."""

    def __init__(self, popularity: Popularity, clients: int, per_client: int) -> None:
        names = tuple(f"t{number}" for number in range(TOPICS))
        self.brokers = tuple(NodeId(f"b{number}") for number in range(BROKERS))
        placed = dict(zip(names, (self.brokers[n * BROKERS // TOPICS] for n in range(TOPICS)), strict=True))
        layout = self.layout = OrderingDomain("d", names, placement=Placement.SPREAD).layout(placed.__getitem__)
        self.managers = {b: TopicManagers(layout, b, 1, self._release) for b in self.brokers}
        self.done = self.entries = self.hops = self.bytes = 0
        self._todo: deque[tuple[NodeId, NodeId, bytes]] = deque()
        self._flushing: list[NodeId] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ChainPassed | ChainTaken)
        self._subscribe(popularity, clients, per_client)

    def _subscribe(self, popularity: Popularity, clients: int, per_client: int) -> None:
        for managers in self.managers.values():
            managers.groups.announced()
        for number in range(clients):
            topics = popularity.subscription(per_client)
            known = KnownSubscription(Address(self.brokers[0], f"s{number}", 1), 1, 1, topics)
            for broker in {self.layout.broker_of[topic] for topic in topics}:
                self.managers[broker].groups.store(known)
        for managers in self.managers.values():
            for topic in managers.numbered:
                managers.groups.for_next_event(topic)  # the first one has the whole domain
            if not managers.is_open:
                managers._open(StageOpening(clocks={}))

    def sizes(self) -> list[int]:
        """How many entries the timestamps of each topic have."""
        groups = (self.managers[self.layout.broker_of[t]].groups.of(t) for t in range(TOPICS))
        return [len(group.here) + len(group.lower) + len(group.higher) for group in groups]

    def publish(self, topic: int, waiting: Waiting) -> None:
        broker = self.layout.broker_of[topic]
        self._act(broker, self.managers[broker].publish(topic, waiting))

    def run(self) -> None:
        """Until every timestamp is complete."""
        while self._todo or self._flushing:
            flushing, self._flushing = self._flushing, []
            for broker in flushing:
                self._act(broker, self.managers[broker].on_timer("flush"))
            while self._todo:
                sender, to, encoded = self._todo.popleft()
                message = self._decoder.decode(encoded)
                managers = self.managers[to]
                if isinstance(message, ChainPassed):
                    self._act(to, managers.on_passed(message, sender))
                else:
                    managers.on_taken(message, sender)

    def _act(self, me: NodeId, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendTo):
                encoded = self._encoder.encode(effect.message)
                self.bytes += len(encoded)
                self._todo.append((me, effect.to.broker, encoded))
            elif isinstance(effect, SetTimer) and effect.key == ("ordering", "d", "flush"):
                self._flushing.append(me)

    def _release(self, topic: int, index: int, waiting: Waiting | None, entries: dict[int, int]) -> list[Effect]:
        self.done += 1
        self.entries += len(entries)
        return []


def run(quick: bool = False) -> Result:
    """Sizes of timestamps, and how many of them a core makes in a second."""
    collect_rarely()
    rounds, events = (3, 5_000) if quick else (7, 20_000)
    rows: list[dict[str, Any]] = []
    figures: dict[str, dict[str, Any]] = {}
    measures: dict[str, dict[str, float]] = {}
    for pattern, shape in SHAPES.items():
        means = [fmean(_stages(shape, seed).sizes()) for seed in range(rounds)]
        figures[f"agreement.{pattern}"] = _agreement(means, PAPER_ENTRIES[pattern])
        measures[f"entries.{pattern}"] = spread(means)
        say(f"{pattern}: {fmean(means):.1f} entries per timestamp, {PAPER_ENTRIES[pattern]:.0f} in the paper")
        rates, per_event = zip(*(_rate(shape, seed, events) for seed in range(rounds)), strict=True)
        measures[f"timestamps.{pattern}.per_cpu_s"] = spread(rates)
        measures[f"entries.{pattern}.per_event"] = spread(per_event)
        say(f"{pattern}: {median(rates):,.0f} timestamps per second of processor time")
    for pattern, shape in SHAPES.items():
        for per_client in (10, 20) if quick else (10, 20, 50, 100, 200):
            sizes = _stages(shape, 0, clients=2_000 if quick else CLIENTS, per_client=per_client).sizes()
            row = {"system": pattern, "workload": "entries per timestamp", "clients": per_client}
            rows.append({**row, "entries": round(fmean(sizes), 1), "deviation": round(pstdev(sizes), 1)})
            say(f"{pattern}, {per_client} topics per client: {fmean(sizes):.1f} entries")
    return {
        "name": "ordering",
        "machine": describe_machine(),
        "versions": package_versions(),
        "rows": rows,
        "figures": figures,
        "measures": measures,
        "left_out": ["timestamps per second of five broker processes, and the shares of bytes that leave a broker"],
    }


def _stages(shape: float, seed: int, clients: int = CLIENTS, per_client: int = PER_CLIENT) -> Stages:
    return Stages(Popularity(shape, seed), clients, per_client)


def _agreement(means: list[float], paper: float) -> dict[str, Any]:
    """The smaller of ours and the paper's divided by the larger."""
    ratios = [min(mean, paper) / max(mean, paper) for mean in means]
    sides = {"ours": round(median(means), 2), "theirs": paper, "runs": len(means)}
    return {
        "ratio": round(median(ratios), 3),
        **sides,
        "low": round(min(ratios), 3),
        "high": round(max(ratios), 3),
    }


def _rate(shape: float, seed: int, events: int) -> tuple[float, float]:
    """Timestamps per second of processor time, and their mean entries when topics are published to by popularity."""
    stages, popularity = _stages(shape, seed), Popularity(shape, seed + 1000)
    at = Address(NodeId("b0"), "p", 1)
    waiting = Waiting(Event("t", {}), Origin("t", 1), Sender("p", "writer", incarnation=1), at)
    topics = [popularity.topic() for _ in range(events)]
    start = time.process_time()
    for number, topic in enumerate(topics, start=1):
        stages.publish(topic, waiting)
        if number % BATCH == 0:
            stages.run()
    stages.run()
    took = time.process_time() - start
    assert stages.done == events
    return events / took, stages.entries / events
