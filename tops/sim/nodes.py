"""Brokers and sites in a simulated world: the real machines, and effects that are carried out one by one.

A node can be crashed between any two effects. What is behind a `Persist` waits for the disk, and so does everything
that later inputs want done.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from tops.core.broker import BrokerCore
from tops.core.site import SiteCore
from tops.effects import (
    Alarm,
    Answer,
    Call,
    CancelTimer,
    Deliver,
    Effect,
    ForgetPromise,
    Note,
    Persist,
    ReadLog,
    Send,
    SetTimer,
    TxEnded,
)
from tops.ids import NodeId
from tops.messages import LinkMessage
from tops.records import Started
from tops.sim.disk import SimDisk

if TYPE_CHECKING:
    from tops.sim.site_app import SiteApp
    from tops.sim.world import World


class SimNode:
    """What brokers and sites have in common: being up, paused or down, and a queue of effects."""

    def __init__(self, world: "World", name: NodeId) -> None:
        self.world, self.name = world, name
        self.up = False
        self.incarnation = 0
        self.paused_until = 0.0
        self._pipeline: deque[Effect] = deque()
        self._inbox: deque[Callable[[], list[Effect]]] = deque()  # what came while the node was paused
        self._blocked = False
        self._draining = False
        self._timers: dict[Hashable, int] = {}
        self._timer_count = 0

    # ------------------------------------------------------------------------------------------------- life and death

    def crash(self) -> None:
        if not self.up:
            return
        self.world.trace.add(self.world.clock.now, self.name, "CRASH")
        self.up = False
        self._pipeline.clear()
        self._inbox.clear()
        self._timers.clear()
        self._blocked = False
        self.lose_memory()
        self.world.network.node_down(self.name)

    def start(self) -> None:
        if self.up:
            return
        self.up = True
        self.incarnation += 1
        self.world.trace.add(self.world.clock.now, self.name, f"START incarnation {self.incarnation}")
        self.wake_up()
        if self.up:
            self.world.network.node_up(self.name)

    def lose_memory(self) -> None:
        raise NotImplementedError

    def wake_up(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- effects

    def act(self, step: Callable[[], list[Effect]]) -> None:
        """Give the machine an input, now or when the node is no longer paused, and carry out what it wants."""
        if not self.up:
            return
        if self.behind:
            self._inbox.append(step)
            return
        self._act(step)

    @property
    def behind(self) -> bool:
        """Whether inputs wait because the node is or was paused."""
        return self.paused_until > self.world.clock.now or bool(self._inbox)

    def pause(self, seconds: float) -> None:
        """Nothing is taken in for a while; it is all taken in, in order, when the node wakes up."""
        self.paused_until = max(self.paused_until, self.world.clock.now + seconds)
        self.world.clock.at(self.paused_until, self.wake)

    def wake(self, now: bool = False) -> None:
        if now:
            self.paused_until = 0.0
        while self.up and self._inbox and self.paused_until <= self.world.clock.now:
            self._act(self._inbox.popleft())

    def _act(self, step: Callable[[], list[Effect]]) -> None:
        try:
            self._pipeline.extend(step())
        except Exception as error:  # a machine never raises: every input is either meant or ignored
            self.world.history.broken.append(f"{self.name}: the machine raised {error!r}")
            self.world.trace.add(self.world.clock.now, self.name, f"BROKEN {error!r}")
            return
        self.drain()

    def drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        life = self.incarnation
        try:
            while self._pipeline and not self._blocked and self.up and self.incarnation == life:
                effect = self._pipeline.popleft()
                self.world.on_effect(self, effect)
                if self.up and self.incarnation == life:
                    self.perform(effect)
        finally:
            self._draining = False

    def perform(self, effect: Effect) -> None:
        match effect:
            case Send(link=link, message=message):
                self.world.network.send(self.name, link, message)
            case SetTimer(key=key, after_s=after_s):
                self._set_timer(key, after_s)
            case CancelTimer(key=key):
                self._timers.pop(key, None)
            case Alarm(kind=kind, text=text):
                self.world.alarms.append((self.name, kind, text))
                self.world.trace.add(self.world.clock.now, self.name, f"ALARM {kind}: {text}")

    def _set_timer(self, key: Hashable, after_s: float) -> None:
        self._timer_count += 1
        number = self._timers[key] = self._timer_count

        def fire() -> None:
            if self._timers.get(key) == number:
                del self._timers[key]
                self.on_timer(key)

        self.world.clock.after(after_s, fire)

    def on_timer(self, key: Any) -> None:
        raise NotImplementedError

    def receive(self, link: NodeId, message: LinkMessage) -> None:
        raise NotImplementedError


class SimBroker(SimNode):
    """A broker with its journal."""

    def __init__(self, world: "World", name: NodeId) -> None:
        super().__init__(world, name)
        self.disk = SimDisk()
        self.core: BrokerCore

    def lose_memory(self) -> None:
        self.disk.crash(self.world.rng)

    def wake_up(self) -> None:
        self.core = BrokerCore(
            self.name, self.incarnation, self.world.topology, self.world.predicates, self.world.broker_options
        )
        self.disk.append(Started(incarnation=self.incarnation))
        self.disk.sync()
        for record in self.disk.records:
            self.core.recover(record)
        self.act(lambda: self.core.recovered(self.world.clock.now))

    def perform(self, effect: Effect) -> None:
        match effect:
            case Persist(record=record):
                self.world.trace.add(self.world.clock.now, self.name, f"persist {type(record).__name__}", record)
                self.disk.append(record)
                self._blocked = True
                life = self.incarnation
                takes_s = self.world.nemesis.writing_s(self)
                self.world.clock.after(takes_s, lambda: self._synced() if self.incarnation == life else None)
            case Note(record=record):
                self.disk.append(record)
            case ReadLog(event_type=event_type, feed=feed, first=first, last=last):
                entries = self.disk.log_entries(event_type, first, last)
                self.world.clock.after(
                    0.001,
                    lambda: self.act(lambda: self.core.log_read(event_type, feed, entries, self.world.clock.now)),
                )
            case _:
                super().perform(effect)

    def _synced(self) -> None:
        if not self.up:
            return
        self.disk.sync()
        self._blocked = False
        self.drain()

    def on_timer(self, key: Any) -> None:
        self.act(lambda: self.core.timer(tuple(map(str, key)), self.world.clock.now))

    def receive(self, link: NodeId, message: LinkMessage) -> None:
        self.act(lambda: self.core.receive(link, message, self.world.clock.now))


class SimSite(SimNode):
    """A site with its application; databases of its participants outlive it."""

    def __init__(self, world: "World", name: NodeId, app: "SiteApp") -> None:
        super().__init__(world, name)
        self.app = app
        self.core: SiteCore

    def lose_memory(self) -> None:
        self.app.crash()

    def wake_up(self) -> None:
        self.core = SiteCore(
            self.name,
            self.incarnation,
            self.world.topology.brokers,
            self.world.entropy,
            self.world.site_options,
        )
        self.app.start(self)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Answer(request=request, value=value, error=error):
                self.app.on_answer(request, value, error)
            case Call():
                self.app.on_call(effect)
            case Deliver(subscription=subscription, event=event, tx=tx):
                self.app.on_deliver(subscription, event, tx)
            case ForgetPromise():
                self.app.on_forget(effect)
            case TxEnded(tx=tx, committed=committed):
                self.app.on_tx_ended(tx, committed)
            case _:
                super().perform(effect)

    def on_timer(self, key: Any) -> None:
        self.act(lambda: self.core.timer(tuple(map(str, key)), self.world.clock.now))

    def receive(self, link: NodeId, message: LinkMessage) -> None:
        self.act(lambda: self.core.receive(message, self.world.clock.now))
