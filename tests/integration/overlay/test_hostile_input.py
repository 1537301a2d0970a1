"""Frames that are too large, cut short, random or almost right; readers that never read."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import aiohttp
import msgspec
import psutil
import pytest
import pytest_asyncio

from adapters.embedded.free_ports import free_port
from tests.integration.overlay.cluster import TOPOLOGIES, Cluster, Recorder, event_type
from tests.support.polling import eventually
from tops import Broker, EventType, Filter, Participant, Received, Scope, Site, TxType
from tops.core.link.session import Frame
from tops.model.errors import ProtocolError
from tops.model.ids import NodeId, Pseudonym, TxId
from tops.protocol.messages import (
    AbortTx,
    Address,
    BeginPublic,
    BeginTx,
    CensusOpened,
    CensusReplied,
    CommitTx,
    Dissemination,
    Envelope,
    EpochId,
    EpochVoted,
    Event,
    EventsPublished,
    FollowLog,
    GetOutcome,
    LinkMessage,
    OneShot,
    Origin,
    Published,
    PublishInTx,
    RunOneShot,
    RunOneShots,
    ScopeChosen,
    Sender,
    StandingRegistered,
    SubscriptionChanged,
    TxPublished,
    TxSpec,
    TypeAdvertised,
)
from tops.runtime import site_node
from tops.runtime.config import parse_config
from tops.runtime.edge.guard import GRANTED_MAX, Guard
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import exchange_link_hello, receive_bytes
from tops.runtime.links.sockets import DialledSocket
from tops.runtime.links.wire import decode, encode_control, encode_frame, encode_message, make_link_hello
from tops.security import HANDSHAKE_BYTES_MAX, Identity, Kind, Permissions

FUZZ_INPUTS = 100_000


@pytest_asyncio.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker in this process, so that what goes wrong inside is seen here."""
    port = free_port()
    text = (
        f'[cluster]\nname = "test"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{port}"\ndata = "data"\n'
        "[broker.limits]\nconnections_per_s = 10000\nwaiting_per_address = 1000\nsite_grace_s = 0.2\n"
    )
    async with Broker.run(parse_config(text, tmp_path / "tops.toml"), "b1") as broker:
        yield broker


async def serves(broker: Broker) -> bool:
    """A publisher reaches a subscriber through it, and a transaction commits."""
    orders = event_type("serves")
    async with (
        Site.connect(broker.url, name="honest1", cluster="test") as one,
        Site.connect(broker.url, name="honest2", cluster="test") as two,
    ):
        await one.advertise(orders)
        taken = Recorder()
        await two.subscribe(orders, participant=taken, scope=Scope.DISTRIBUTED)
        await one.publish(orders, {"id": 1})
        await one.execute(orders, events=[{"id": 2}])
        await eventually(lambda: taken.ids() == [1] and len(taken.committed) == 1)
    return True


def samples(me: str) -> Iterator[LinkMessage]:
    """One of each kind that a site sends."""
    orders = EventType("fuzz", {"id": int})
    log = EventType("fuzzlog", {"id": int}, durable=True)
    spec = TxSpec("fuzz", TxType.DISTRIBUTED)
    tx = TxId(f"{me}.1.1")
    event = Event("fuzz", {"id": 1})
    epoch = EpochId("fuzz", 1, 1, NodeId("b1"), 1)
    for message in (
        TypeAdvertised(definitions=(orders,)),
        TypeAdvertised(definitions=(log,)),
        BeginTx(tx=tx, spec=spec),
        BeginPublic(request=1, spec=spec),
        RunOneShot(tx=TxId(f"{me}.1.2"), spec=spec, events=(event,)),
        RunOneShots(spec=spec, transactions=tuple(OneShot(TxId(f"{me}.1.{n}"), (event,)) for n in (3, 4))),
        CensusReplied(tx=tx, pseudonym=Pseudonym("p"), event_type="fuzz"),
        PublishInTx(tx=tx, request=3, event=event),
        CommitTx(tx=tx, tx_type=TxType.DISTRIBUTED, event_type="fuzz", last_sequence=1),
        AbortTx(tx=tx, tx_type=TxType.DISTRIBUTED, event_type="fuzz", reason="no"),
        GetOutcome(tx=tx, tx_type=TxType.DISTRIBUTED, event_type="fuzz"),
        EpochVoted(epoch=epoch, digest="d", voter="v", excluded={}),
        StandingRegistered(
            voter="v", event_type="fuzz", filter=Filter(), scope=Scope.DISTRIBUTED, secret=b"s", position=1
        ),
        FollowLog(name="n", definitions=(log,), filter=Filter(), position=None, start="now", credit=10, voter=None),
    ):
        yield Envelope(to=Address(NodeId("b1")), body=message)
    for publication in (
        Published(event=event, origin=Origin("fuzz", 1)),
        Published(event=Event("fuzzlog", {"id": 1}), origin=Origin("fuzzlog", 1)),
        EventsPublished(
            event_type="fuzz",
            bodies=(msgspec.Raw(msgspec.msgpack.encode({"id": 1})),),
            origin=Origin("fuzz", 2),
        ),
        TxPublished(tx=tx, event_type="fuzz", sequence=1, event=event),
        CensusOpened(tx=tx, spec=spec, coordinator=NodeId("b1"), incarnation=1, initiator=Address(NodeId("b1"))),
    ):
        yield Dissemination(
            rendezvous=NodeId("b1"),
            upward=True,
            early=True,
            publication=publication,
        )
    yield SubscriptionChanged(
        subscription=1,
        definitions=(orders,),
        filter=Filter.where("id", ">", 3),
        scope=None,
        durable=False,
    )
    yield ScopeChosen(tx=tx, scope=Scope.LOCAL, distributed=True)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat, insert: a few small changes, or one that leaves nothing as it was."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(6):
            case 0 if changed:
                changed[place] = rng.randrange(256)
            case 1:
                del changed[place:]
            case 2:
                changed[place:place] = rng.randbytes(rng.randint(1, 8))
            case 3:
                changed[place:place] = changed[place : place + 20]
            case 4 if changed:
                changed[place] ^= 1 << rng.randrange(8)
            case 5:
                changed[place : place + 4] = rng.choice([b"\xdf\xff\xff\xff\xff", b"\xc4\xff", b"\xdd\x7f\xff\xff\xff"])
    return bytes(changed)


@pytest.mark.timeout(280)
async def test_a_hundred_thousand_hostile_frames_leave_the_broker_serving(serving: Broker) -> None:
    rng = random.Random(20)
    node, me = serving.node, "fuzzer"
    guard = Guard(Identity("test", Kind.SITE, me, "admin"), Permissions(), ["b1"])
    node.act(node.core.site_up(Sender(me, "admin", incarnation=1), 0.0))
    whole = [b"\0" + msgspec.msgpack.encode((1, 0, [msgspec.Raw(encode_message(m))])) for m in samples(me)]
    words = [encode_control(make_link_hello("s", 1, "p", ("b1",), ()))]
    passed = rejected = 0

    for number in range(FUZZ_INPUTS):
        source = rng.choice(whole) if rng.random() < 0.97 else rng.choice(words)
        data = mutated(rng, source) if rng.random() < 0.98 else rng.randbytes(rng.randint(0, 200))
        try:
            item = decode(data)
            for message in item.messages if isinstance(item, Frame) else ():
                if guard.rejection(message) is None:
                    node.act(node.core.receive(NodeId(me), message, float(number)))
                    passed += 1
        except ProtocolError:
            rejected += 1
        if number % 1000 == 0:
            await asyncio.sleep(0)

    assert passed > FUZZ_INPUTS / 100, "the fuzzer must get past the decoder often enough to matter"
    assert rejected > FUZZ_INPUTS / 10
    assert await serves(serving)


async def open_link(session: aiohttp.ClientSession, broker: Broker, name: str, incarnation: int) -> DialledSocket:
    own = Self.without_keys("test", Kind.SITE, name, incarnation, "writer")
    socket = await open_socket(session, broker.url, own, 30)
    await own.introduce(socket, "127.0.0.1")
    await exchange_link_hello(socket, make_link_hello("", 0, "", (), ()), 10)
    return socket


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x07whatever",
        b"\0",
        b"\0\x93\x01",
        b"\0" + b"\x93" * 5000,
        b"\0" + b"\x91" * 100_000,
        b"\1" + msgspec.msgpack.encode(["LinkHello", 1, "", 0, ""]),
        b"\1" + msgspec.msgpack.encode(["Backpressure", "b1", 1, 1, True]),
        encode_frame(Frame(7, 0)),
        encode_frame(Frame(1, 99)),
        os.urandom(3000),
    ],
    ids=["empty", "kind", "nothing", "cut", "nested", "deep", "twice", "brokers", "gap", "unsent", "random"],
)
async def test_a_broken_frame_ends_its_connection_and_no_other(serving: Broker, data: bytes) -> None:
    async with (
        client_session() as session,
        Site.connect(serving.url, name="bystander", cluster="test") as bystander,
    ):
        socket = await open_link(session, serving, "hostile", 1)
        await socket.send_bytes(data)
        with pytest.raises(ProtocolError):
            while True:
                await receive_bytes(socket, 10)

        await bystander.advertise(event_type())
        assert bystander._node.link is not None and bystander._node.link.connected


async def test_a_frame_over_the_limit_is_refused_unread(serving: Broker) -> None:
    async with client_session() as session:
        socket = await open_link(session, serving, "large", 1)
        with pytest.raises((ProtocolError, ConnectionError)):
            await socket.send_bytes(b"\0" + bytes(9 * 2**20))
            while True:
                await receive_bytes(socket, 10)
    assert await serves(serving)


async def test_a_stranger_is_read_a_few_kilobytes_and_a_known_site_megabytes(serving: Broker) -> None:
    async with client_session() as session:
        stranger = await session.ws_connect(f"{serving.url}/link")
        await stranger.send_bytes(bytes(HANDSHAKE_BYTES_MAX + 2))
        response = await stranger.receive(timeout=10)
        assert (response.type, response.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.MESSAGE_TOO_BIG)

    blob = EventType("large", {"data": bytes}, durable=True)
    async with Site.connect(serving.url, name="known", cluster="test") as site:
        await site.advertise(blob)
        assert await site.publish(blob, {"data": bytes(2 * 2**20)}) == 1


async def test_text_and_strangers_are_turned_away(serving: Broker) -> None:
    async with client_session() as session:
        socket = await open_link(session, serving, "texter", 1)
        await socket.send_str("hello")
        with pytest.raises(ProtocolError):
            await receive_bytes(socket, 10)
        stranger = await session.ws_connect(f"{serving.url}/link")
        await stranger.send_bytes(b"who are you")
        with pytest.raises(ProtocolError):
            await receive_bytes(cast(DialledSocket, stranger), 10)
    assert await serves(serving)


async def test_an_event_that_no_frame_could_hold_is_refused_at_its_publisher(serving: Broker) -> None:
    blob = EventType("blob", {"data": bytes}, durable=True)
    async with Site.connect(serving.url, name="huge", cluster="test") as site:
        await site.advertise(blob)
        with pytest.raises(ProtocolError, match="split it"):
            await site.publish(blob, {"data": bytes(9 * 2**20)})
        assert await site.publish(blob, {"data": b"small"}) == 1


def test_a_site_that_names_ever_new_types_costs_no_memory() -> None:
    me = NodeId("s")
    guard = Guard(Identity("test", Kind.SITE, me, "admin"), Permissions(), ["b1"])

    for i in range(GRANTED_MAX + 10):
        event = Published(event=Event(f"t{i}", {}), origin=Origin(f"t{i}", 1))
        assert guard.rejection(Dissemination(NodeId("b1"), True, True, event)) is None
        assert guard.may_read(f"t{i}")

    assert len(guard._publishable) <= GRANTED_MAX and len(guard._readable) <= GRANTED_MAX


async def test_a_reader_that_never_reads_is_cut_off_and_costs_no_memory(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, TOPOLOGIES["single"], '[broker.limits]\nqueue_bytes_max = "2 MiB"')
    payload = EventType("flood", {"data": bytes})
    try:
        await cluster.start()
        process = psutil.Process(cluster.processes["b1"].pid)
        async with cluster.site("publisher") as publisher, client_session() as session:
            await publisher.advertise(payload)
            own = Self.without_keys("test", Kind.SITE, "sleeper", 1, "writer")
            socket = await open_socket(session, cluster.url("b1"), own, 30)
            await own.introduce(socket, "127.0.0.1")
            await exchange_link_hello(socket, make_link_hello("", 0, "", (), ()), 10)
            wanted = SubscriptionChanged(
                subscription=1, definitions=(payload,), filter=Filter(), scope=Scope.NON_TRANSACTIONAL, durable=False
            )
            await socket.send_bytes(b"\0" + msgspec.msgpack.encode((1, 0, [msgspec.Raw(encode_message(wanted))])))
            await eventually(lambda: _subscribed(cluster, "sleeper"))
            before = process.memory_info().rss

            for _ in range(8000):
                await publisher.publish(payload, {"data": bytes(32 * 1024)})
            await publisher.flush()

            await eventually(lambda: _lost(cluster, "sleeper"))
            grown = _peak_memory(process.pid) - before  # at the end the broker may have given memory back
            # A busy machine lets the publisher's own window fill (tens of MiB); a queue without a bound takes all 256.
            assert grown < 96 * 2**20, f"{grown} bytes for a queue of 2 MiB, after 256 MiB of events"
    finally:
        await cluster.stop()


def _peak_memory(pid: int) -> int:
    """Most bytes that the process has ever held in memory."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class Stuck(Participant):
    """Takes an event and never comes back."""

    async def on_notify(self, event: Received) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("bound", ["BACKLOG_MAX", "BACKLOG_BYTES_MAX"])
async def test_a_site_whose_participant_is_stuck_stops_reading_and_its_memory_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """It read one frame in every pause, for ever, so that its broker never took it for slow."""
    monkeypatch.setattr(site_node, bound, {"BACKLOG_MAX": 64, "BACKLOG_BYTES_MAX": 4 * 2**20}[bound])
    monkeypatch.setattr(site_node, "BACKLOG_PAUSE_S", 0.0005)
    cluster = Cluster(tmp_path, TOPOLOGIES["single"])
    payload = EventType("flood", {"data": bytes})
    try:
        await cluster.start()
        async with cluster.site("publisher") as publisher, cluster.site("stuck") as stuck:
            await publisher.advertise(payload)
            subscription = await stuck.subscribe(payload, participant=Stuck())
            first_incarnation = stuck._node.link
            assert first_incarnation is not None

            for _ in range(2000):
                await publisher.publish(payload, {"data": bytes(32 * 1024)})
            await publisher.flush()

            await eventually(lambda: _slow_readers(cluster), 60)  # it does not read any more
            assert first_incarnation.traffic.received_bytes < 20 * 2**20, "of the 64 MiB that were sent"
            assert stuck._node.drivers[subscription.number].backlog * 32 * 1024 < 20 * 2**20
    finally:
        await cluster.stop()


async def _slow_readers(cluster: Cluster) -> bool:
    return '"slow reader disconnected"' in (cluster.directory / "b1.log").read_text()


async def _subscribed(cluster: Cluster, site: str) -> bool:
    view = await cluster.get("b1", "/v1/subscriptions")
    return view is not None and site in {s["site"] for s in view["sites"]}


async def _lost(cluster: Cluster, site: str) -> bool:
    view = await cluster.get("b1", "/v1/topology")
    return view is not None and site not in {link["peer"] for link in view["links"]}
