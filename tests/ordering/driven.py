"""Topic managers and ordering modules, driven message by message: a test says which line goes on next."""

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from tops.core.ordering.arrivals import Arrived
from tops.core.ordering.broker import OrderingBroker
from tops.core.ordering.module import OrderingModule
from tops.model.ids import NodeId
from tops.model.ordering import Order, OrderingDomain, Placement, Unreliable
from tops.protocol.effects import Disseminate, Effect, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    ChangeSubscription,
    CutMade,
    Event,
    IndexesSkipped,
    OrderedPublished,
    Origin,
    Published,
    Sender,
)

PUBLISHER = Sender("p", "writer", incarnation=1)


def spread(*names: str, order: Order = Order.TOTAL, unreliable: Unreliable | None = None) -> OrderingDomain:
    return OrderingDomain("d", names, order, placement=Placement.SPREAD, unreliable=unreliable)


class Subscriber:
    """A site with one ordering module; what reaches it is handed over by the test."""

    def __init__(self, name: str, cluster: "Driven") -> None:
        self.name, self.cluster = name, cluster
        self.address = Address(cluster.edge, name, 1)
        self.received: list[str] = []
        self.out_of_order: list[str] = []
        self.arriving: list[OrderedPublished | IndexesSkipped] = []  # sent to this site, and held by the test
        self.timers: list[tuple[Any, ...]] = []
        self.module = OrderingModule(cluster.domain, (name,), self._deliver, self._request)

    def subscribe(self, *names: str) -> None:
        self.act(self.module.subscribe(self._topics(names)))

    def unsubscribe(self, *names: str) -> None:
        self.act(self.module.unsubscribe(self._topics(names)))

    def _topics(self, names: tuple[str, ...]) -> list[int]:
        return [self.cluster.domain.types.index(name) for name in names]

    def _deliver(self, topic: int, event: Arrived, out_of_order: bool) -> list[Effect]:
        (self.out_of_order if out_of_order else self.received).append(event.payload.body["name"])
        return []

    def _request(self, version: int, topics: tuple[int, ...], former: tuple[int, ...]) -> list[Effect]:
        types = self.cluster.domain.types
        names = tuple(types[t] for t in topics), tuple(types[t] for t in former)
        return [
            SendTo(
                Address(NodeId("")), ChangeSubscription(domain="d", version=version, types=names[0], former=names[1])
            )
        ]

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendTo):
                sender = Sender(self.name, "reader", incarnation=1)
                self.cluster.queue((self.name, self.cluster.edge), effect.message, sender, self.address)
            elif isinstance(effect, SetTimer):
                self.timers.append(effect.key)  # type: ignore[arg-type]

    def take(self, *names: str) -> None:
        """These events arrive, in this order."""
        for name in names:
            found = next(m for m in self.arriving if isinstance(m, OrderedPublished) and m.event.body["name"] == name)
            self.arriving.remove(found)
            self.act(self.module.on_event(found.topic, Arrived(found.index, found.entries, found.event, 0.0)))

    def take_all(self) -> None:
        """Everything else, in the order in which it was released."""
        for message in list(self.arriving):
            if isinstance(message, OrderedPublished):
                self.take(message.event.body["name"])
            else:
                self.arriving.remove(message)
                self.act(self.module.on_skipped(message.topic, message.after, message.upto))

    def expire(self) -> None:
        """Every timer that waits for a missing event fires."""
        timers, self.timers = self.timers, []
        for key in timers:
            if key[1] == "missing":
                self.act(self.module.on_timer(*key[1:]))


class Driven:
    """Brokers, each with the topic managers of one type unless said otherwise; the first one has all sites."""

    def __init__(self, domain: OrderingDomain, *, subscribers: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.domain = domain
        self.placed = {name: NodeId(f"b{number}") for number, name in enumerate(domain.types, start=1)}
        names = list(self.placed.values())
        self.edge = names[0]
        self.lines: dict[tuple[str, str], deque[tuple[Any, ...]]] = defaultdict(deque)
        self.brokers = {name: OrderingBroker(name, 1, [domain], self.placed.__getitem__, names, {}) for name in names}
        self.timestamps: dict[str, dict[int, int]] = {}  # by the event's name
        self.subscribers = {name: Subscriber(name, self) for name in subscribers or {}}
        self._published, self._incarnation = 0, 1
        for broker_name, broker in self.brokers.items():
            self._act(broker_name, broker.recovered())
        self.run()
        for name, topics in (subscribers or {}).items():
            self.subscribers[name].subscribe(*topics)
        self.run()
        self.settle_groups()

    def __getitem__(self, subscriber: str) -> Subscriber:
        return self.subscribers[subscriber]

    def settle_groups(self) -> None:
        """The first events after a change have larger groups; they are of no interest here."""
        for name in self.domain.types:
            self.publish(name, f"first of {name}")
            self.run()
        for subscriber in self.subscribers.values():
            subscriber.take_all()
            subscriber.received.clear()

    def publish(self, event_type: str, name: str) -> None:
        """An event arrives at the manager of its type."""
        self._published += 1
        published = Published(event=Event(event_type, {"name": name}), origin=Origin(event_type, self._published))
        there = self.placed[event_type]
        self._act(there, self.brokers[there].on_published(published, event_type, PUBLISHER, Address(there, "p", 1)))

    def restart(self, name: str) -> None:
        """A broker loses all that it knows; the sites that were connected to it are elsewhere from here on."""
        me, self._incarnation = NodeId(name), self._incarnation + 1_000
        names = list(self.placed.values())
        self.brokers[me] = OrderingBroker(me, self._incarnation, [self.domain], self.placed.__getitem__, names, {})
        self._act(me, self.brokers[me].recovered())
        for event_type, there in self.placed.items():
            marker = self.brokers[me].marker(event_type) if there == me else None
            if marker is not None:
                self._disseminate(marker)

    def queue(self, line: tuple[str, str], message: Any, sender: Sender, at: Address) -> None:
        self.lines[line].append((message, sender, at))

    def pass_on(self, sender: str, to: str) -> None:
        """The next message on this line arrives."""
        message, stamped, at = self.lines[sender, to].popleft()
        if isinstance(message, CutMade):
            subscriber = self.subscribers[to]
            subscriber.act(subscriber.module.on_cut(message.version, message.entries))
        elif NodeId(to) in self.brokers:
            broker = self.brokers[NodeId(to)]
            self._act(NodeId(to), broker.handlers[type(message)](message, stamped, at, 0.0))

    def run(self, *, without: tuple[tuple[str, str], ...] = ()) -> None:
        """Everything arrives, but for what is on these lines."""
        while busy := [line for line, queue in self.lines.items() if queue and line not in without]:
            self.pass_on(*busy[0])

    def _act(self, me: NodeId, effects: list[Effect]) -> None:
        sender = Sender(me, "broker", incarnation=1)
        for effect in effects:
            if isinstance(effect, SendTo):
                self.queue((me, effect.to.handle or effect.to.broker), effect.message, sender, Address(me))
            elif isinstance(effect, SetTimer) and isinstance(effect.key, tuple) and effect.key[-1] == "flush":
                self._act(me, self.brokers[me].on_timer(effect.key[1], effect.key[2]))
            elif isinstance(effect, Disseminate):
                self._disseminate(effect.publication)

    def _disseminate(self, publication: Any) -> None:
        if isinstance(publication, OrderedPublished):
            self.timestamps[publication.event.body["name"]] = publication.entries
        for subscriber in self.subscribers.values():
            if publication.topic in subscriber.module.wanted:
                subscriber.arriving.append(publication)
