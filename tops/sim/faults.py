"""The faults of a run, their rates, and when they stop."""

from copy import deepcopy
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tops.sim.world import World


SLOW_DISK_S = 0.03  # several times as long as a message takes


class Faults(msgspec.Struct, frozen=True):
    """Rates are events per simulated second over the whole cluster, chances are per occasion.

    The failure detector is an input, so there are no heartbeats in the traffic.
    """

    latency_s: float = 0.003
    until_s: float = 4.0  # many short runs with many faults reach more states than few long ones
    crash: float = 0.6
    late_delivery: float = 0.7  # chance that the last messages of a crashed node still arrive
    cut: float = 2.0
    partition: float = 0.2
    pause: float = 0.2
    duplicate: float = 0.5  # chance that a frame is repeated once more after a reconnection
    reject_event: float = 0.02  # chance that a participant fails at an event
    reject_prepare: float = 0.05
    slow_call: float = 0.05  # chance that a participant takes long
    failing_replica: float = 0.1  # chance that a run has a replica that rejects what the others accept
    miscounting_replica: float = (
        0.1  # chance that a run has a replica that changes other numbers of rows than the others
    )
    lying_site: float = 0.1  # chance that a run has a site that lies to peers in doubt
    power_loss: float = 0.04  # everything at once
    crash_at_effect: float = 0.0006  # chance that a node crashes just before it carries out an effect
    slow_disk: float = 0.05  # chance that a record takes long to reach a broker's disk
    crash_at_write: float = 0.015  # chance that a broker crashes while a record is on its way to the disk
    crash_after_write: float = 0.01  # chance that it crashes shortly after: others are just hearing of it
    move: float = 0.2  # a site goes to another broker without being cut off
    gathering: float = 0.3  # chance that sites gather events that they publish at one moment, as the library does
    narrow_windows: float = 0.2  # chance that a run's links take a few messages in flight at most
    resubscribe: float = 0.2  # a site ends a subscription and subscribes again
    restore_journal: float = 0.0  # a broker comes back with an earlier copy of its journal
    restore_database: float = 0.0  # a replica comes back with an earlier copy of its database

    @classmethod
    def none(cls) -> "Faults":
        """A healthy cluster."""
        return cls(
            crash=0,
            cut=0,
            partition=0,
            pause=0,
            duplicate=0,
            reject_event=0,
            reject_prepare=0,
            slow_call=0,
            failing_replica=0,
            miscounting_replica=0,
            lying_site=0,
            power_loss=0,
            crash_at_effect=0,
            slow_disk=0,
            crash_at_write=0,
            crash_after_write=0,
            move=0,
            gathering=0,
            narrow_windows=0,
            resubscribe=0,
        )

    @classmethod
    def restless(cls) -> "Faults":
        """Sites that move all the time, over slow links and brokers that pause: events that arrived on one path arrive
        again on another."""
        return cls(latency_s=0.02, pause=1.0, move=3.0)

    @classmethod
    def restored_journals(cls) -> "Faults":
        """Brokers come back with journals of an earlier time."""
        return cls(restore_journal=0.5, until_s=6.0)

    @classmethod
    def restored_databases(cls) -> "Faults":
        """Replicas come back with databases of an earlier time. Not both in one run: a restored journal together with
        restored databases is a consistent older cluster, in which nothing can be detected."""
        return cls(restore_database=1.0, until_s=6.0)

    @property
    def travels(self) -> bool:
        """Whether journals or databases are restored to an earlier time."""
        return self.restore_journal > 0 or self.restore_database > 0


class Nemesis:
    """Injects the faults of a run until it is stopped."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.active = True
        self._effects_left = 0
        self.restores = 0
        self._copies: dict[str, CallbackDatabase | ReplicaDatabase] = {}  # of replicas' databases, by site

    def start(self) -> None:
        faults = self.world.faults
        for rate, strike in (
            (faults.crash, self._crash),
            (faults.cut, self._cut),
            (faults.partition, self._partition),
            (faults.pause, self._pause),
            (faults.power_loss, self._lose_power),
            (faults.move, self._move),
            (faults.resubscribe, self._resubscribe),
            (faults.restore_journal, self._restore_journal),
            (faults.restore_database, self._restore_database),
        ):
            if rate > 0:
                self._schedule(rate, strike)
        if faults.crash_at_effect > 0:
            self._effects_left = self._until_crash()
            self.world.on_effect = self._at_effect

    def stop(self) -> None:
        """From here on nothing fails any more, and all faults are repaired."""
        self.active = False
        self.world.network.heal()
        for node in self.world.nodes():
            node.wake(now=True)
            node.start()

    def _schedule(self, rate: float, strike: "Strike") -> None:
        def go() -> None:
            if self.active:
                strike()
                self._schedule(rate, strike)

        self.world.clock.after(self.world.rng.expovariate(rate), go)

    def _crash(self) -> None:
        self._crash_node(self.world.rng.choice(self.world.nodes()))

    def _crash_node(self, node: "SimNode") -> None:
        node.crash()
        down_s = self.world.rng.choice([0.01, 0.2, 1.0, 3.0])
        self.world.clock.after(down_s, node.start)

    def _lose_power(self) -> None:
        self.world.trace.add(self.world.clock.now, "nemesis", "POWER LOSS")
        for node in self.world.nodes():
            self._crash_node(node)

    def _at_effect(self, node: "SimNode", effect: "Effect") -> None:
        self._effects_left -= 1
        if self._effects_left <= 0 and self.active:
            self._effects_left = self._until_crash()
            self._crash_node(node)

    def _until_crash(self) -> int:
        """How many effects are carried out before a crash: the same as a random number for each, but cheaper."""
        return 1 + int(self.world.rng.expovariate(self.world.faults.crash_at_effect))

    def writing_s(self, broker: "SimNode") -> float:
        """How long a record takes to reach the broker's disk; the broker may be scheduled to crash before or after."""
        rng, faults = self.world.rng, self.world.faults
        takes_s = rng.uniform(0.0001, 0.002)
        if not self.active:
            return takes_s
        if rng.random() < faults.slow_disk:
            takes_s += rng.uniform(0.0, SLOW_DISK_S)
        fate = rng.random()
        if fate < faults.crash_at_write:
            self._crash_later(broker, rng.uniform(0.0, takes_s))
        elif fate < faults.crash_at_write + faults.crash_after_write:
            self._crash_later(broker, takes_s + rng.uniform(0.0, SLOW_DISK_S))
        return takes_s

    def _crash_later(self, node: "SimNode", after_s: float) -> None:
        incarnation = node.incarnation

        def strike() -> None:
            if self.active and node.incarnation == incarnation:
                self._crash_node(node)

        self.world.clock.after(after_s, strike)

    def _move(self) -> None:
        """A site moves to another broker, as if the old one had requested it."""
        network, rng = self.world.network, self.world.rng
        site = rng.choice(sorted(self.world.sites))
        network.cut(site, network.homes[site])
        network.settle_at(site, rng.choice(self.world.topology.brokers))

    def _resubscribe(self) -> None:
        app = self.world.rng.choice(self.world.apps())
        subscribed = sorted(number for number, s in app.subscriptions.items() if not s.own)
        if subscribed and app.site.up:
            app.resubscribe(self.world.rng.choice(subscribed), self.world.rng.uniform(0.01, 1.0))

    def _restore_journal(self) -> None:
        """A broker stops, and starts again with an earlier copy of its journal."""
        broker = self.world.rng.choice(list(self.world.brokers.values()))
        self._crash_node(broker)
        self.restores += 1
        kept = self.world.rng.randint(0, len(broker.disk.records))
        self.world.trace.add(self.world.clock.now, broker.name, f"RESTORE journal, {kept} records")
        broker.disk.cut(kept)

    def _restore_database(self) -> None:
        """A replica's database is copied, or replaced by an earlier copy."""
        site = self.world.sites[self.world.rng.choice(self.world.replicas)]
        s = site.app.subscriptions[1]
        copy = self._copies.pop(site.name, None)
        if copy is None:
            self._copies[site.name] = deepcopy(s.database)
            return
        self._crash_node(site)
        self.world.trace.add(self.world.clock.now, site.name, "RESTORE database")
        self.restores += 1
        s.database = copy

    def _cut(self) -> None:
        pairs = sorted(self.world.network.connections)
        if pairs:
            self.world.network.cut(*self.world.rng.choice(pairs))

    def _partition(self) -> None:
        names = [n.name for n in self.world.nodes()]
        side = set(self.world.rng.sample(names, self.world.rng.randint(1, max(1, len(names) // 2))))
        self.world.trace.add(self.world.clock.now, "nemesis", f"PARTITION {sorted(side)}")
        self.world.network.partition(side)
        self.world.clock.after(self.world.rng.uniform(0.2, 4), self.world.network.heal)

    def _pause(self) -> None:
        node = self.world.rng.choice(self.world.nodes())
        node.pause(self.world.rng.uniform(0.1, 3))
        self.world.trace.add(self.world.clock.now, node.name, "PAUSE")


if TYPE_CHECKING:
    from collections.abc import Callable

    from tops.protocol.effects import Effect
    from tops.sim.databases import CallbackDatabase, ReplicaDatabase
    from tops.sim.nodes import SimNode

    Strike = Callable[[], None]
