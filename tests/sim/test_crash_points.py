"""A crash between any two effects, at every node, one at a time, each with a restart: all of them, for fixed scenarios.

Effects are data, so the places are counted in a run without a crash and then visited one by one. A new step of the
protocol is a new place, and is visited without anybody having to list it.
"""

from collections.abc import Callable

import pytest

from tests.sim.small_worlds import SmallWorld
from tops.core.participant.participation import Wish
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.model.log_points import BEGINNING
from tops.model.transactions import Scope
from tops.protocol.effects import Effect
from tops.sim.checkers import violations
from tops.sim.databases import CallbackDatabase
from tops.sim.nodes import SimNode
from tops.sim.site_app import Script, SiteApp
from tops.sim.workload import DEFINITIONS

SETTLED_S = 2.0
DOWN_S = 0.4
Scenario = Callable[[SmallWorld, SiteApp], Script]


def cluster() -> tuple[SmallWorld, SiteApp]:
    """Three brokers in a chain, a publisher, and two sites with a participant of every kind each."""
    world = SmallWorld(seed=5)
    publisher = world.site("p", "b3")
    everything = Filter.everything()
    for name, broker, compensatable in (("s1", "b1", False), ("s2", "b2", True)):
        app = world.site(name, broker)
        replica = Wish(DEFINITIONS["set"], everything, Scope.DISTRIBUTED, durable=f"r-{name}", replica=BEGINNING)
        world.replica(app, replica)
        world.subscribe(app, Wish(DEFINITIONS["plain"], everything), CallbackDatabase(compensatable))
        standing = Wish(DEFINITIONS["other"], everything, Scope.DISTRIBUTED)
        world.subscribe(app, standing, CallbackDatabase(compensatable))
        reader = Wish(DEFINITIONS["log"], everything, durable=f"d-{name}", start="oldest")
        world.subscribe(app, reader, CallbackDatabase(False), (Scope.LOCAL,))
    world.replicas = [NodeId("s1"), NodeId("s2")]
    return world, publisher


SCENARIOS: dict[str, Scenario] = {
    "interactive": lambda world, app: world.workload.interactive(app),
    "one_shot": lambda world, app: world.workload.one_shot(app),
    "replicated_write": lambda world, app: world.workload.one_shot_on_set(app),
    "durable_events": lambda world, app: world.workload.publish(app),
}


def run(scenario: Scenario, variant: int, crash_at: int | None) -> tuple[SmallWorld, int]:
    """The scenario, with a crash before the `crash_at`-th effect after the cluster has settled."""
    world, publisher = cluster()
    world.begin()
    world.rng.seed(variant)
    world.nemesis.active = False
    count = 0

    def on_effect(node: SimNode, effect: Effect) -> None:
        nonlocal count
        count += 1
        if count == crash_at:
            node.crash()
            world.clock.after(DOWN_S, node.start)

    world.on_effect = on_effect
    publisher.run(scenario(world, publisher))
    world.go(SETTLED_S)
    world.on_effect = lambda node, effect: None
    world.settle(40.0)
    return world, count


def visit(name: str, variant: int) -> int:
    """Every crash point of a scenario's variant; returns how many there are."""
    scenario = SCENARIOS[name]
    healthy, places = run(scenario, variant, None)
    assert violations(healthy, live=True) == []
    for place in range(1, places + 1):
        world, _ = run(scenario, variant, place)
        found = violations(world, live=True)
        assert found == [], f"{name}, variant {variant}, crash before effect {place}: {found[:3]}"
    return places


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_between_any_two_effects_breaks_no_promise(name: str, variant: int) -> None:
    assert visit(name, variant) >= 30


@pytest.mark.long
@pytest.mark.parametrize("variant", range(3, 20))
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_between_any_two_effects_breaks_no_promise_in_any_variant(name: str, variant: int) -> None:
    assert visit(name, variant) >= 30
