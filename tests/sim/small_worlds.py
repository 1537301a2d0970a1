"""Scripted clusters: three brokers in a chain, no faults but those that a test wants."""

from collections.abc import Callable
from typing import Any

from tops.core.participant.participation import Wish
from tops.model.ids import NodeId
from tops.model.transactions import Scope
from tops.protocol.effects import Effect
from tops.protocol.messages import Definitions
from tops.sim.databases import CallbackDatabase, ReplicaDatabase
from tops.sim.faults import Faults
from tops.sim.nodes import SimSite
from tops.sim.site_app import Script, SiteApp
from tops.sim.workload import DEFINITIONS
from tops.sim.world import World

ALL = tuple(DEFINITIONS.values())


class SmallWorld(World):
    """Sites are added by a test, then `begin` lets everybody meet."""

    def __init__(self, seed: int = 1, faults: Faults | None = None) -> None:
        super().__init__(seed, faults or Faults.none(), empty=True)
        b1, b2, b3 = (NodeId(f"b{i}") for i in (1, 2, 3))
        self.build_brokers({b1: [], b2: [b1], b3: [b2]})

    def site(self, name: str, broker: str, advertises: tuple[Definitions, ...] = ALL) -> SiteApp:
        app = SiteApp(self, advertises)
        self.sites[NodeId(name)] = SimSite(self, NodeId(name), app)
        self.network.homes[NodeId(name)] = NodeId(broker)
        return app

    def participant(self, app: SiteApp, wish: Wish, *prefers: Scope) -> CallbackDatabase:
        database = CallbackDatabase(False)
        self.subscribe(app, wish, database, prefers or (Scope.DISTRIBUTED,))
        return database

    def replica(self, app: SiteApp, wish: Wish) -> ReplicaDatabase:
        database = ReplicaDatabase()
        self.subscribe(app, wish, database)
        return database

    def begin(self) -> None:
        self.start()
        self.go(2.0)

    def go(self, seconds: float) -> None:
        self.advance(self.clock.now + seconds)

    def request(self, app: SiteApp, *asks: Callable[[int], list[Effect]]) -> list[Any]:
        """What the site answered, once it has; errors end the script."""
        registrations: list[Any] = []

        def script() -> Script:
            for request in asks:
                registrations.append((yield request))

        app.run(script())
        return registrations
