"""The paper's algorithm blocks and loses events; ours does not. The paper's figures 2, 4 and 5."""

import random
from typing import Any

from tests.ordering.driven import Driven, spread
from tests.ordering.paper import Paper, random_run
from tops.sim.clock import Clock
from tops.sim.ordering.network import Network

FOUR = {"A": (0, 2, 3), "B": (0, 2, 3), "C": (1, 3), "D": (1, 3)}
FIGURE_4 = {"i": ("T1", "T2", "T3"), "j": ("T1", "T2"), "k": ("T2",)}
FIGURE_2 = {"s1": ("T1", "T3", "T4"), "s2": ("T1", "T2", "T5"), "s3": ("T2", "T3", "T4", "T5")}


class HeldNetwork(Network):
    """One line is held up until the test lets it go."""

    def __init__(self, clock: Clock, held: tuple[str, str]) -> None:
        super().__init__(clock, random.Random(0), 0.0, 0.0)
        self.held, self.waiting = held, list[tuple[Any, ...]]()

    def send(self, line, deliver, *args) -> None:  # type: ignore[no-untyped-def]
        if line[:2] == self.held:
            self.waiting.append((line, deliver, args))
        else:
            super().send(line, deliver, *args)


def test_the_papers_timestamps_overtake_each_other_and_a_subscriber_waits_in_a_circle() -> None:
    clock = Clock()
    network = HeldNetwork(clock, ("m1", "m0"))
    paper = Paper(4, {name: set(topics) for name, topics in FOUR.items()}, network)

    paper.publish(3, "e4")  # goes 4, 3, 2 and waits before 1
    clock.run(1.0)
    paper.publish(2, "e3")  # goes straight from 3 to 1
    clock.run(2.0)
    paper.publish(0, "e1")
    clock.run(3.0)
    for _, deliver, args in network.waiting:
        deliver(*args)
    clock.run(4.0)

    assert paper.subscribers["A"].received == []
    assert {event for _, _, event in paper.subscribers["A"].buffer} == {"e1", "e3", "e4"}


def test_the_same_events_are_delivered_where_every_line_passes_every_stage() -> None:
    names = ("T1", "T2", "T3", "T4")
    held = {name: tuple(names[t] for t in topics) for name, topics in FOUR.items()}
    cluster = Driven(spread(*names), subscribers=held)
    slow = (("b2", "b1"),)

    cluster.publish("T4", "e4")
    cluster.run(without=slow)
    cluster.publish("T3", "e3")
    cluster.run(without=slow)
    cluster.publish("T1", "e1")
    cluster.run()
    for name in held:
        cluster[name].take_all()

    assert cluster["A"].received == cluster["B"].received
    assert sorted(cluster["A"].received) == ["e1", "e3", "e4"]
    assert cluster["C"].received == cluster["D"].received == ["e4"]


def test_the_papers_algorithm_blocks_in_random_runs_without_any_change() -> None:
    assert any(random_run(seed, changes=0)[0] for seed in range(300))


def test_the_papers_algorithm_blocks_and_loses_events_when_subscriptions_change() -> None:
    runs = [random_run(seed, changes=4) for seed in range(100)]

    assert sum(blocked for blocked, _ in runs) >= 10
    assert any(lost for _, lost in runs)


def test_figure_2_events_share_entries_where_two_subscriptions_hold_both_types() -> None:
    cluster = Driven(spread("T1", "T2", "T3", "T4", "T5"), subscribers=FIGURE_2)

    for name in cluster.domain.types:
        cluster.publish(name, f"e of {name}")
        cluster.run()

    assert {name: set(cluster.timestamps[f"e of {name}"]) for name in cluster.domain.types} == {
        "T1": {0},
        "T2": {1, 4},
        "T5": {1, 4},
        "T3": {2, 3},
        "T4": {2, 3},
    }


def test_figure_4_a_subscription_that_grows_changes_the_groups() -> None:
    cluster = Driven(spread("T1", "T2", "T3"), subscribers=FIGURE_4)
    cluster.publish("T2", "e")
    cluster.publish("T3", "e'")
    cluster.run()
    assert set(cluster.timestamps["e"]) == {0, 1}
    assert set(cluster.timestamps["e'"]) == {2}

    cluster["k"].subscribe("T3")
    cluster.run()
    cluster.publish("T3", "e''")
    cluster.run()
    for name in FIGURE_4:
        cluster[name].take_all()

    assert set(cluster.timestamps["e''"]) == {1, 2}
    assert cluster["k"].received == ["e", "e''"], "what was published to T3 before the change is not for k"
    assert sorted(cluster["i"].received) == ["e", "e'", "e''"]
    assert cluster["i"].received[-1] == "e''"


def test_figure_5_an_event_that_comes_too_early_is_buffered() -> None:
    cluster = Driven(spread("T1", "T2"), subscribers={"j": ("T1", "T2"), "k": ("T1", "T2")})
    cluster.publish("T1", "e1")
    cluster.run()
    cluster.publish("T2", "e2")
    cluster.run()

    cluster["k"].take("e2")
    assert cluster["k"].received == []
    cluster["k"].take("e1")
    cluster["j"].take("e1", "e2")

    assert cluster["k"].received == cluster["j"].received == ["e1", "e2"]
