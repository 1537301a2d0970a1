"""What goes wrong in a run, how often, and when it stops."""

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tops.sim.world import World


class Faults(msgspec.Struct, frozen=True):
    """Rates are events per simulated second over the whole cluster, chances are per occasion.

    A failure detector is an input, so there are no heartbeats among the traffic.
    """

    latency_s: float = 0.003
    crash: float = 0.3
    cut: float = 0.5
    partition: float = 0.1
    pause: float = 0.1
    duplicate: float = 0.5  # chance that a frame is repeated once more after a reconnection
    refuse_event: float = 0.02  # chance that a participant fails at an event
    refuse_prepare: float = 0.05
    slow_call: float = 0.05  # chance that a participant takes long
    sick_replica: float = 0.1  # chance that a run has a replica that refuses what the others accept

    @classmethod
    def none(cls) -> "Faults":
        """A healthy cluster."""
        return cls(
            crash=0,
            cut=0,
            partition=0,
            pause=0,
            duplicate=0,
            refuse_event=0,
            refuse_prepare=0,
            slow_call=0,
            sick_replica=0,
        )


class Nemesis:
    """Injects the faults of a run until it is told to stop."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.active = True

    def start(self) -> None:
        faults = self.world.faults
        for rate, strike in (
            (faults.crash, self._crash),
            (faults.cut, self._cut),
            (faults.partition, self._partition),
            (faults.pause, self._pause),
        ):
            if rate > 0:
                self._schedule(rate, strike)

    def stop(self) -> None:
        """From here on nothing breaks any more, and what is broken is mended."""
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
        node = self.world.rng.choice(self.world.nodes())
        node.crash()
        down_s = self.world.rng.choice([0.01, 0.2, 1.0, 3.0])
        self.world.clock.after(down_s, node.start)

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

    Strike = Callable[[], None]
