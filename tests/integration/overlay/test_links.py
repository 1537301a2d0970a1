"""Connections that break, brokers that restart, sites that move: nothing is lost, nothing is seen twice."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from adapters.embedded.free_ports import free_port
from tests.integration.overlay.cluster import Cluster, Recorder, event_type
from tests.support.polling import eventually
from tops import Broker, EventType, Filter, Scope, Site
from tops.core.overlay.topology import rendezvous_of
from tops.core.participant.participation import SiteOptions
from tops.model.errors import NotReachable, TransactionAborted
from tops.model.ids import NodeId
from tops.model.transactions import Outcome, TxType
from tops.protocol.messages import CensusPolicy, TxSpec
from tops.runtime import site_node
from tops.runtime.config import parse_config
from tops.runtime.links.wire import Backpressure


@asynccontextmanager
async def in_process(directory: Path, extra: str = "") -> AsyncIterator[Broker]:
    port = free_port()
    text = f'[cluster]\nname = "test"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{port}"\ndata = "data"\n{extra}'
    async with Broker.run(parse_config(text, directory / "tops.toml"), "b1") as broker:
        yield broker


async def test_a_connection_that_breaks_again_and_again_loses_and_repeats_nothing(tmp_path: Path) -> None:
    orders, total = event_type(), 3000
    async with in_process(tmp_path) as broker:
        async with (
            Site.connect(broker.url, name="publisher", cluster="test") as publisher,
            Site.connect(broker.url, name="subscriber", cluster="test") as subscriber,
        ):
            await publisher.advertise(orders)
            taken = Recorder()
            await subscriber.subscribe(orders, participant=taken)

            for i in range(total):
                await publisher.publish(orders, {"id": i})
                if i % 100 == 50:
                    # Cut without a word, as a network does.
                    for socket in list(broker.connections.sockets):
                        transport = socket.get_extra_info("socket")
                        assert transport is not None
                        socket._req.transport.abort()  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)

            await eventually(lambda: len(taken.ordinary) >= total, 60)
            assert taken.ids() == list(range(total))


async def test_a_site_does_not_stay_with_a_broker_that_takes_connections_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_node, "HANDSHAKE_TIMEOUT_S", 2.0)  # longer than what counts as having been connected
    frozen = await asyncio.start_server(lambda reader, writer: asyncio.Future(), "127.0.0.1", 0)
    host, port = frozen.sockets[0].getsockname()
    try:
        async with (
            in_process(tmp_path) as broker,
            Site.connect([f"ws://{host}:{port}", broker.url], name="moving", cluster="test", timeout_s=60.0) as site,
        ):
            assert site.broker == "b1"
    finally:
        frozen.close()


THREE = {"b1": ["b2", "b3"], "b2": ["b3"], "b3": []}


def type_that_meets_at(broker: str) -> EventType:
    """Of the names that nobody else uses, one whose rendezvous among the three is this broker."""
    brokers = tuple(NodeId(name) for name in THREE)
    return next(each for each in iter(event_type, None) if rendezvous_of(brokers, each.name) == broker)


async def test_a_site_moves_to_another_broker_when_its_own_dies(tmp_path: Path) -> None:
    # Not the rendezvous dies: while that is down its types wait for it, by design.
    orders = type_that_meets_at("b1")
    cluster = Cluster(tmp_path, THREE, "[broker.limits]\nsite_grace_s = 1")
    try:
        await cluster.start()
        async with cluster.site("publisher", "b1") as publisher, cluster.site("subscriber", "b2") as subscriber:
            await publisher.advertise(orders)
            taken = Recorder()
            await subscriber.subscribe(orders, participant=taken)
            assert subscriber.broker == "b2"

            await cluster.kill("b2")
            await eventually(lambda: subscriber.broker != "b2" and _connected(subscriber), 60)
            await eventually(lambda: _arrives(publisher, orders, taken), 60)
    finally:
        await cluster.stop()


def _connected(site: Site) -> bool:
    return site._node.link is not None and site._node.link.connected


async def _arrives(publisher: Site, orders: object, taken: Recorder) -> bool:
    await publisher.publish(orders, {"id": 1})  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    return bool(taken.ordinary)


async def test_a_broker_that_is_paused_is_noticed_and_loses_nothing_confirmed(broker: Cluster) -> None:
    log = event_type("log", durable=True)
    async with broker.site("publisher", heartbeat_s=0.5) as publisher:
        await publisher.advertise(log)
        broker.signal("b1", signal.SIGSTOP)
        publishing = asyncio.ensure_future(publisher.publish(log, {"id": 1}))
        await eventually(lambda: not _connected(publisher), 30)
        broker.signal("b1", signal.SIGCONT)

        assert await asyncio.wait_for(publishing, 30) == 1
        assert await publisher.publish(log, {"id": 2}) == 2


async def test_nobody_there_is_told_in_time() -> None:
    port = free_port()

    with pytest.raises(NotReachable):
        async with Site.connect(f"ws://127.0.0.1:{port}", name="lonely", cluster="test", timeout_s=0.5):
            pytest.fail("there is nobody")


async def test_a_publisher_is_slowed_down_while_the_broker_is_under_pressure(tmp_path: Path) -> None:
    blobs = EventType("blobs", {"data": bytes})
    async with (
        in_process(tmp_path) as broker,
        Site.connect(broker.url, name="publisher", cluster="test") as publisher,
    ):
        await publisher.advertise(blobs)
        other_broker = Backpressure("b2", 1, 1, True)
        broker.node._remote_backpressure["b2"] = other_broker
        broker.node._hold_sites()

        published = 0

        async def flood() -> None:
            nonlocal published
            while True:
                await publisher.publish(blobs, {"data": bytes(64 * 1024)})
                published += 1

        flooding = asyncio.ensure_future(flood())
        link = publisher._node.link
        assert link is not None
        await eventually(lambda: bool(link._window_waiters), 60)  # the publisher waits for room
        assert link.pending_bytes < 16 * 2**20

        broker.node._remote_backpressure.clear()
        broker.node._hold_sites()
        before = published
        await eventually(lambda: published > before + 100, 30)
        flooding.cancel()


@pytest.mark.timeout(280)
async def test_a_durable_subscriber_that_missed_100_000_events_gets_each_once_and_in_order(broker: Cluster) -> None:
    log, missed = event_type("log", durable=True), 100_000
    options = SiteOptions(log_credit=4096)
    async with broker.site("publisher") as publisher:
        await publisher.advertise(log)
        async with broker.site("reader") as reader:
            await reader.subscribe(log, participant=Recorder(), durable="reader")
        rest = iter(range(missed))

        async def publish() -> None:
            for i in rest:
                await publisher.publish(log, {"id": i})

        await asyncio.gather(*(publish() for _ in range(1000)))
        late = Recorder()
        async with broker.site("reader", options=options) as reader:
            await reader.subscribe(log, Filter(), participant=late, durable="reader")
            await eventually(lambda: len(late.ordinary) >= missed, 200)
            await publisher.publish(log, {"id": missed})
            await eventually(lambda: len(late.ordinary) > missed, 60)

    assert [e.number for e in late.ordinary] == list(range(1, missed + 2))
    assert sorted(late.ids()) == list(range(missed + 1))


async def test_what_was_confirmed_is_there_after_a_kill_of_the_broker(broker: Cluster) -> None:
    log = event_type("log", durable=True)
    async with broker.site("publisher") as publisher:
        await publisher.advertise(log)
        for i in range(20):
            await publisher.publish(log, {"id": i})
        await broker.kill("b1")
        await broker.start("b1")
        assert await publisher.publish(log, {"id": 20}) == 21
        taken = Recorder(Scope.NON_TRANSACTIONAL)
        async with broker.site("reader") as reader:
            await reader.subscribe(log, participant=taken, durable="late", start="oldest")
            await eventually(lambda: len(taken.ordinary) == 21)

    assert taken.ids() == list(range(21))


async def test_the_same_name_in_a_new_life_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    async with in_process(tmp_path) as broker:
        async with Site.connect(broker.url, name="twin", cluster="test") as old:
            async with Site.connect(broker.url, name="twin", cluster="test") as new:
                assert new.incarnation > old.incarnation
                await new.advertise(event_type())
                known = broker.node.core.edge.sites
                assert [site.incarnation for site in known.values()] == [new.incarnation]


@pytest.mark.parametrize("mover", ["publisher", "participant"])
async def test_the_outcome_of_a_transaction_is_known_though_a_site_moved_in_the_middle_of_it(
    tmp_path: Path, mover: str
) -> None:
    orders = type_that_meets_at("b1")
    cluster = Cluster(tmp_path, THREE, "[broker.limits]\nsite_grace_s = 1")
    homes = {"publisher": "b3", "participant": "b3", mover: "b2"}
    try:
        await cluster.start()
        async with (
            cluster.site("publisher", homes["publisher"]) as publisher,
            cluster.site("participant", homes["participant"]) as one,
            cluster.site("other", "b1") as two,
        ):
            await publisher.advertise(orders)
            participants = [Recorder(), Recorder()]
            for site, participant in zip((one, two), participants, strict=True):
                await site.subscribe(orders, participant=participant)
            moving = {"publisher": publisher, "participant": one}[mover]
            told = Outcome.COMMITTED
            try:
                async with publisher.transaction(
                    orders, TxType.DISTRIBUTED, census=CensusPolicy(timeout_s=20.0, replies=2), vote_timeout_s=20.0
                ) as tx:
                    await tx.publish(orders, {"id": 1})
                    await eventually(lambda: all(p.events.get(tx.id) == [1] for p in participants), 60)
                    await cluster.kill("b2")
                    await eventually(lambda: moving.broker != "b2" and _connected(moving), 60)
                    await tx.publish(orders, {"id": 2})
            except TransactionAborted:
                told = Outcome.ABORTED

            known = await publisher.get_outcome(tx.id, orders)
            assert known.outcome is told
            await eventually(lambda: all(tx.id in p.committed or tx.id in p.aborted for p in participants), 60)
            for participant in participants:
                if told is Outcome.ABORTED:
                    assert participant.committed == []
                elif tx.id in participant.committed:
                    assert participant.events[tx.id] == [1, 2]
    finally:
        await cluster.stop()


async def test_a_transaction_of_a_site_that_left_a_living_broker_ends_with_a_reason_and_a_known_outcome(
    tmp_path: Path,
) -> None:
    """The old broker can't tell a site that moved from one that died; nobody is left in doubt either way."""
    orders = type_that_meets_at("b1")
    cluster = Cluster(tmp_path, THREE, "[broker.limits]\nsite_grace_s = 1\nheartbeat_s = 60")
    try:
        await cluster.start()
        async with (
            cluster.site("publisher", "b2", heartbeat_s=0.5) as publisher,
            cluster.site("participant", "b1") as other,
        ):
            await publisher.advertise(orders)
            participant = Recorder()
            await other.subscribe(orders, participant=participant)
            spec = TxSpec(orders.name, TxType.DISTRIBUTED, census=CensusPolicy(timeout_s=20.0, replies=1))
            tx = await publisher.begin(spec)
            await tx.publish(orders, {"id": 1})
            await eventually(lambda: participant.events.get(tx.id) == [1], 60)
            cluster.signal("b2", signal.SIGSTOP)
            await eventually(lambda: publisher.broker != "b2" and _connected(publisher), 60)
            cluster.signal("b2", signal.SIGCONT)
            await eventually(lambda: tx.id in participant.aborted, 60)

            with pytest.raises(TransactionAborted, match="moved to another broker"):
                await tx.commit()
            assert (await publisher.get_outcome(tx.id, orders)).outcome is Outcome.ABORTED
            again = await publisher.begin(spec)
            assert (await again.commit()).outcome is Outcome.COMMITTED
    finally:
        await cluster.stop()
