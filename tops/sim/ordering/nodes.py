"""The nodes of a simulated run: brokers and sites, which drive the machines as the runtime does."""

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from tops.core.log.event_log import EventLog, Feed
from tops.core.ordering.arrivals import Arrived
from tops.core.ordering.broker import OrderingBroker
from tops.core.ordering.module import OrderingModule
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.protocol.effects import Alarm, Disseminate, Effect, Note, Persist, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    ChangeSubscription,
    ConfirmEvent,
    CutMade,
    Event,
    EventConfirmed,
    IndexesSkipped,
    LogDelivered,
    OrderedPublished,
    Origin,
    Published,
    Sender,
)
from tops.protocol.records import AnyRecord, LogAppended

if TYPE_CHECKING:
    from tops.sim.ordering.world import OrderingWorld

RENEW_S = 0.5  # how often sites repeat requests without a response
CREDIT = 1024
INCARNATION = 1_000_000  # how far incarnations are apart: microseconds


class Timers:
    """A node's timers; a crash ends them all."""

    def __init__(self, world: "OrderingWorld", fire: Any) -> None:
        self._world, self._fire = world, fire
        self._set: dict[tuple[str, ...], int] = {}
        self._count = 0

    def set(self, key: tuple[str, ...], after_s: float) -> None:
        self._count += 1
        self._set[key] = self._count
        self._world.clock.after(after_s, self._due, key, self._count)

    def _due(self, key: tuple[str, ...], number: int) -> None:
        if self._set.get(key) == number:
            del self._set[key]
            self._fire(key)

    def clear(self) -> None:
        self._set.clear()


class Broker:
    """A broker: its machine, its disk, the sites that are connected to it."""

    def __init__(self, world: "OrderingWorld", name: NodeId) -> None:
        self.world, self.name = world, name
        self.disk: list[AnyRecord] = []
        self.incarnation = 0
        self.up = False
        self.sites: dict[str, Address] = {}  # connected here -> how they are reached
        self.interest: dict[str, dict[int, str]] = {}  # of these sites: topics, each with a filter
        self.timers = Timers(world, self._on_timer)
        self.alarms: list[str] = []
        self.core: OrderingBroker
        self.logs: dict[str, EventLog] = {}

    def start(self) -> None:
        """A new incarnation, with what is on the disk."""
        self.incarnation += INCARNATION
        self.up = True
        self.sites, self.interest = {}, {}
        domain, placed = self.world.domain, self.world.shape.broker_of
        self.logs = {}
        if domain.durable:
            own = [name for name in domain.types if placed[name] == self.name]
            self.logs = {name: EventLog(name, self.incarnation, lambda n: (n,), 1_000_000) for name in own}
        brokers = self.world.shape.brokers
        self.core = OrderingBroker(self.name, self.incarnation, [domain], placed.__getitem__, brokers, self.logs)
        for record in self.disk:
            self._recover(record)
        self.act(self.core.recovered())
        if self.up and not domain.durable:
            for name in domain.types:
                marker = self.core.marker(name)
                if marker is not None:
                    self._disseminate(marker)

    def _recover(self, record: AnyRecord) -> None:
        if isinstance(record, LogAppended):
            self.logs[record.event_type].fill(record.entry, record.publisher)
            self.core.recover_appended(record)
        else:
            self.core.recover(record)  # type: ignore[arg-type]  # nothing else is written here

    def crash(self) -> None:
        self.up = False
        self.timers.clear()
        while self.disk and self.world.rng.random() < 0.5 and self._is_noted(self.disk[-1]):
            self.disk.pop()
        self.world.network.crash(self.name)

    def _is_noted(self, record: AnyRecord) -> bool:
        return type(record).__name__ == "PassedTaken"

    def checkpoint(self) -> None:
        """Old parts of the journal go; what must not be forgotten is written again."""
        kept = list(self.core.kept())
        self.disk = [record for record in self.disk if isinstance(record, LogAppended)] + kept

    def act(self, effects: list[Effect]) -> None:
        """Carry out effects in order; a crash can come between any two."""
        for effect in effects:
            if not self.up:
                return
            if self.world.crashes_here(self):
                self.world.crash_broker(self)
                return
            match effect:
                case SendTo(to=to, message=message):
                    self._post(to, message)
                case Persist(record=record) | Note(record=record):
                    self.disk.append(record)
                case SetTimer(key=key, after_s=after_s):
                    self.timers.set(key, after_s)  # type: ignore[arg-type]  # keys of these machines are words
                case Disseminate(publication=publication):
                    self._disseminate(publication)
                case Alarm(text=text):
                    self.alarms.append(text)
                case _:
                    raise AssertionError(effect)

    def _post(self, to: Address, message: Any) -> None:
        network = self.world.network
        if not to.handle:
            sender = Sender(self.name, "broker", incarnation=self.incarnation)
            there = self.world.brokers[to.broker]
            network.send((self.name, to.broker, "chain"), there.receive, message, sender, Address(self.name))
        elif isinstance(message, CutMade) and to.broker != self.name:
            network.send((self.name, to.broker, "chain"), self.world.brokers[to.broker].pass_on, to, message)
        elif to.broker == self.name:
            self.pass_on(to, message)
        else:
            network.send((self.name, to.handle, "log"), self.world.receive_at, to, message)

    def pass_on(self, to: Address, message: Any) -> None:
        """To a site that is connected here."""
        if self.sites.get(to.handle) == to:
            self.world.network.send((self.name, to.handle, "edge"), self.world.receive_at, to, message)

    def receive(self, message: Any, sender: Sender, at: Address) -> None:
        """A message for this broker."""
        if isinstance(message, Published):
            self.act(self.core.on_published(message, message.origin.family, sender, at))
        elif isinstance(message, Feed):
            log = self.logs[message.event_type]
            known = log.feeds.get(message.key)
            if message.position < 0:
                message.position = message.sent = known.position if known is not None else log.decided_upto
            self.act(log.want(message))
        elif isinstance(message, StandingRegistration):
            self._post(at, message)
        else:
            self.act(self.core.handlers[type(message)](message, sender, at, self.world.clock.now))

    def _on_timer(self, key: tuple[str, ...]) -> None:
        self.act(self.core.on_timer(key[1], key[2]))

    # ------------------------------------------------------------------------------------------------ as an edge

    def _disseminate(self, publication: Any) -> None:
        """Down the tree, to the brokers and from there to their sites."""
        for name, broker in self.world.brokers.items():
            if name == self.name:
                broker.descend(publication)
            else:
                self.world.network.send((self.name, name, "tree"), broker.descend, publication)

    def descend(self, publication: OrderedPublished | IndexesSkipped) -> None:
        """To the sites here: the event, or that its index is not for them."""
        if self.world.domain.durable:
            return  # its subscribers are fed from the log
        for site, topics in self.interest.items():
            wanted = topics.get(publication.topic)
            if wanted is None:
                continue
            message: Any = publication
            if isinstance(publication, OrderedPublished):
                if wanted and publication.event.body["kind"] != wanted:
                    index = publication.index
                    message = IndexesSkipped(
                        domain=publication.domain,
                        topic=publication.topic,
                        event_type=publication.event_type,
                        after=index - 1,
                        upto=index,
                    )
                elif self.world.loses():
                    continue
            self.world.network.send((self.name, site, "edge"), self.world.receive_at, self.sites[site], message)

    def connect(self, address: Address) -> None:
        self.sites[address.handle] = address
        self.interest[address.handle] = {}

    def leave(self, handle: str) -> None:
        """A site is lost: its session has ended and does not resume."""
        address = self.sites.pop(handle, None)
        self.interest.pop(handle, None)
        if address is not None:
            self.act(self.core.site_lost(address))


class StandingRegistration(msgspec.Struct, frozen=True):
    """A site's request to confirm its feed of a log; the response is the same message."""

    topic: int


class Delivered(msgspec.Struct, frozen=True):
    """An event that a site's application received."""

    event: int
    topic: int
    index: int
    out_of_order: bool


class Site:
    """A subscriber, which publishes as well."""

    def __init__(self, world: "OrderingWorld", name: NodeId) -> None:
        self.world, self.name = world, name
        self.incarnation = 0
        self.up = False
        self.timers = Timers(world, self._on_timer)
        self.broker: Broker | None = None
        self.address = Address(NodeId(""))
        self.delivered: list[Delivered] = []  # in this incarnation, or for good where the domain is durable
        self.former: list[list[Delivered]] = []  # of earlier incarnations
        self.clocks: dict[int, int] = {}  # of a durable subscriber, on its disk: one vector in one place
        self.begun: dict[int, int] = {}  # topic -> the clock at which its delivery began
        self.filters: dict[int, str] = {}
        self.topics: set[int] = set()  # what the application wants
        self.past = 0  # the events that were received or published here, and what was before them
        self.outbox: deque[Published] = deque()  # published, and not sent
        self.unconfirmed: dict[tuple[str, int], Published] = {}
        self.numbers: dict[str, int] = {}
        self._standing: set[int] = set()
        self.module: OrderingModule

    @property
    def durable(self) -> bool:
        return self.world.domain.durable

    def is_settled(self) -> bool:
        """Whether this site waits for nothing, and has read the logs to their ends."""
        module = self.module
        if module.buffered or module.change is not None or module.held.keys() != self.topics:
            return False
        if self.outbox or self.unconfirmed:
            return False
        return all(state.clock >= self.world.log_end(topic) for topic, state in module.held.items())

    def start(self) -> None:
        self.incarnation += INCARNATION
        self.up = True
        if not self.durable and self.delivered:
            self.former.append(self.delivered)
            self.delivered = []
        self.begun = {t: c for t, c in self.begun.items() if t in self.clocks} if self.durable else {}
        self.past = 0
        self.outbox.clear()
        self.unconfirmed.clear()
        self.numbers.clear()
        self.module = OrderingModule(
            self.world.domain, ("module",), self._deliver, self._request, self.world.shape.retry_s
        )
        if self.durable and self.clocks:
            self.act(self.module.resume(self.clocks))
        self.connect()

    def crash(self) -> None:
        self.up = False
        self.timers.clear()
        self.world.network.crash(self.name)

    def connect(self) -> None:
        """To some broker that is up; everything that must be known there is said again."""
        choices = [b for b in self.world.brokers.values() if b.up]
        if not choices:
            self.world.clock.after(0.1, self._try_again, self.incarnation)
            return
        self.broker = self.world.rng.choice(choices)
        self.address = Address(self.broker.name, self.name, self.incarnation + self.world.next_link())
        self.broker.connect(self.address)
        if not self.durable:
            self._interested(sorted(self.topics))
            self.act(self.module.begin_again())
        self._subscribe(self.topics)
        self._send_out()
        self.timers.set(("renew",), RENEW_S)

    def _try_again(self, incarnation: int) -> None:
        if self.up and self.incarnation == incarnation:
            self.connect()

    def broker_lost(self) -> None:
        """The broker has crashed: another one, or the same one later."""
        self.broker = None
        if self.up:
            self.world.clock.after(self.world.rng.expovariate(20.0), self._try_again, self.incarnation)

    # ------------------------------------------------------------------------------------------------ subscriptions

    def want(self, topics: set[int]) -> None:
        """The application changes what it subscribes to."""
        ended = self.topics - topics
        new = topics - self.topics
        self.topics = set(topics)
        for topic in new:
            if topic not in self.filters or not self.durable:  # a durable subscription keeps its filter
                self.filters[topic] = self.world.draw_filter()
        for topic in ended:
            self.clocks.pop(topic, None)
            self.begun.pop(topic, None)
            self._standing.discard(topic)
        if not self.up:
            return
        self.act(self.module.unsubscribe(sorted(ended)))
        if self.broker is None:
            return
        if self.durable:
            for topic in sorted(ended):
                self._end_feed(topic)
        else:
            self._interested(sorted(self.topics))
        self._subscribe(new)

    def _subscribe(self, new: set[int]) -> None:
        missing = new - self.module.wanted
        if not self.durable:
            self.act(self.module.subscribe(sorted(missing)))
            return
        for topic in sorted(self.topics):
            self._ask_feed(topic)

    def _interested(self, topics: list[int]) -> None:
        assert self.broker is not None
        wanted = {topic: self.filters[topic] for topic in topics}
        self._to_edge(self._set_interest, self.broker, self.address, wanted)

    @staticmethod
    def _set_interest(broker: Broker, address: Address, wanted: dict[int, str]) -> None:
        if broker.sites.get(address.handle) == address:
            broker.interest[address.handle] = wanted

    def _to_edge(self, action: Any, *args: Any) -> None:
        assert self.broker is not None
        self.world.network.send((self.name, self.broker.name, "edge"), action, *args)

    def _request(self, version: int, topics: tuple[int, ...], former: tuple[int, ...]) -> list[Effect]:
        types = self.world.domain.types
        change = ChangeSubscription(
            domain=self.world.domain.name,
            version=version,
            types=tuple(types[t] for t in topics),
            former=tuple(types[t] for t in former),
            name="d" if self.durable else "",
        )
        return [SendTo(Address(NodeId("")), change)]

    # ----------------------------------------------------------------------------------------- feeds of durable logs

    def _ask_feed(self, topic: int) -> None:
        name = self.world.domain.types[topic]
        held = self.module.held.get(topic)
        wanted = self.filters[topic]
        interest = Filter.everything() if not wanted else Filter.where("kind", "=", wanted)
        position = held.clock if held is not None else -1
        if topic not in self._standing and held is None:
            position = -1
        feed = Feed(f"{self.name}.{name}", self.name, name, self.address, interest, position, position, CREDIT)
        self._to_rendezvous(name, feed)
        if topic not in self.module.wanted:
            self._to_rendezvous(name, StandingRegistration(topic))

    def _end_feed(self, topic: int) -> None:
        name = self.world.domain.types[topic]
        there = self.world.brokers[self.world.shape.broker_of[name]]
        if there.up:
            there.logs[name].end(f"{self.name}.{name}")

    def _to_rendezvous(self, event_type: str, message: Any) -> None:
        there = self.world.brokers[self.world.shape.broker_of[event_type]]
        sender = Sender(self.name, "writer", incarnation=self.incarnation)
        self.world.network.send((self.name, there.name, "log"), there.receive, message, sender, self.address)

    def _on_log(self, delivered: LogDelivered) -> None:
        topic = self.world.domain.types.index(delivered.event_type)
        after = delivered.after
        for entry in delivered.entries:
            if entry.number > after + 1:
                self.act(self.module.on_skipped(topic, after, entry.number - 1))
            assert entry.event is not None
            self._arrived(topic, entry.number, entry.timestamp, entry.event)
            after = entry.number
        if delivered.upto > after:
            self.act(self.module.on_skipped(topic, after, delivered.upto))

    # ------------------------------------------------------------------------------------------------- what arrives

    def receive(self, message: Any) -> None:
        match message:
            case OrderedPublished(topic=topic, index=index, entries=entries, event=event):
                self._arrived(topic, index, entries, event)
            case IndexesSkipped(topic=topic, after=after, upto=upto):
                self.act(self.module.on_skipped(topic, after, upto))
            case LogDelivered():
                self._on_log(message)
            case CutMade(version=version, entries=entries):
                self.act(self.module.on_cut(version, entries))
            case EventConfirmed(origin=origin):
                self._confirmed(origin)
            case StandingRegistration(topic=topic):
                if topic in self.topics and topic not in self.module.wanted:
                    self._standing.add(topic)
                    self.act(self.module.subscribe([topic]))
            case _:
                raise AssertionError(message)

    def _arrived(self, topic: int, index: int, entries: dict[int, int], event: Event) -> None:
        self.act(self.module.on_event(topic, Arrived(index, entries, event, self.world.clock.now)))

    def _deliver(self, topic: int, event: Arrived, out_of_order: bool) -> list[Effect]:
        number: int = event.payload.body["number"]
        self.delivered.append(Delivered(number, topic, event.index, out_of_order))
        self.past |= self.world.past_of[number] | 1 << number
        if self.durable:
            self.clocks = {t: state.clock for t, state in self.module.held.items()}
        return []

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SetTimer):
                self.timers.set(effect.key, effect.after_s)  # type: ignore[arg-type]
            elif isinstance(effect, SendTo) and self.broker is not None:
                sender = Sender(self.name, "writer", incarnation=self.incarnation)
                self._to_edge(self._receive_at, self.broker, effect.message, sender, self.address)
        for topic, state in self.module.held.items():
            self.begun.setdefault(topic, state.clock)
        if self.durable:
            self.clocks = {t: state.clock for t, state in self.module.held.items()}

    @staticmethod
    def _receive_at(broker: Broker, message: Any, sender: Sender, address: Address) -> None:
        if broker.sites.get(address.handle) == address:
            broker.receive(message, sender, address)

    def _on_timer(self, key: tuple[str, ...]) -> None:
        if key[0] == "module":
            self.act(self.module.on_timer(*key[1:]))
            return
        if self.broker is not None:
            if self.durable:
                for topic in sorted(self.topics):
                    self._ask_feed(topic)
            self._repeat()
        self.timers.set(("renew",), RENEW_S)

    # ---------------------------------------------------------------------------------------------------- publishing

    def publish(self, event: Event) -> None:
        """An application publishes; in a causal domain what is of another type waits for what was before it."""
        family = event.type
        number = self.numbers[family] = self.numbers.get(family, 0) + 1
        self.world.past_of[event.body["number"]] = self.past
        self.past |= 1 << event.body["number"]
        self.outbox.append(Published(event=event, origin=Origin(family, number, self.name, self.incarnation)))
        self._send_out()

    def _send_out(self) -> None:
        domain = self.world.domain
        while self.outbox and self.broker is not None:
            following = self.outbox[0]
            if domain.causal and any(family != following.event.type for family, _ in self.unconfirmed):
                return
            self.outbox.popleft()
            if domain.durable or domain.causal:
                self.unconfirmed[following.origin.family, following.origin.number] = following
            self._to_rendezvous(following.event.type, following)

    def _repeat(self) -> None:
        for published in self.unconfirmed.values():
            message: Any = published
            if not self.durable:
                message = ConfirmEvent(event_type=published.event.type, origin=published.origin)
            self._to_rendezvous(published.event.type, message)

    def _confirmed(self, origin: Origin) -> None:
        if origin.incarnation == self.incarnation and (origin.family, origin.number) in self.unconfirmed:
            del self.unconfirmed[origin.family, origin.number]
            self.world.confirmed.add((self.name, origin.incarnation, origin.family, origin.number))
            self._send_out()
