"""A simulated cluster with tree routing: brokers in a tree or a mesh, groups that dispatch work, and other clients.

Half of the runs are *calm*: links between brokers break, brokers pause, applications abort and fail, but no node loses
its memory and no site leaves. There every single publication is accounted for. In the others everything happens; what
is checked there is that all agree in the end. Some calm runs are *undisturbed*: nothing is in the way of a transaction.

With a wait instead of a kind there are no transactions: the environment waits so long before it publishes the update.
"""

from collections.abc import Callable

import msgspec

from tops.core.routing_tx.broker import TreeBroker
from tops.model.ids import NodeId
from tops.model.routing import RouteKey, RouteKind, TxKind
from tops.protocol.records import RoutingTxCommitted
from tops.sim.faults import Faults
from tops.sim.nodes import SimSite
from tops.sim.routing.apps import UPDATE, Agent, Dispatcher, Environment, Free, Observer, TreeApp, of_item
from tops.sim.routing.history import RoutingHistory, Update
from tops.sim.world import World, random_links

PACE_S = 0.12
UPDATE_EVERY_S = 0.05
LIVENESS_S = 40.0
LOOK_S = 0.25
PAST_TIMEOUT_S = 0.05


class RoutingFaults(msgspec.Struct, frozen=True):
    """What goes wrong besides what `Faults` says; chances are per occasion."""

    calm: float = 0.6  # chance that a run is calm
    undisturbed: float = 0.1  # chance that a calm run is undisturbed
    cut: float = 1.5  # broken links between brokers, per second of a calm run
    pause: float = 0.5  # pauses of brokers, per second of a calm run
    aborts: float = 0.1
    failures: float = 0.05  # of participants at a tcm


class RoutingWorld(World):
    """One simulated cluster, whose transactions are of one kind."""

    def __init__(
        self,
        seed: int,
        kind: TxKind,
        routing_faults: RoutingFaults | None = None,
        *,
        wait_s: float | None = None,
        keep_trace: bool = False,
    ) -> None:
        """With `wait_s` there are no transactions, whatever the kind."""
        chosen = routing_faults if routing_faults is not None else RoutingFaults()
        super().__init__(seed, Faults.none(), keep_trace=keep_trace, empty=True)
        self.kind, self.routing_faults = kind, chosen
        self.seen = RoutingHistory()
        self.wait_s = wait_s
        self.calm = wait_s is not None or self.rng.random() < chosen.calm
        self.undisturbed = wait_s is not None or (self.calm and self.rng.random() < chosen.undisturbed)
        self.faults = _faults(calm=self.calm)
        self.aborts, self.failures = (0.0, 0.0) if self.undisturbed else (chosen.aborts, chosen.failures)
        self.groups: dict[int, list[NodeId]] = {}  # environments
        self.dispatchers: dict[int, NodeId] = {}
        self.agents: dict[int, list[NodeId]] = {}
        self.free: list[NodeId] = []
        self.observers: list[NodeId] = []
        self.items = 2
        self._marks = 0
        self._active = True
        self.build()

    # -------------------------------------------------------------------------------------------------- construction

    def build(self) -> None:
        """Brokers and clients, at random places."""
        rng = self.rng
        self.build_brokers(random_links(rng, rng.choice([1, 2, 3, 3, 4, 5])))
        for group in range(rng.choice([1, 1, 2])):
            # Two that invoke the same items are in each other's way: only isolated transactions can bear that.
            many = 2 if self.kind is TxKind.ISOLATED and not self.undisturbed and rng.random() < 0.5 else 1
            self.groups[group] = [self.place(f"e{group}{i}", Environment(self, group, self.items)) for i in range(many)]
            self.dispatchers[group] = self.place(f"d{group}", Dispatcher(self, group, self.items))
            self.agents[group] = [self.place(f"a{group}{i}", Agent(self, group)) for i in range(2)]
        if self.undisturbed:
            return
        if self.kind is not TxKind.STATIC:
            self.free = [NodeId(f"f{i}") for i in range(rng.choice([0, 2, 3]))]
            for name in self.free:
                self.place(name, Free(self, name))
        self.observers = [self.place(f"o{i}", Observer(self)) for i in range(rng.choice([0, 1]))]

    def place(self, name: str, app: TreeApp, broker: str | None = None) -> NodeId:
        """A site with its application, at this broker or at a random one."""
        site = NodeId(name)
        self.sites[site] = SimSite(self, site, app)
        self.network.homes[site] = NodeId(self.rng.choice(list(self.brokers)) if broker is None else broker)
        return site

    # --------------------------------------------------------------------------------------------------------- access

    def app(self, name: NodeId) -> TreeApp:
        app = self.sites[name].app
        assert isinstance(app, TreeApp)
        return app

    def tree(self, broker: NodeId) -> TreeBroker:
        return self.brokers[broker].core.tree

    def mark(self) -> str:
        """A name for one event."""
        self._marks += 1
        return f"m{self._marks}"

    def published(self, mark: str, group: int, item: int) -> None:
        self.seen.updates.append(Update(mark, group, item, self.clock.now))

    def holders(self, group: int, item: int) -> list[tuple[NodeId, RouteKey]]:
        """Who has committed subscriptions to an item's updates, of the group's dispatcher and agents."""
        found = []
        for name in (self.dispatchers[group], *self.agents[group]):
            if self.sites[name].up:
                number = self.app(name).owned(UPDATE, of_item(group, item))
                if number is not None:
                    found.append((name, self.app(name).key(number)))
        return found

    def next_holder(self, group: int, item: int) -> tuple[NodeId, RouteKey, NodeId] | None:
        """Who has an item, by which subscription, and who shall have it next."""
        holders = self.holders(group, item)
        if len(holders) != 1:
            return None
        holder, key = holders[0]
        dispatcher = self.dispatchers[group]
        target = self.rng.choice(self.agents[group]) if holder == dispatcher else dispatcher
        return holder, key, target

    def commits(self) -> list[RoutingTxCommitted]:
        """Every commit, as the coordinator's journal has it."""
        root = self.topology.rendezvous("tops.routing")
        return [r for r in self.brokers[root].disk.records if isinstance(r, RoutingTxCommitted)]

    # --------------------------------------------------------------------------------------------------------- running

    def run(self, steps_max: int | None = None) -> None:
        self.start()
        self.advance(2.0, steps_max)  # brokers meet, and the first epoch opens
        self._note_initial()
        self._schedule(1 / PACE_S, self._transaction)
        if self.wait_s is None:
            self._schedule(1 / UPDATE_EVERY_S, self._update)
        self._schedule(3.0, self._observe)
        self._schedule(1 / LOOK_S, self._look)
        if not self.calm:
            self.nemesis.start()
        elif not self.undisturbed:
            self._schedule(self.routing_faults.cut, self._cut)
            self._schedule(self.routing_faults.pause, self._pause)
        self.advance(self.clock.now + self.faults.until_s, steps_max)
        self._active = False
        self.nemesis.stop()
        self._until_quiet(steps_max)
        self._probe()
        self.advance(self.clock.now + 1.0, steps_max)

    def _schedule(self, rate: float, action: Callable[[], None]) -> None:
        def go() -> None:
            if self._active:
                action()
                self._schedule(rate, action)

        if rate > 0:
            self.clock.after(self.rng.expovariate(rate), go)

    def _note_initial(self) -> None:
        for name, site in self.sites.items():
            for number, own in site.core.tree.routes.own.items():
                if own.kind is RouteKind.SUBSCRIPTION:
                    self.seen.initial[self.app(name).key(number)] = (name, own.event_type, own.filter)

    def _transaction(self) -> None:
        rng = self.rng
        if self.free and rng.random() < 0.5:
            app = self.app(rng.choice(self.free))
            if isinstance(app, Free) and app.site.up:
                app.run(app.script())
            return
        environment = self.app(rng.choice(rng.choice(list(self.groups.values()))))
        busy = environment.busy == environment.site.incarnation or environment.site.core.tree.transactions.open
        if isinstance(environment, Environment) and environment.site.up and not busy:
            environment.run(environment.move(rng.randrange(self.items)))

    def _update(self) -> None:
        environment = self.app(self.rng.choice(self.rng.choice(list(self.groups.values()))))
        if isinstance(environment, Environment) and environment.site.up:
            environment.update(self.rng.randrange(self.items))

    def _observe(self) -> None:
        if self.observers:
            app = self.app(self.rng.choice(self.observers))
            if isinstance(app, Observer) and app.site.up:
                app.change()

    def _look(self) -> None:
        root = self.brokers[self.topology.rendezvous("tops.routing")]
        for broker in self.brokers.values():
            self._look_at_waiting(broker.core.tree if broker.up else None)
        if not root.up or root.behind or root.core.tree.coordinator is None:
            return
        for one in root.core.tree.coordinator.open.values():
            if self.clock.now > one.deadline + PAST_TIMEOUT_S:
                self.seen.late.append(f"{one.tx} is open at {self.clock.now:.2f}, {one.deadline:.2f} was its deadline")

    def _look_at_waiting(self, tree: TreeBroker | None) -> None:
        for work in tree.termination.works.values() if tree is not None else ():
            waited_for = {link for pending in work.pending.values() for link, _ in pending.waiting}
            if tree is not None and (left := waited_for - {*tree.sites, *tree.routes.neighbours}):
                self.seen.late.append(f"{tree.name} waits for {sorted(left)}, who left {work.tx}")

    def _cut(self) -> None:
        pairs = sorted(p for p in self.network.connections if p[0] in self.brokers and p[1] in self.brokers)
        if pairs:
            self.network.cut(*self.rng.choice(pairs))

    def _pause(self) -> None:
        self.rng.choice(list(self.brokers.values())).pause(self.rng.uniform(0.05, 0.5))

    def _probe(self) -> None:
        """Once all is quiet, an update of every item: whoever has it gets it."""
        self.seen.quiet_since = self.clock.now
        for environments in self.groups.values():
            app = self.app(environments[0])
            if isinstance(app, Environment):
                for item in range(self.items):
                    app.update(item)

    def _until_quiet(self, steps_max: int | None) -> None:
        end, quiet = self.clock.now + LIVENESS_S, 0
        while self.clock.now < end and quiet < 3:
            if steps_max is not None and self.clock.steps >= steps_max:
                return
            self.advance(self.clock.now + 1.0, steps_max)
            quiet = quiet + 1 if not self.open_work() else 0

    def open_work(self) -> list[str]:
        found: list[str] = []
        for name in self.brokers:
            tree = self.tree(name)
            found += [f"{name} has not joined"] if not tree.joined else []
            found += [f"{name} holds {tx}" for tx in tree.termination.works]
            found += [f"{name} has not heard that {tx} is applied everywhere" for tx in tree.termination.applied]
            if tree.coordinator is not None:
                found += [f"{name} coordinates {tx}" for tx in tree.coordinator.open]
                found += [f"{name} lists {tx}" for tx in tree.coordinator.not_everywhere]
        for site_name, site in self.sites.items():
            found += [f"{site_name} takes part in {tx}" for tx in site.core.tree.transactions.open]
            if site.app.open_requests():
                found.append(f"{site_name} has {site.app.open_requests()} requests open")
        return found


def _faults(*, calm: bool) -> Faults:
    if calm:
        return msgspec.structs.replace(Faults.none(), until_s=2.5, slow_disk=0.05)
    return Faults(
        until_s=3.0,
        crash=0.5,
        cut=1.0,
        partition=0.1,
        pause=0.0,  # a site that comes and goes while its broker is paused would be forgotten by the network
        power_loss=0.03,
        crash_at_effect=0.0004,
        move=0.5,
        resubscribe=0.0,
    )
