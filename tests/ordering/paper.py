"""The algorithm as the paper has it: Baldoni, Bonomi, Platania, Querzoni, section 3.4. Wrong, and here to be shown so.

Differences from ours: a timestamp goes straight to the next member of its group; a subscriber asks for equality; a
subscription increases the numbers of all its topics, and *dummy* events tell the other subscribers of that.
"""

from collections import defaultdict
from random import Random

from tops.sim.clock import Clock
from tops.sim.ordering.network import Network

Timestamp = dict[int, int]


class Manager:
    """The topic manager of one topic; topic 0 ranks highest."""

    def __init__(self, topic: int) -> None:
        self.topic, self.numbered = topic, 0
        self.lower: Timestamp = {}
        self.subscriptions: dict[str, frozenset[int]] = {}

    def group(self) -> list[int]:
        """Definition 1: topics that at least two subscriptions hold together with this one."""
        counts: dict[int, int] = defaultdict(int)
        for subscription in self.subscriptions.values():
            for topic in subscription:
                counts[topic] += 1
        return sorted({t for t, count in counts.items() if count >= 2} | {self.topic})

    def learn(self, entries: Timestamp) -> None:
        for topic, index in entries.items():
            if topic > self.topic:
                self.lower[topic] = max(self.lower.get(topic, 0), index)


class Subscriber:
    """The ordering module of the paper."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Timestamp = {}
        self.buffer: list[tuple[int, Timestamp, str]] = []  # topic, timestamp, event; dummies have no name
        self.received: list[str] = []
        self.subscribed: set[int] = set()  # with the notification service

    def take(self, topic: int, entries: Timestamp, event: str) -> None:
        if topic in self.subscribed:
            self.buffer.append((topic, entries, event))
            self.notify()

    def notify(self) -> None:
        while (following := next((b for b in self.buffer if self._is_next(*b)), None)) is not None:
            self.buffer.remove(following)
            topic, entries, event = following
            if event:
                self.clock[topic] = entries[topic]
                self.received.append(event)
            else:
                for t, index in entries.items():
                    if t in self.clock:
                        self.clock[t] = max(self.clock[t], index)

    def _is_next(self, topic: int, entries: Timestamp, event: str) -> bool:
        if topic not in self.clock:
            return False
        if not event:  # a dummy is in its turn when it closes the gap that the subscription has made
            return entries[topic] == self.clock[topic] + 1 or entries[topic] <= self.clock[topic]
        return entries[topic] == self.clock[topic] + 1 and all(
            self.clock[t] == index for t, index in entries.items() if t in self.clock and t != topic
        )

    def adopt(self, cut: Timestamp) -> None:
        """A subscription's timestamp: what is behind it is to be received, what is before it is dropped."""
        self.clock.update(cut)
        self.buffer = [b for b in self.buffer if b[1][b[0]] > self.clock.get(b[0], -1)]
        self.notify()


class Paper:
    """Managers, subscribers and lines that are in order between two nodes."""

    def __init__(self, topics: int, subscriptions: dict[str, set[int]], network: Network) -> None:
        self.network = network
        self.managers = [Manager(topic) for topic in range(topics)]
        self.subscribers = {name: Subscriber(name) for name in subscriptions}
        self.published: list[tuple[int, str]] = []
        for name, held in subscriptions.items():
            subscriber = self.subscribers[name]
            subscriber.subscribed, subscriber.clock = set(held), dict.fromkeys(held, 0)
            for topic in held:
                self.managers[topic].subscriptions[name] = frozenset(held)

    def publish(self, topic: int, event: str) -> None:
        """Phase 1 begins at the manager of the event's topic."""
        self.published.append((topic, event))
        manager = self.managers[topic]
        manager.numbered += 1
        group = manager.group()
        entries = {topic: manager.numbered, **{t: manager.lower.get(t, 0) for t in group if t > topic}}
        self._up(topic, [t for t in group if t < topic], topic, entries, event)

    def _up(self, at: int, left: list[int], topic: int, entries: Timestamp, event: str) -> None:
        if left:
            self.network.send((f"m{at}", f"m{left[-1]}", ""), self._pass, left, topic, entries, event)
        else:
            self._diffuse(topic, entries, event)

    def _pass(self, left: list[int], topic: int, entries: Timestamp, event: str) -> None:
        manager = self.managers[left[-1]]
        manager.learn(entries)
        self._up(manager.topic, left[:-1], topic, {**entries, manager.topic: manager.numbered}, event)

    def _diffuse(self, topic: int, entries: Timestamp, event: str) -> None:
        """Phases 2 and 3."""
        for name, subscriber in self.subscribers.items():
            self.network.send((f"m{topic}", name, "events"), subscriber.take, topic, entries, event)

    def subscribe(self, name: str, topic: int) -> None:
        subscriber = self.subscribers[name]
        subscriber.subscribed.add(topic)
        held = frozenset(subscriber.subscribed)
        lowest = max(held)
        self.network.send((name, f"m{lowest}", ""), self._pass_cut, name, held, sorted(held), {})

    def _pass_cut(self, name: str, held: frozenset[int], left: list[int], cut: Timestamp) -> None:
        manager = self.managers[left[-1]]
        manager.subscriptions[name] = held
        manager.numbered += 1
        manager.learn(cut)
        cut = {**cut, manager.topic: manager.numbered}
        if left[:-1]:
            self.network.send((f"m{manager.topic}", f"m{left[-2]}", ""), self._pass_cut, name, held, left[:-1], cut)
            return
        self.network.send((f"m{manager.topic}", name, ""), self._subscribed, name, held, cut)

    def _subscribed(self, name: str, held: frozenset[int], cut: Timestamp) -> None:
        self.subscribers[name].adopt(cut)
        for topic in held:
            self._diffuse(topic, cut, "")


def random_run(seed: int, changes: int) -> tuple[bool, bool]:
    """Whether a random run of the paper's algorithm blocks, and whether it loses events."""
    rng, clock = Random(seed), Clock()
    topics = rng.randint(3, 5)
    names = [f"s{number}" for number in range(rng.randint(3, 6))]
    held = {name: set(rng.sample(range(topics), rng.randint(1, topics))) for name in names}
    paper = Paper(topics, held, Network(clock, rng, 0.3, 0.3))
    for number in range(30):
        clock.at(rng.uniform(0, 1.0), paper.publish, rng.randrange(topics), f"e{number}")
    for _ in range(changes):
        name = rng.choice(names)
        new = [t for t in range(topics) if t not in held[name]]
        if new:
            held[name].add(topic := rng.choice(new))
            clock.at(rng.uniform(0, 1.0), paper.subscribe, name, topic)
    first = {name: frozenset(s.clock) for name, s in paper.subscribers.items()}
    clock.run(1000.0)
    blocked = lost = False
    for name, subscriber in paper.subscribers.items():
        buffered = {event for _, _, event in subscriber.buffer if event}
        blocked |= bool(buffered)
        due = {event for topic, event in paper.published if topic in first[name]}
        lost |= not due <= {*subscriber.received, *buffered}
    return blocked, lost
