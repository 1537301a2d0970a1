"""What one identity can make a broker or an agent keep: it is bounded, and the rejection is audited."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest_asyncio

from tests.attack.raw_link import Verdict, raw_link
from tests.core.driven_rendezvous import DrivenRendezvous, sent_effects, standing_only
from tests.core.machines import sender
from tests.integration.overlay.secured import Secured, secured_broker
from tests.support.brokers import denied
from tests.support.hostile import Hostile
from tests.support.polling import eventually
from tops import EventType, TxType
from tops.core.broker.broker import BrokerCore
from tops.core.commit.outcomes import Outcomes
from tops.core.coordinator.open_transactions import Quotas
from tops.core.coordinator.rendezvous import QUESTIONS_AT_ONCE, RendezvousOptions
from tops.core.overlay.topology import Topology
from tops.model.filters import Filter
from tops.model.ids import NodeId, TxId, tx_id
from tops.model.sizes import TEXT_MAX
from tops.model.transactions import Outcome
from tops.protocol.effects import Effect, Reject, SendOnLink
from tops.protocol.messages import (
    Address,
    CensusOpened,
    Dissemination,
    Envelope,
    EpochFinished,
    Event,
    GetLogState,
    GetOutcome,
    LinkMessage,
    Origin,
    PrepareEpoch,
    Published,
    SubscriptionChanged,
    TxOutcome,
    TxPublished,
    TxSpec,
    TypeAdvertised,
)
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import exchange_link_hello
from tops.runtime.links.wire import Goodbye, encode_control, make_link_hello
from tops.runtime.site_journal import new_incarnation

B1, B2, EVE = NodeId("b1"), NodeId("b2"), NodeId("eve")


def core(quotas: Quotas | None = None) -> BrokerCore:
    made = BrokerCore(B1, 1, Topology({B1: [B2], B2: []}), bytes, options=RendezvousOptions(quotas=quotas or Quotas()))
    made.broker_up(B2, 1, 0.0)
    made.site_up(sender(EVE), 0.0)
    return made


def home_of(broker: BrokerCore, at: NodeId) -> str:
    return next(name for name in (f"t{n}" for n in range(99)) if broker.topology.rendezvous(name) == at)


def rejections(effects: list[Effect]) -> list[Reject]:
    return [effect for effect in effects if isinstance(effect, Reject)]


def subscription(number: int, *definitions: EventType, ended: bool = False) -> SubscriptionChanged:
    wanted = None if ended else Filter.where("n", "=", number)
    return SubscriptionChanged(subscription=1, definitions=definitions, filter=wanted, scope=None, durable=False)


def test_a_broker_forgets_the_types_that_nobody_subscribes_to_any_more() -> None:
    broker = core()

    for number in range(50):
        parent = EventType(f"parent{number}", {"n": int})
        child = EventType(f"child{number}", {f"a{n}": int for n in range(50)}, parent=parent.name)
        broker.receive(EVE, subscription(number, parent, child), 0.0)
        broker.receive(EVE, subscription(number, parent, child, ended=True), 0.0)

    assert len(broker.table.types) == 0
    assert broker.table.announced_to(B2) == []
    kept = vars(broker.table).values()
    assert all(not value for value in kept if isinstance(value, dict))


def test_a_type_stays_known_while_somebody_subscribes_to_a_child_of_it() -> None:
    broker = core()
    parent, child = EventType("parent", {"n": int}), EventType("child", {}, parent="parent")
    broker.site_up(sender("other"), 0.0)
    broker.receive(EVE, subscription(1, parent, child), 0.0)

    broker.receive(NodeId("other"), subscription(1, parent), 0.0)
    broker.receive(NodeId("other"), subscription(1, parent, ended=True), 0.0)

    assert "parent" in broker.table.types and "child" in broker.table.types


def test_the_next_broker_is_told_when_nobody_subscribes_to_a_type_any_more() -> None:
    broker = core()
    kind = EventType(home_of(broker, B2), {"n": int})
    added = broker.receive(EVE, subscription(1, kind), 0.0)

    removed = broker.receive(EVE, subscription(1, kind, ended=True), 0.0)

    told = [type(e.message).__name__ for e in added + removed if isinstance(e, SendOnLink) and e.link == B2]
    assert told == ["RouteAdded", "RouteRemoved"]


def test_a_subscription_keeps_no_more_of_its_type_than_the_name() -> None:
    broker = core()
    long = EventType("long", {f"attribute{n}": int for n in range(1_000)})

    broker.receive(EVE, subscription(1, long), 0.0)

    (kept,) = broker.edge.sites[EVE].subscriptions.values()
    assert len(msgspec.msgpack.encode(kept.definitions)) < 100


def test_brokers_that_a_site_makes_up_are_not_kept() -> None:
    broker = core()

    for n in range(100):
        made_up = Address(NodeId(f"broker{n}"))
        broker.receive(EVE, Envelope(to=made_up, body=GetLogState(request=1, event_type="t")), 0.0)
    broker.receive(EVE, Envelope(to=Address(B2), body=GetLogState(request=1, event_type="t")), 0.0)

    assert broker.edge.sites[EVE].contacts == {B2}


def request(origin: str, number: int) -> Envelope:
    body = GetOutcome(tx=TxId(f"{origin}.1.{number}"), tx_type=TxType.DISTRIBUTED, event_type="t")
    return Envelope(to=Address(B1), body=body)


def test_made_up_sessions_of_an_identity_are_asked_about_a_bounded_number_of_times() -> None:
    broker = core()
    for number in range(QUESTIONS_AT_ONCE):
        assert not rejections(broker.receive(EVE, request(f"eve:{number}", 1), 0.0))

    (rejected,) = rejections(broker.receive(EVE, request("eve:more", 1), 0.0))

    assert rejected.code == "quota"
    assert not rejections(broker.receive(EVE, request("eve:0", 1), 0.0)), "known by now"
    assert not rejections(broker.receive(EVE, request("eve", 1), 0.0)), "its own session's"
    assert not rejections(broker.receive(EVE, request("eve:later", 1), 2.0))


def test_what_was_truncated_is_counted_by_origin() -> None:
    outcomes = Outcomes(keep_max=10)
    for number in range(1_000):
        outcomes.reject(TxId(f"eve:1.1.{number}"))

    assert len(outcomes.truncated) == 1


def open_transaction(number: int, size: int) -> tuple[LinkMessage, LinkMessage]:
    tx, spec = tx_id(EVE, 1, number), TxSpec("big", TxType.LOCAL, census=None)
    census = CensusOpened(tx=tx, spec=spec, coordinator=B1, incarnation=1, initiator=Address(B1))
    event = TxPublished(tx=tx, event_type="big", sequence=1, event=Event("big", {"x": b"x" * size}))
    return tuple(  # type: ignore[return-value]
        Dissemination(rendezvous=B1, upward=True, early=False, publication=each) for each in (census, event)
    )


def test_the_open_transactions_of_an_identity_keep_a_bounded_number_of_bytes() -> None:
    broker = BrokerCore(
        B1, 1, Topology({B1: []}), bytes, options=RendezvousOptions(quotas=Quotas(transaction_bytes=100_000))
    )
    broker.site_up(sender(EVE), 0.0)

    for number in range(1, 30):
        for message in open_transaction(number, 10_000):
            broker.receive(EVE, message, 0.0)

    assert 5 <= len(broker.rendezvous.open.relays) < 10


def test_transactions_that_wait_to_be_prepared_are_bounded_for_each_identity() -> None:
    rendezvous = DrivenRendezvous(RendezvousOptions(quotas=Quotas(waiting_bytes=200)))
    rendezvous.stand("v", "set", "replica", position=0)
    first = sent_effects(rendezvous.one_shot("p.1.1", standing_only("set")), PrepareEpoch)

    effects = [rendezvous.one_shot(f"p.1.{n}", standing_only("set")) for n in range(2, 40)]

    taken = [n for n, each in enumerate(effects, start=2) if not rejections(each)]
    assert 2 <= len(taken) < 20
    assert all(sent_effects(each, TxOutcome)[0].outcome is Outcome.ABORTED for each in effects[len(taken) :])
    assert {rejected.code for each in effects for rejected in rejections(each)} == {"quota"}
    (prepare,) = first
    rendezvous.vote(prepare)
    rendezvous.deliver(EpochFinished(epoch=prepare.epoch, voter="v", note=False), Address(NodeId("b"), "v", 1))
    waited = rendezvous.core.epochs["set"].held
    assert waited.bytes_of("publisher") < 200
    assert not rejections(rendezvous.one_shot("p.1.99", standing_only("set")))


@pytest_asyncio.fixture
async def secured_plainly(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured_broker(tmp_path) as running:
        yield running


async def test_a_session_that_can_not_be_resumed_leaves_no_connection_behind(secured_plainly: Secured) -> None:
    keys, url = secured_plainly.keys("eve", "reader"), secured_plainly.broker.url
    own, links = Self.with_keys(keys, new_incarnation()), secured_plainly.broker.node.links

    async def connect(session_name: str, received: int) -> str:
        async with client_session() as session, await open_socket(session, url, own, 20.0) as socket:
            await own.introduce(socket, "127.0.0.1")
            theirs = await exchange_link_hello(socket, make_link_hello(session_name, received, "", (), ()), 10.0)
            await asyncio.sleep(0)
            return theirs.proposal

    name = await connect("", 0)
    await eventually(lambda: EVE not in links or not links[EVE].connected)
    await connect(name, 10**9)  # it never got that much
    await eventually(lambda: EVE not in links or not links[EVE].connected)

    async with asyncio.timeout(10):
        await connect(name, 0)


async def test_the_reason_that_a_site_gives_for_leaving_is_not_kept_whole(secured_plainly: Secured) -> None:
    keys = secured_plainly.keys("eve", "reader")
    async with raw_link(secured_plainly.broker.url, "b1", keys, "one") as eve:
        await eve.send_encoded(encode_control(Goodbye("x" * 2_000_000)))

        kept = secured_plainly.broker.node.links[NodeId("eve:one")].parted
        assert kept is not None and len(kept) <= TEXT_MAX


async def test_sessions_of_one_identity_share_the_records_of_their_rejections(secured_plainly: Secured) -> None:
    keys = secured_plainly.keys("eve", "reader")
    kind = TypeAdvertised(definitions=(EventType("mine", {}),))
    for instance in range(8):
        async with raw_link(secured_plainly.broker.url, "b1", keys, f"i{instance}") as eve:
            for _ in range(8):
                assert await eve.send(Envelope(to=Address(B1), body=kind)) is Verdict.REJECTED

    records = [record for record in denied(secured_plainly.broker) if "type mine" in record["detail"]]
    assert 30 <= len(records) < 45
    assert {record["who"] for record in records} == {"eve"}
    assert "eve:i0" in records[0]["detail"]


async def test_only_administrators_learn_which_sites_are_connected(secured_plainly: Secured) -> None:
    port, authority = secured_plainly.broker.table.port, secured_plainly.keys("eve", "reader") / "ca.crt"

    async def peers(who: Path) -> list[str]:
        tls = ssl.create_default_context(cafile=str(authority))
        tls.load_cert_chain(who / "node.crt", who / "node.key")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://127.0.0.1:{port}/v1/topology", ssl=tls) as response,
        ):
            return [link["peer"] for link in json.loads(await response.text())["links"]]

    keys = secured_plainly.keys("eve2", "reader")
    async with Hostile.connect(secured_plainly.broker.url, secured_plainly.keys("victim")):
        assert await peers(keys) == []
        assert await peers(secured_plainly.keys("boss", "admin")) == ["victim"]


async def test_who_ignores_a_window_that_is_held_back_is_disconnected(secured_plainly: Secured) -> None:
    body = Event("news", {"x": b"x" * 2**20})
    async with Hostile.connect(secured_plainly.broker.url, secured_plainly.keys("mallory")) as mallory:
        links = secured_plainly.broker.node.links
        await eventually(lambda: NodeId("mallory") in links)
        links[NodeId("mallory")].hold(True)

        for number in range(1, 30):
            publication = Published(event=body, origin=Origin("news", number))
            await mallory.send(Dissemination(rendezvous=B1, upward=True, early=False, publication=publication))

        await eventually(lambda: "window" in mallory.closed)


async def test_who_follows_a_log_is_told_to_operators_and_to_its_replicas_alone(secured_plainly: Secured) -> None:
    ledger = EventType("ledger", {"n": int}, durable=True)
    async with secured_plainly.site("victim") as victim, secured_plainly.site("boss", "admin") as boss:
        await victim.advertise(ledger)
        await victim.subscribe(ledger, durable="accounts")
        async with secured_plainly.site("eve", "reader") as eve:
            assert (await eve.get_log_state(ledger)).followers == ()
        for each in (victim, boss):
            assert [follower.name for follower in (await each.get_log_state(ledger)).followers] == ["victim.accounts"]
