"""What a subscriber says of an event type that is not its own: it counts for nothing to others."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.core.machines import sender
from tests.integration.overlay.secured import Secured, secured_broker
from tests.support.hostile import Hostile
from tops import EventType
from tops.core.broker.broker import BrokerCore
from tops.core.overlay.topology import Topology
from tops.model.filters import Filter
from tops.model.ids import NodeId
from tops.protocol.effects import Effect, Reject, SendOnLink
from tops.protocol.messages import (
    Address,
    Dissemination,
    Envelope,
    Event,
    LinkMessage,
    Origin,
    Published,
    SubscriptionChanged,
    TypeAdvertised,
)

NEWS = EventType("news", {"n": int})
B1, B2 = NodeId("b1"), NodeId("b2")


@pytest_asyncio.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_broker(tmp_path) as running:
        yield running


def subscription(kind: EventType) -> SubscriptionChanged:
    return SubscriptionChanged(
        subscription=1, definitions=(kind,), filter=Filter.everything(), scope=None, durable=False
    )


def published(rendezvous: NodeId, kind: str, *, early: bool = False) -> Dissemination:
    publication = Published(event=Event(kind, {"n": 1}), origin=Origin(kind, 1))
    return Dissemination(rendezvous=rendezvous, upward=True, early=early, publication=publication, lineage=(kind,))


class Pair:
    """Two brokers, each with a publisher and a reader; messages between them arrive at once."""

    def __init__(self) -> None:
        topology = Topology({B1: [B2], B2: []})
        self.cores = {name: BrokerCore(name, 1, topology, bytes) for name in (B1, B2)}
        self.received: dict[NodeId, list[LinkMessage]] = {}
        self.rejected: list[Reject] = []
        for name, other in ((B1, B2), (B2, B1)):
            self.cores[name].broker_up(other, 1, 0.0)
            for site in ("publisher", "reader"):
                self.cores[name].site_up(sender(f"{site}-{name}"), 0.0)

    def home(self, at: NodeId) -> str:
        return next(n for n in (f"t{k}" for k in range(99)) if self.cores[B1].topology.rendezvous(n) == at)

    def send_messages(self, broker: NodeId, site: str, message: LinkMessage) -> None:
        self._carry(broker, self.cores[broker].receive(NodeId(f"{site}-{broker}"), message, 0.0))

    def _carry(self, broker: NodeId, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reject):
                self.rejected.append(effect)
            elif isinstance(effect, SendOnLink) and effect.link in self.cores:
                self._carry(effect.link, self.cores[effect.link].receive(broker, effect.message, 0.0))
            elif isinstance(effect, SendOnLink):
                self.received.setdefault(effect.link, []).append(effect.message)

    def senders(self, site: str) -> list[object]:
        messages = self.received.get(NodeId(site), [])
        return [m.sender for m in messages if isinstance(m, Dissemination)]


def test_a_subscriber_can_not_make_a_type_disclose_its_publishers() -> None:
    for rendezvous in (B1, B2):
        pair = Pair()
        name = pair.home(rendezvous)
        pair.send_messages(
            B1,
            "publisher",
            Envelope(to=Address(rendezvous), body=TypeAdvertised(definitions=(EventType(name, {"n": int}),))),
        )
        for broker in (B1, B2):
            pair.send_messages(broker, "reader", subscription(EventType(name, {"n": int}, discloses_sender=True)))

        for early in (False, True):
            pair.send_messages(B1, "publisher", published(rendezvous, name, early=early))

        for broker in (B1, B2):
            assert pair.senders(f"reader-{broker}") == [None, None]


def test_a_type_that_discloses_its_publishers_does_so_whatever_subscribers_say_of_it() -> None:
    for rendezvous in (B1, B2):
        pair = Pair()
        name = pair.home(rendezvous)
        told = EventType(name, {"n": int}, discloses_sender=True)
        pair.send_messages(B1, "publisher", Envelope(to=Address(rendezvous), body=TypeAdvertised(definitions=(told,))))
        for broker in (B1, B2):
            pair.send_messages(broker, "reader", subscription(told))

        pair.send_messages(B1, "publisher", published(rendezvous, name, early=True))

        for broker in (B1, B2):
            (found,) = pair.senders(f"reader-{broker}")
            assert found == sender("publisher-b1")


def test_an_event_that_is_sent_to_another_broker_than_its_type_s_reaches_nobody() -> None:
    pair = Pair()
    name = pair.home(B2)
    durable = EventType(name, {"n": int}, durable=True)
    pair.send_messages(B1, "publisher", Envelope(to=Address(B2), body=TypeAdvertised(definitions=(durable,))))
    for broker in (B1, B2):
        pair.send_messages(broker, "reader", subscription(durable))

    for broker in (B1, B2):
        pair.send_messages(broker, "publisher", published(B1, name))

    assert [rejected.code for rejected in pair.rejected] == ["invalid", "invalid"]
    assert pair.senders("reader-b1") == pair.senders("reader-b2") == []


def test_a_type_is_not_defined_at_another_broker_than_its_own() -> None:
    pair = Pair()
    name = pair.home(B2)

    for broker in (B1, B2):
        advertised = TypeAdvertised(definitions=(EventType(name, {"n": int}),))
        pair.send_messages(broker, "publisher", Envelope(to=Address(B1), body=advertised))

    assert name not in pair.cores[B1].rendezvous.types
    assert [rejected.code for rejected in pair.rejected] == ["invalid", "invalid"]


async def test_a_subscriber_that_comes_first_with_another_definition_keeps_nobody_from_the_events(
    alone: Secured,
) -> None:
    async with (
        Hostile.connect(alone.broker.url, alone.keys("eve", "reader")) as eve,
        alone.site("owner") as owner,
        alone.site("victim") as victim,
    ):
        await eve.send(subscription(EventType("news", {"bogus": str}, durable=True, discloses_sender=True)))
        await owner.advertise(NEWS)
        subscribed = await victim.subscribe(NEWS)

        await owner.publish(NEWS, {"n": 1})

        async with asyncio.timeout(10):
            received = await anext(aiter(subscribed))
        assert received.body == {"n": 1} and received.sender is None
