"""All ordering domains at one broker: its topic managers, the logs that they number, and its sites' subscriptions."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from tops.core.log.event_log import EventLog, Repetition
from tops.core.ordering.edge import OrderingEdge
from tops.core.ordering.managers import RETRY_S, TopicManagers
from tops.model.ids import NodeId
from tops.model.ordering import Layout, OrderingDomain, Placement
from tops.protocol.effects import Disseminate, Effect, Persist, SendTo, SetTimer
from tops.protocol.messages import (
    Address,
    ChainPassed,
    ChainTaken,
    ChangeSubscription,
    ConfirmEvent,
    EventConfirmed,
    IndexesSkipped,
    LogEntry,
    OrderedPublished,
    PartialCut,
    Published,
    Sender,
    StageStarted,
    SubscriptionsAnnounced,
    Waiting,
)
from tops.protocol.records import (
    AnyRecord,
    EventNumbered,
    LogAppended,
    ManagersKept,
    PassedTaken,
    Publisher,
    TimestampKept,
    TimestampPassed,
)

OrderingRecord = EventNumbered | TimestampPassed | TimestampKept | PassedTaken | ManagersKept


def layout_of(domain: OrderingDomain, rendezvous: Callable[[str], NodeId]) -> Layout:
    """Where the topic managers of a domain are: at the rendezvous of its name, or each at that of its family."""
    if domain.placement is Placement.TOGETHER:
        place = rendezvous(domain.name)
        return domain.layout(lambda _: place)
    return domain.layout(rendezvous)


class DomainAtBroker:
    """One domain at one broker."""

    def __init__(
        self,
        layout: Layout,
        me: NodeId,
        incarnation: int,
        brokers: Sequence[NodeId],
        logs: Mapping[str, EventLog],
    ) -> None:
        self.layout, self.domain, self.me, self.incarnation = layout, layout.domain, me, incarnation
        self._logs = logs
        self.edge = OrderingEdge(layout, me, incarnation)
        self.managers: TopicManagers | None = None
        if layout.stage_at(me) is not None:
            self.managers = TopicManagers(layout, me, incarnation, self._release)
        self.unanswered = [broker for broker in brokers if broker != me]  # who does not know that this broker started
        self._known: dict[NodeId, int] = {}  # the latest incarnation of each broker
        self._release_to = self._release_durable if self.domain.durable else self._release_volatile

    # -------------------------------------------------------------------------------------------------- publishing

    def on_published(self, published: Published, topic: int, sender: Sender, at: Address) -> list[Effect]:
        """An event for a topic that is managed here."""
        managers = self.managers
        if managers is None or topic not in managers.numbered:
            return []
        waiting = Waiting(published.event, published.origin, sender, at)
        if not self.domain.durable:
            return managers.publish(topic, waiting)
        log = self._logs[self.domain.types[topic]]
        seen = log.recognise(sender, published.origin.number)
        if seen is Repetition.REPEATED:
            return self._confirm_again(managers, topic, waiting)
        if seen is Repetition.OUT_OF_TURN:
            return []
        log.number(managers.numbered[topic] + 1, _publisher(waiting))
        numbered = managers.publish(topic, waiting)
        return numbered if self.domain.causal or not managers.pending[topic] else [*numbered, _confirmed(waiting)]

    def _confirm_again(self, managers: TopicManagers, topic: int, repeated: Waiting) -> list[Effect]:
        """In a causal domain a publisher continues once the timestamp is complete, not before."""
        if self.domain.causal and managers.waits(topic, lambda w: _publisher(w) == _publisher(repeated)):
            return []
        return [_confirmed(repeated)]

    def on_confirm(self, m: ConfirmEvent, topic: int, sender: Sender, at: Address) -> list[Effect]:
        """A publisher waits for an event that is not durable: it is either under way, or done, or lost."""
        managers = self.managers
        if managers is None or managers.waits(
            topic, lambda w: w.sender == sender and w.origin.number == m.origin.number
        ):
            return []
        return [SendTo(at, EventConfirmed(origin=m.origin))]

    # ---------------------------------------------------------------------------------------------------- releasing

    def _release(self, topic: int, index: int, waiting: Waiting | None, entries: dict[int, int]) -> list[Effect]:
        return self._release_to(topic, index, waiting, entries)

    def _release_durable(
        self, topic: int, index: int, waiting: Waiting | None, entries: dict[int, int]
    ) -> list[Effect]:
        assert waiting is not None  # nothing durable is numbered again
        log, publisher = self._logs[self.domain.types[topic]], _publisher(waiting)
        entry = LogEntry(number=index, event=waiting.event, timestamp=entries)
        log.fill(entry, publisher)
        record = LogAppended(event_type=log.event_type, entry=entry, publisher=publisher)
        disseminated = Disseminate(self._publication(topic, index, waiting, entries))
        return [Persist(record), _confirmed(waiting, index), disseminated, *log.pump_all()]

    def _release_volatile(
        self, topic: int, index: int, waiting: Waiting | None, entries: dict[int, int]
    ) -> list[Effect]:
        if waiting is None:
            name = self.domain.types[topic]
            skipped = IndexesSkipped(domain=self.domain.name, topic=topic, event_type=name, after=index - 1, upto=index)
            return [Disseminate(skipped)]
        disseminated = Disseminate(self._publication(topic, index, waiting, entries))
        return [_confirmed(waiting), disseminated] if self.domain.causal else [disseminated]

    def _publication(self, topic: int, index: int, waiting: Waiting, entries: dict[int, int]) -> OrderedPublished:
        return OrderedPublished(
            domain=self.domain.name,
            topic=topic,
            index=index,
            entries=entries,
            event=waiting.event,
            origin=waiting.origin,
            sender=waiting.sender,
        )

    def marker(self, topic: int) -> IndexesSkipped | None:
        """For a link on which this topic is requested again: events that were sent earlier don't reach its end."""
        managers = self.managers
        if managers is None or topic not in managers.numbered:
            return None
        pending = managers.pending[topic]
        upto = next(iter(pending)) - 1 if pending else managers.numbered[topic]
        name = self.domain.types[topic]
        return IndexesSkipped(domain=self.domain.name, topic=topic, event_type=name, after=None, upto=upto)

    # ---------------------------------------------------------------------------------------------------- restarts

    def started(self) -> list[Effect]:
        """Announce the start to the other brokers, repeatedly until each of them has responded."""
        if not self.unanswered:
            self._announced()
            return []
        started = StageStarted(domain=self.domain.name, incarnation=self.incarnation)
        timer = SetTimer(("ordering", self.domain.name, "started"), RETRY_S)
        return [*(SendTo(Address(broker), started) for broker in self.unanswered), timer]

    def on_started(self, started: StageStarted, broker: NodeId) -> list[Effect]:
        effects = self.edge.on_started(started, broker)
        if started.incarnation <= self._known.get(broker, 0):
            return effects
        self._known[broker] = started.incarnation
        if self.managers is not None:
            effects += self.managers.on_started(broker, started.incarnation)
        if broker not in self.unanswered:  # it does not know this broker's incarnation any more
            waits = bool(self.unanswered)
            self.unanswered.append(broker)
            effects += [] if waits else self.started()
        return effects

    def on_announced(self, announced: SubscriptionsAnnounced, broker: NodeId) -> list[Effect]:
        if announced.incarnation != self.incarnation:
            return []
        if self.managers is not None:
            for subscription in announced.subscriptions:
                self.managers.groups.store(subscription)
        if announced.last and broker in self.unanswered:
            self.unanswered.remove(broker)
            if not self.unanswered:
                self._announced()
        return []

    def _announced(self) -> None:
        if self.managers is not None:
            self.managers.groups.announced()

    def on_timer(self, kind: str) -> list[Effect]:
        if kind == "started":
            return self.started() if self.unanswered else []
        return self.managers.on_timer(kind) if self.managers is not None else []

    def recover(self, record: OrderingRecord) -> None:
        if self.managers is None:
            return
        self.managers.recover(record)
        if isinstance(record, EventNumbered):
            item = record.timestamp
            self._logs[self.domain.types[item.topic]].number(item.index, _publisher(record.waiting))


class OrderingBroker:
    """Every ordering domain, seen from one broker."""

    def __init__(
        self,
        me: NodeId,
        incarnation: int,
        domains: Sequence[OrderingDomain],
        rendezvous: Callable[[str], NodeId],
        brokers: Sequence[NodeId],
        logs: Mapping[str, EventLog],
    ) -> None:
        """`logs` are those of durable families whose rendezvous is here; they may be known later than this."""
        self.domains = {
            domain.name: DomainAtBroker(layout_of(domain, rendezvous), me, incarnation, brokers, logs)
            for domain in domains
        }
        self.topics: dict[str, tuple[DomainAtBroker, int]] = {
            name: (self.domains[domain.name], number) for domain in domains for number, name in enumerate(domain.types)
        }
        self.handlers: Mapping[type, Callable[..., list[Effect]]] = {
            ChainPassed: self._passed,
            ChainTaken: self._taken,
            PartialCut: self._cut,
            StageStarted: self._started,
            SubscriptionsAnnounced: self._announced,
            ChangeSubscription: self._change,
            ConfirmEvent: self._confirm,
        }

    def on_published(self, published: Published, family: str, sender: Sender, at: Address) -> list[Effect]:
        """An event of a family in some domain."""
        domain, topic = self.topics[family]
        return domain.on_published(published, topic, sender, at)

    def marker(self, family: str) -> IndexesSkipped | None:
        """See `DomainAtBroker.marker`."""
        domain, topic = self.topics[family]
        return domain.marker(topic)

    def site_lost(self, subscriber: Address) -> list[Effect]:
        """A site is lost: its session has ended and does not resume."""
        return [effect for domain in self.domains.values() for effect in domain.edge.site_lost(subscriber)]

    def _passed(self, m: ChainPassed, sender: Sender, at: Address, now: float) -> list[Effect]:
        managers = self._managers(m.domain)
        return managers.on_passed(m, sender.node) if managers is not None else []

    def _taken(self, m: ChainTaken, sender: Sender, at: Address, now: float) -> list[Effect]:
        managers = self._managers(m.domain)
        return managers.on_taken(m, sender.node) if managers is not None else []

    def _cut(self, m: PartialCut, sender: Sender, at: Address, now: float) -> list[Effect]:
        managers = self._managers(m.domain)
        if managers is None or managers.layout.lowest(m.members) != managers.stage:
            return []
        return managers.on_cut(m)

    def _managers(self, domain: str) -> TopicManagers | None:
        known = self.domains.get(domain)
        return known.managers if known is not None else None

    def _started(self, m: StageStarted, sender: Sender, at: Address, now: float) -> list[Effect]:
        domain = self.domains.get(m.domain)
        return domain.on_started(m, sender.node) if domain is not None else []

    def _announced(self, m: SubscriptionsAnnounced, sender: Sender, at: Address, now: float) -> list[Effect]:
        domain = self.domains.get(m.domain)
        return domain.on_announced(m, sender.node) if domain is not None else []

    def _change(self, m: ChangeSubscription, sender: Sender, at: Address, now: float) -> list[Effect]:
        domain = self.domains.get(m.domain)
        return domain.edge.on_change(m, at) if domain is not None else []

    def _confirm(self, m: ConfirmEvent, sender: Sender, at: Address, now: float) -> list[Effect]:
        known = self.topics.get(m.origin.family)
        return known[0].on_confirm(m, known[1], sender, at) if known is not None else []

    # ------------------------------------------------------------------------------------------------ time, recovery

    def on_timer(self, domain: str, kind: str) -> list[Effect]:
        return self.domains[domain].on_timer(kind)

    def recover(self, record: OrderingRecord) -> None:
        """A record of one of the domains. Records of a domain that is not configured any more are ignored."""
        domain = self.domains.get(record.domain)
        if domain is not None:
            domain.recover(record)

    def recover_appended(self, record: LogAppended) -> None:
        """An entry of some log: the timestamp of its event is complete."""
        known = self.topics.get(record.event_type)
        if known is not None and known[0].managers is not None:
            known[0].managers.recover_released(known[1], record.entry.number)

    def recovered(self) -> list[Effect]:
        """The journal has been read: resume, and announce the start to the other brokers."""
        effects: list[Effect] = []
        for domain in self.domains.values():
            if domain.managers is not None:
                effects += domain.managers.recovered()
            effects += domain.started()
        return effects

    def kept(self) -> Iterator[AnyRecord]:
        """The records that must be written again before old segments of the journal are deleted."""
        for domain in self.domains.values():
            if domain.managers is not None:
                yield from domain.managers.kept()


def _publisher(waiting: Waiting) -> Publisher:
    return Publisher(waiting.sender.node, waiting.sender.incarnation, waiting.origin.number)


def _confirmed(waiting: Waiting, index: int | None = None) -> SendTo:
    return SendTo(waiting.reply_to, EventConfirmed(origin=waiting.origin, log_number=index))
