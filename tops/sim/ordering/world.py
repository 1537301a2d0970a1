"""One simulated run: brokers, sites, faults, and what happened."""

from random import Random

from tops.model.ids import NodeId
from tops.protocol.messages import Address, Event
from tops.sim.clock import Clock
from tops.sim.ordering.network import Network
from tops.sim.ordering.nodes import Broker, Site
from tops.sim.ordering.shape import OrderingFaults, Shape, draw

QUIET_S = 60.0  # at most, for everything that is under way to arrive once faults have stopped
LOOK_S = 2.0
KINDS = ("", "x", "y")


class OrderingWorld:
    """A run that is determined by its seed."""

    def __init__(self, seed: int, faults: OrderingFaults | None = None, shape: Shape | None = None) -> None:
        self.seed = seed
        self.shape = shape or draw(seed, faults or OrderingFaults())
        self.domain = self.shape.domain
        self.rng = Random(f"ordering {seed}")
        self.clock = Clock()
        self.network = Network(self.clock, self.rng, self.shape.slow_messages, self.shape.slow_links)
        self.brokers = {name: Broker(self, name) for name in self.shape.brokers}
        self.sites = {name: Site(self, name) for name in (NodeId(f"s{n}") for n in range(self.shape.sites))}
        self.past_of: dict[int, int] = {}  # event -> the events before it, as bits
        self.confirmed: set[tuple[str, int, str, int]] = set()
        self.crashes = 0
        self.events = 0
        self.faulty = True
        self._links = 0
        self._mid_crashes = self.shape.crashes

    def run(self) -> None:
        """The whole run; afterwards every node is up and everything has had its time to arrive."""
        for broker in self.brokers.values():
            broker.start()
        rng, shape = self.rng, self.shape
        for site in self.sites.values():
            site.topics = self._draw_topics()
            site.filters = {topic: self.draw_filter() for topic in site.topics}
            self.clock.after(rng.expovariate(10.0), site.start)
        begin = rng.choice((0.0, 0.5))
        for number in range(shape.events):
            self.clock.at(begin + number * shape.publish_every_s, self._publish)
        end = begin + shape.events * shape.publish_every_s + 0.3
        for _ in range(shape.changes):
            self.clock.at(rng.uniform(0, end), self._change)
        for _ in range(shape.crashes):
            self.clock.at(rng.uniform(0, end), self._crash_some)
        for _ in range(shape.site_crashes):
            self.clock.at(rng.uniform(0, end), self._crash_site)
        for _ in range(shape.checkpoints):
            self.clock.at(rng.uniform(0, end), self._checkpoint)
        self.clock.run(end)
        self.faulty = False
        while self.clock.now < end + QUIET_S and (self.clock.now < end + 2 * LOOK_S or not self._is_settled()):
            self.clock.run(self.clock.now + LOOK_S)

    def _is_settled(self) -> bool:
        """Whether every site that is up has what it waits for."""
        return all(site.is_settled() for site in self.sites.values() if site.up)

    def _draw_topics(self) -> set[int]:
        numbers = range(len(self.domain.types))
        if self.rng.random() < self.shape.greedy and len(numbers) < 10:
            return set(numbers)
        return set(self.rng.sample(numbers, self.rng.randint(1, min(len(numbers), 6))))

    def draw_filter(self) -> str:
        return self.rng.choice(KINDS[1:]) if self.rng.random() < self.shape.filters else ""

    def _publish(self) -> None:
        site = self.rng.choice(list(self.sites.values()))
        if site.up:
            body = {"number": self.events, "kind": self.rng.choice(KINDS[1:])}
            self.events += 1
            site.publish(Event(self.rng.choice(self.domain.types), body))

    def _change(self) -> None:
        site = self.rng.choice(list(self.sites.values()))
        topics = set(site.topics)
        if topics and self.rng.random() < 0.5:
            topics.discard(self.rng.choice(sorted(topics)))
        else:
            topics |= self._draw_topics() if self.rng.random() < 0.3 else {self.rng.randrange(len(self.domain.types))}
        site.want(topics)

    # ---------------------------------------------------------------------------------------------------------- faults

    def crashes_here(self, broker: Broker) -> bool:
        """Whether a broker crashes between two effects."""
        if not self.faulty or not self._mid_crashes or self.rng.random() >= 0.002:
            return False
        self._mid_crashes -= 1
        return True

    def crash_broker(self, broker: Broker) -> None:
        self.crashes += 1
        broker.crash()
        for site in self.sites.values():
            if site.broker is broker:
                site.broker_lost()
        self.clock.after(self.rng.choice((0.01, 0.2, 1.0)), broker.start)

    def _crash_some(self) -> None:
        broker = self.rng.choice(list(self.brokers.values()))
        if broker.up:
            self.crash_broker(broker)

    def _crash_site(self) -> None:
        site = self.rng.choice(list(self.sites.values()))
        if not site.up:
            return
        self.crashes += 1
        broker = site.broker
        site.crash()
        if broker is not None:
            self.clock.after(self.rng.choice((0.0, 0.1)), broker.leave, site.name)
        if self.domain.durable or self.rng.random() < 0.7:
            self.clock.after(self.rng.choice((0.15, 0.5)), site.start)
        else:
            site.topics = set()  # it has left for good

    def _checkpoint(self) -> None:
        broker = self.rng.choice(list(self.brokers.values()))
        if broker.up and self.domain.durable:
            broker.checkpoint()

    def loses(self) -> bool:
        return self.faulty and self.shape.loss > 0 and self.rng.random() < self.shape.loss

    def log_end(self, topic: int) -> int:
        """The last index of a durable topic."""
        name = self.domain.types[topic]
        log = self.brokers[self.shape.broker_of[name]].logs.get(name)
        return log.last_number if log is not None else 0

    def next_link(self) -> int:
        self._links += 1
        return self._links

    def receive_at(self, to: Address, message: object) -> None:
        """Something arrives at a site, if it is still reached by that address."""
        site = self.sites[NodeId(to.handle)]
        if site.up and site.address == to:
            site.receive(message)
