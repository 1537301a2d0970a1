"""A simulated cluster: the real machines of brokers and sites on a virtual clock, network and disks, from one seed.

A run has a safety phase with faults, and a liveness phase without faults, in which everything in flight must end.
"""

from collections.abc import Callable
from random import Random

import msgspec

from tops.core.commit.epochs import EpochOptions
from tops.core.coordinator.rendezvous import RendezvousOptions
from tops.core.overlay.topology import Topology
from tops.core.participant.participation import SiteOptions, Wish
from tops.model.constraints import Predicate
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.model.log_points import BEGINNING
from tops.model.transactions import Scope
from tops.protocol.effects import Effect
from tops.protocol.messages import Definitions
from tops.sim.clock import Clock
from tops.sim.databases import CallbackDatabase, ReplicaDatabase
from tops.sim.faults import Faults, Nemesis
from tops.sim.history import History
from tops.sim.network import Network
from tops.sim.nodes import Liar, SimBroker, SimNode, SimSite
from tops.sim.site_app import SimSubscription, SiteApp
from tops.sim.trace import Trace
from tops.sim.workload import DEFINITIONS, KEYS, Workload

LIVENESS_S = 60.0
QUIET_S = 3  # for how long nothing must be open before the run counts as quiet


class World:
    """One simulated cluster and what happens in it."""

    def __init__(
        self, seed: int, faults: Faults | None = None, *, keep_trace: bool = False, empty: bool = False
    ) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.faults = faults if faults is not None else Faults()
        self.clock = Clock()
        self.trace = Trace(keep_trace)
        self.history = History()
        self.crashes = 0
        self.alarms: list[tuple[str, str, str]] = []
        self.predicates: dict[str, Predicate] = {}
        self.site_grace_s = 0.5
        # Apart from the rest, so that a run in which sites do not gather is not changed by the question.
        self.gathers = Random(f"{seed} gathers").random() < self.faults.gathering
        # Random clusters sometimes have small limits; scripted ones always have large ones.
        limits = Random(seed)

        def limit(*values: int) -> int:
            return values[-1] if empty else limits.choice(values)

        self.broker_options = RendezvousOptions(
            epochs=EpochOptions(
                members_max=limit(2, 8),
                attempts_max=limit(1, 3),
                sync_window_s=1.0,
                finish_window_s=1.0,
                join_gap=limit(0, 4),
            ),
            lease_s=4.0,
            keep_outcomes=limit(20, 10_000),
            log_tail=limit(1, 4, 64),
        )
        self.site_options = SiteOptions(
            renew_s=1.5, quiet_s=2.0, doubt_s=0.5, retry_s=1.0, give_up_s=20.0, log_credit=limit(2, 8)
        )
        self.network = Network(self)
        self.nemesis = Nemesis(self)
        self.workload = Workload(self, pace_s=0.08)
        self.brokers: dict[NodeId, SimBroker] = {}
        self.sites: dict[NodeId, SimSite] = {}
        self.replicas: list[NodeId] = []
        self.on_effect: Callable[[SimNode, Effect], None] = lambda node, effect: None
        if not empty:
            self._random_cluster()

    # -------------------------------------------------------------------------------------------------- construction

    def _random_cluster(self) -> None:
        rng = self.rng
        self.build_brokers(random_links(rng, rng.randint(3, 9)))
        names = [NodeId(f"s{i}") for i in range(1, rng.randint(3, 12) + 1)]
        self.replicas = names[: rng.choice([2, 3, 3])]
        for name in names:
            self.add_site(name, NodeId(rng.choice(list(self.brokers))))
        for name in names:
            app = self.sites[name].app
            self._random_subscriptions(app, name in self.replicas)
            if rng.random() < 0.5:
                self.enlist(app, CallbackDatabase(rng.random() < 0.3))
        for replica in self.replicas:
            database = self.sites[replica].app.subscriptions[1].database
            if isinstance(database, ReplicaDatabase):
                if rng.random() < self.faults.failing_replica / len(self.replicas):
                    database.failing_keys.add(rng.choice(KEYS))
                if rng.random() < self.faults.miscounting_replica / len(self.replicas):
                    database.miscounted_keys.add(rng.choice(KEYS))
        lies = Random(f"{self.seed} lies")  # a generator of its own, so that runs without a liar do not change
        if lies.random() < self.faults.lying_site:
            self.sites[lies.choice(names)].liar = Liar(lies)

    def build_brokers(self, links: dict[NodeId, list[NodeId]]) -> None:
        self.topology = Topology(links)
        for name in self.topology.brokers:
            self.brokers[name] = SimBroker(self, name)

    def add_site(self, name: NodeId, home: NodeId) -> SiteApp:
        app = SiteApp(self, self._publishes())
        self.sites[name] = SimSite(self, name, app)
        self.network.homes[name] = home
        return app

    def _publishes(self) -> tuple[Definitions, ...]:
        """The types that a site advertises: replicated writes always, and some of the others."""
        others = [name for name in DEFINITIONS if name != "set"]
        chosen = {"set", *self.rng.sample(others, 3)}
        return tuple(definitions for name, definitions in DEFINITIONS.items() if name in chosen)

    def _random_subscriptions(self, app: SiteApp, replica: bool) -> None:
        rng = self.rng
        everything = Filter.everything()
        if replica:
            name = f"replica-{rng.random()}"
            wish = Wish(DEFINITIONS["set"], everything, scope=Scope.DISTRIBUTED, durable=name, replica=BEGINNING)
            self._subscribe(app, wish, ReplicaDatabase())
        narrow = Filter.where("key", "in", list(rng.sample(KEYS, 2)))
        scopes = (Scope.DISTRIBUTED, Scope.DISTRIBUTED, Scope.LOCAL, Scope.NON_TRANSACTIONAL, Scope.NONE)
        if rng.random() < 0.8:
            prefers = tuple(rng.sample(scopes, rng.randint(1, 3)))
            plain = Wish(DEFINITIONS["plain"], rng.choice([everything, narrow]))
            self._subscribe(app, plain, CallbackDatabase(rng.random() < 0.3), prefers)
        if rng.random() < 0.6:
            other = Wish(DEFINITIONS["other"], everything, scope=rng.choice([Scope.DISTRIBUTED, Scope.LOCAL]))
            self._subscribe(app, other, CallbackDatabase(rng.random() < 0.3))
        if rng.random() < 0.2:
            child = Wish(DEFINITIONS["other.child"], narrow, scope=rng.choice([Scope.DISTRIBUTED, Scope.LOCAL]))
            self._subscribe(app, child, CallbackDatabase(rng.random() < 0.3))
        if rng.random() < 0.4:
            log = Wish(DEFINITIONS["log"], everything, durable=f"reader-{rng.random()}", start="oldest")
            self._subscribe(app, log, CallbackDatabase(False), (Scope.LOCAL,))

    def _subscribe(
        self,
        app: SiteApp,
        wish: Wish,
        database: CallbackDatabase | ReplicaDatabase,
        prefers: tuple[Scope, ...] = (Scope.DISTRIBUTED,),
    ) -> int:
        number = len(app.subscriptions) + 1
        if isinstance(database, CallbackDatabase) and database.compensatable:
            wish = msgspec.structs.replace(wish, compensatable=True)
        app.subscriptions[number] = SimSubscription(number, wish, database, prefers)
        return number

    subscribe = _subscribe

    def enlist(self, app: SiteApp, database: CallbackDatabase) -> int:
        """Enlist resources of a site in transactions that it begins."""
        number = self._subscribe(app, Wish(DEFINITIONS["plain"], Filter.nothing()), database)
        app.subscriptions[number].own = True
        return number

    # --------------------------------------------------------------------------------------------------------- access

    def node(self, name: NodeId) -> SimNode:
        return self.brokers.get(name) or self.sites[name]

    def nodes(self) -> list[SimNode]:
        return [*self.brokers.values(), *self.sites.values()]

    def apps(self) -> list[SiteApp]:
        return [s.app for s in self.sites.values()]

    def entropy(self, size: int) -> bytes:
        return self.rng.randbytes(size)

    def voter_owners(self) -> dict[str, NodeId | None]:
        """Every key under which a site has voted in this run."""
        return self.history.voters

    # --------------------------------------------------------------------------------------------------------- running

    def start(self) -> None:
        for node in self.nodes():
            node.start()

    def run(self, steps_max: int | None = None) -> None:
        """The whole run, or its first `steps_max` steps."""
        self.start()
        self.workload.start()
        self.nemesis.start()
        self.advance(self.faults.until_s, steps_max)
        self.workload.active = False
        self.nemesis.stop()
        self._until_quiet(steps_max)

    def advance(self, until: float, steps_max: int | None = None) -> None:
        self.clock.run(until, steps_max)

    def _until_quiet(self, steps_max: int | None) -> None:
        end = self.clock.now + LIVENESS_S
        quiet_for = 0
        while self.clock.now < end and quiet_for < QUIET_S:
            if steps_max is not None and self.clock.steps >= steps_max:
                return
            self.advance(self.clock.now + 1.0, steps_max)
            quiet_for = quiet_for + 1 if not self.open_work() else 0

    def settle(self, seconds: float = 30.0) -> None:
        """For scripted scenarios: run the cluster until nothing is open, or the time is over."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.advance(self.clock.now + 0.5)
            if not self.open_work():
                return

    def open_work(self) -> list[str]:
        """Everything that has not ended; in the liveness phase this must become empty."""
        found: list[str] = []
        for broker in self.brokers.values():
            rendezvous = broker.core.rendezvous
            found += [f"{broker.name} coordinates {tx}" for tx in rendezvous.coordinators]
            found += [f"{broker.name} relays {tx}" for tx in rendezvous.relays]
            for epochs in rendezvous.epochs.values():
                found += [f"{broker.name} has {e.id} in flight" for e in epochs.in_flight.values()]
                found += [f"{broker.name} has {r.tx} queued" for r in epochs.queue]
                found += [f"{broker.name} keeps {e}" for e in epochs.decided]
                held_back = epochs.log.held_back if epochs.log is not None else {}
                found += [f"{broker.name} holds {number} back from {voter}" for voter, number in held_back.items()]
        for site in self.sites.values():
            participation = site.core.participation
            found += [f"{site.name} executes {tx}" for tx in participation.executors]
            found += [f"{site.name} has prepared {e.memo.epoch}" for e in participation.epochs.values()]
            # A replica's slow database may still prepare an epoch that the coordinator no longer waits for.
            found += [f"{site.name} works on {r.memo.epoch}" for r in participation.subscribed.replicas if r.memo]
            # Only the reader knows a transaction from the log; the application's call in progress shows it.
            found += [f"{site.name} is at a call for {n}" for n, s in site.app.subscriptions.items() if s.busy]
            # A replica that has left also resolves its doubts, and a coordinator that lost its log's end responds late.
            held = [memo for s in site.app.subscriptions.values() for memo in s.database.memos()]
            found += [f"{site.name} holds {memo.epoch}" for memo in held]
            if site.app.open_requests():
                found.append(f"{site.name} has {site.app.open_requests()} requests open")
            found += self._open_replicas(site)
        return found

    def _open_replicas(self, site: SimSite) -> list[str]:
        found = []
        for s in site.app.subscriptions.values():
            if isinstance(s.database, ReplicaDatabase):
                coordinator = self.brokers[site.core.rendezvous("set")].core.rendezvous
                log = coordinator.logs.get("set")
                if log is not None and s.database.position < log.decided_upto:
                    found.append(f"{site.name} is at {s.database.position} of {log.decided_upto}")
        return found


def random_links(rng: Random, count: int) -> dict[NodeId, list[NodeId]]:
    """A chain, a star, a mesh or some tree."""
    names = [NodeId(f"b{i}") for i in range(1, count + 1)]
    shape = rng.choice(["chain", "star", "mesh", "tree"])
    links: dict[NodeId, list[NodeId]] = {n: [] for n in names}
    for i, name in enumerate(names[1:], start=1):
        match shape:
            case "chain":
                links[name].append(names[i - 1])
            case "star":
                links[name].append(names[0])
            case "mesh":
                links[name].extend(names[:i])
            case _:
                links[name].append(rng.choice(names[:i]))
    return links
