"""A broker and its disk: what survives, what is dropped, what stops it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from adapters.embedded.free_ports import free_port
from tests.integration.overlay.cluster import QUICK, Cluster, Recorder, event_type
from tests.support.polling import eventually
from tops import Broker, EventType, Outcome, Participant, Received, Scope, Site
from tops.core.coordinator.rendezvous import RendezvousOptions
from tops.model.errors import JournalFailed, LimitExceeded, NotReachable
from tops.model.ids import NodeId, TxId
from tops.protocol.effects import SendTo
from tops.protocol.messages import Address, EpochId, GetEpochOutcome, Sender
from tops.protocol.records import MembersDeclared, PlansDeclared, PublishersRetained
from tops.protocol.set_types import set_definition
from tops.runtime.config import Config, parse_config
from tops.server import retention


def config_at(directory: Path, extra: str = "") -> Config:
    port = free_port()
    text = f'[cluster]\nname = "test"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{port}"\ndata = "data"\n{extra}'
    return parse_config(text, directory / "tops.toml")


@asynccontextmanager
async def site_at(broker: Broker, name: str) -> AsyncIterator[Site]:
    async with Site.connect(broker.url, name=name, cluster="test", options=QUICK) as site:
        yield site


class Busy(Participant):
    """Takes nothing: its position stays where it is."""

    async def on_notify(self, event: Received) -> None:
        await asyncio.Event().wait()


BULK = EventType("bulk", {"data": bytes}, durable=True)
SMALL = '[broker.retention]\nsize = "3 MiB"'


async def publish_until_dropped(broker: Broker, site: Site) -> None:
    while broker.retainer.dropped_segments == 0:
        await publish_bulk(site, 1)


async def publish_bulk(site: Site, megabytes: int) -> int:
    """Returns how many were confirmed."""
    results = await asyncio.gather(
        *(site.publish(BULK, {"data": bytes(64 * 1024)}) for _ in range(16 * megabytes)), return_exceptions=True
    )
    return sum(isinstance(r, int) for r in results)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention looks at every step."""
    monkeypatch.setattr(retention, "CHECK_EVERY_S", 0.0)


@pytest.mark.usefixtures("eager")
async def test_what_everybody_has_taken_is_dropped_and_the_rest_survives_a_restart(tmp_path: Path) -> None:
    config = config_at(tmp_path, '[broker.retention]\nsize = "8 MiB"')
    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(BULK)
        reader = Recorder()
        async with site_at(broker, "reader") as site:
            await site.subscribe(BULK, participant=reader, durable="reader")
            confirmed = 0
            while broker.retainer.dropped_segments == 0:
                confirmed += await publish_bulk(writer, 4)
                assert confirmed < 16 * 400
            await eventually(lambda: len(reader.ordinary) == confirmed, 60)
        oldest = broker.node.core.rendezvous.logs["bulk"].oldest
        assert 1 < oldest <= confirmed

    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(BULK)
        assert await writer.publish(BULK, {"data": b"next"}) == confirmed + 1
        late = Recorder()
        async with site_at(broker, "late") as site:
            await site.subscribe(BULK, participant=late, durable="late", start="oldest")
            await eventually(lambda: bool(late.ordinary) and late.ordinary[-1].number == confirmed + 1, 60)
        numbers = [e.number for e in late.ordinary]
        assert numbers == list(range(numbers[0] or 0, confirmed + 2))
    assert reader.ordinary[-1].number == confirmed


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("when_full", ["refuse", "warn"])
async def test_what_a_durable_subscriber_needs_is_never_dropped(tmp_path: Path, when_full: str) -> None:
    config = config_at(
        tmp_path, f'[broker.retention]\nsize = "4 MiB"\nfollower_size = "64 MiB"\nwhen_full = "{when_full}"'
    )
    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(BULK)
        async with site_at(broker, "reader") as site:
            await site.subscribe(BULK, participant=Busy(), durable="reader")
        await publish_bulk(writer, 8)
        await eventually(lambda: broker.retainer.space is retention.JournalSpace.FULL, 30)

        if when_full == "refuse":
            with pytest.raises(LimitExceeded, match="full"):
                await writer.publish(BULK, {"data": b"more"})
        else:
            assert await writer.publish(BULK, {"data": b"more"})
        assert any(kind == "journal-full" and "reader" in text for _, kind, text in broker.node.alarms)
        assert broker.node.core.rendezvous.logs["bulk"].oldest == 1


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("retained", ['when_full = "refuse"', 'follower_size = "4 MiB"'])
async def test_a_follower_that_takes_nothing_is_dropped_for_the_others_and_hears_why(
    tmp_path: Path, retained: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = EventType("other", {"data": bytes}, durable=True)
    config = config_at(tmp_path, f'[broker.retention]\nsize = "4 MiB"\n{retained}')
    async with AsyncExitStack() as stack:
        async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
            await writer.advertise(BULK)
            await writer.advertise(other)
            honest = await stack.enter_async_context(site_at(broker, "honest"))
            taken = Recorder()
            await honest.subscribe(BULK, participant=taken, durable="all")
            async with site_at(broker, "hoarder") as site:
                await site.subscribe(BULK, participant=Busy(), durable="mine")
                await site.subscribe(other, participant=Busy(), durable="mine")
            confirmed = 0
            for _ in range(12):
                confirmed += await publish_bulk(writer, 1)
                await broker.retainer.step()
            await eventually(lambda: len(taken.ordinary) == confirmed, 30)
            await eventually(lambda: broker.retainer.space is retention.JournalSpace.ENOUGH, 30)

            assert confirmed == 12 * 16
            assert await writer.publish(other, {"data": b"more"})
            assert broker.node.store.journal.size_bytes < 8 * 2**20
            log = broker.node.core.rendezvous.logs["bulk"]
            assert [feed.key for feed in log.subscribers] == ["honest.all"] and list(log.dropped) == ["hoarder.mine"]
            assert any(kind == "follower-dropped" and "hoarder.mine" in text for _, kind, text in broker.node.alarms)
            assert broker.node.counters["followers_dropped"] == 1
            await stack.aclose()
        assert "hoarder" in (tmp_path / "data" / "audit.log").read_text()

    async with Broker.run(config, "b1") as broker, site_at(broker, "hoarder") as site:
        back = Recorder()
        subscription = await site.subscribe(BULK, participant=back, durable="mine", start="oldest")
        await eventually(lambda: any("mine: it was dropped" in text for text in caplog.messages))
        assert back.ordinary == []
        await subscription.unsubscribe(forget=True)
        await site.subscribe(BULK, participant=back, durable="mine", start="oldest")
        await eventually(lambda: bool(back.ordinary))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("taken", [True, False])
async def test_what_is_old_goes_unless_a_durable_subscriber_needs_it(tmp_path: Path, taken: bool) -> None:
    config = config_at(tmp_path, '[broker.retention]\nsize = "64 MiB"\nage = 0.2')
    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer, site_at(broker, "r") as site:
        await writer.advertise(BULK)
        reader = Recorder() if taken else Busy()
        await site.subscribe(BULK, participant=reader, durable="reader")

        await publish_bulk(writer, 12)

        old = broker.node.store.journal.next_sequence
        if taken:
            await eventually(lambda: broker.node.core.rendezvous.logs["bulk"].oldest > 1, 60)
        else:
            marks = broker.retainer._marks
            await eventually(lambda: bool(marks) and marks[0][1] >= old, 60)  # all of it is old enough
            assert broker.node.core.rendezvous.logs["bulk"].oldest == 1
            written = broker.node.store.journal.next_sequence
            for _ in range(20):
                await broker.retainer.step()
            assert broker.node.store.journal.next_sequence == written, "to look, and drop nothing, costs nothing"
        assert broker.retainer.space is retention.JournalSpace.ENOUGH
        assert broker.node.store.journal.size_bytes < 64 * 2**20


@pytest.mark.usefixtures("eager")
async def test_a_publisher_goes_on_after_what_it_published_was_dropped_and_the_broker_restarted(tmp_path: Path) -> None:
    config = config_at(tmp_path, SMALL)
    async with AsyncExitStack() as sites:
        async with Broker.run(config, "b1") as broker:
            early = await sites.enter_async_context(site_at(broker, "early"))
            other = await sites.enter_async_context(site_at(broker, "other"))
            await early.advertise(BULK)
            await other.advertise(BULK)
            for _ in range(3):
                await early.publish(BULK, {"data": b"early"})
            await publish_until_dropped(broker, other)
        async with Broker.run(config, "b1") as broker:
            async with asyncio.timeout(60):
                number = await early.publish(BULK, {"data": b"late"})
            assert number == broker.node.core.rendezvous.logs["bulk"].last_number
            await sites.aclose()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("size", "event"), [("1 MiB", 200_000), ("2 MiB", 900_000), ("512 KiB", 100_000)])
async def test_a_small_journal_that_nobody_needs_is_never_full(tmp_path: Path, size: str, event: int) -> None:
    config = config_at(tmp_path, f'[broker.retention]\nsize = "{size}"\nwhen_full = "refuse"')
    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(BULK)
        for _ in range(40):
            assert await writer.publish(BULK, {"data": bytes(event)})
            await broker.retainer.step()
        assert broker.retainer.dropped_segments > 0


@pytest.mark.usefixtures("eager")
async def test_numbers_that_were_dropped_stay_gone_however_often_the_broker_is_restarted(tmp_path: Path) -> None:
    config = config_at(tmp_path, SMALL)
    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(BULK)
        await publish_until_dropped(broker, writer)
        oldest = broker.node.core.rendezvous.logs["bulk"].oldest
    for _ in range(3):
        async with Broker.run(config, "b1") as broker, site_at(broker, "reader") as reader:
            kept = broker.node.core.rendezvous.logs["bulk"]
            assert kept.oldest >= oldest > 1
            assert all(entry.event is not None for entry in kept.tail.values()), "a dropped number is no void one"
            with pytest.raises(NotReachable, match="no longer retained"):
                [entry async for entry in reader.read_log(BULK, 1, 10)]
            doubtful = GetEpochOutcome(epoch=EpochId("bulk", 1, 1, NodeId("b1"), 1), digest="", voter="v")
            asked = broker.node.core.rendezvous.on_message(
                doubtful, Sender("v", "writer", incarnation=1), Address(NodeId("b1"), "v", 1), 0.0
            )
            assert not any(isinstance(effect, SendTo) for effect in asked), "nobody is told that it was aborted"


@pytest.mark.usefixtures("eager")
async def test_a_type_that_was_defined_after_what_is_dropped_finds_its_parent(tmp_path: Path) -> None:
    child = EventType("bulk.child", {}, parent="bulk")
    config = config_at(tmp_path, SMALL)
    async with Broker.run(config, "b1") as broker:
        async with site_at(broker, "writer") as writer, site_at(broker, "reader") as site:
            await writer.advertise(BULK)
            journal = broker.node.store.journal
            while journal.kept_from(journal.durable_sequence) == journal.first_sequence:
                await publish_bulk(writer, 1)
            await writer.advertise(child)
            await site.subscribe(BULK, participant=Busy(), durable="reader")
            await publish_until_dropped(broker, writer)

    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(BULK)
        await writer.advertise(child)
        assert await writer.publish(child, {"data": b"more"})


@pytest.mark.usefixtures("eager")
async def test_a_commit_of_a_type_without_a_log_is_never_called_aborted_after_its_record_was_dropped(
    tmp_path: Path,
) -> None:
    orders = event_type()
    config = config_at(tmp_path, SMALL)
    async with Broker.run(config, "b1") as broker, site_at(broker, "one") as one, site_at(broker, "two") as two:
        await one.advertise(orders)
        await one.advertise(BULK)
        await two.subscribe(orders, participant=Recorder(), scope=Scope.DISTRIBUTED)
        committed = await one.execute(orders, events=[{"id": 1}])
        await eventually(lambda: not broker.node.core.rendezvous.epochs[orders.name].decided, 30)
        await publish_until_dropped(broker, one)
        assert (await one.get_outcome(committed.tx, orders)).outcome is Outcome.COMMITTED

    async with Broker.run(config, "b1") as broker, site_at(broker, "three") as three:
        assert (await three.get_outcome(committed.tx, orders)).outcome is Outcome.UNKNOWN
        assert broker.node.core.rendezvous.outcomes.is_rejected(committed.tx), "it must not run a second time"


class SlowToCommit(Participant):
    """Promises, and does not come to an end."""

    async def on_commit(self, tx: TxId) -> None:
        await asyncio.Event().wait()


@pytest.mark.usefixtures("eager")
async def test_a_commit_that_is_dropped_before_anybody_has_finished_it_is_never_called_aborted(tmp_path: Path) -> None:
    config = config_at(tmp_path, '[broker.retention]\nsize = "3 MiB"\n[broker.limits]\nfinish_s = 60')
    async with AsyncExitStack() as ending:
        async with Broker.run(config, "b1") as broker:
            one = await ending.enter_async_context(site_at(broker, "one"))
            two = await ending.enter_async_context(site_at(broker, "two"))
            await one.advertise(BULK)
            await two.subscribe(BULK, participant=SlowToCommit(), scope=Scope.DISTRIBUTED)
            executing = asyncio.ensure_future(one.execute(BULK, events=[{"data": b"tx"}]))
            ending.callback(executing.cancel)
            await eventually(
                lambda: any(e.committed for e in broker.node.core.rendezvous.epochs["bulk"].in_flight.values())
            )
            (epoch,) = broker.node.core.rendezvous.epochs["bulk"].in_flight.values()
            await publish_until_dropped(broker, one)

        async with Broker.run(config, "b1") as broker, site_at(broker, "three") as three:
            assert (await three.get_outcome(epoch.committed[0], BULK)).outcome is Outcome.UNKNOWN
            await ending.aclose()


@pytest.mark.usefixtures("eager")
async def test_a_subscription_that_was_refused_keeps_nothing_in_the_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_at(tmp_path, '[broker.retention]\nsize = "3 MiB"\nwhen_full = "refuse"')
    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(BULK)
        await publish_until_dropped(broker, writer)
        async with site_at(broker, "late") as late:
            await late.subscribe(BULK, participant=Recorder(), durable="late", position=3)
            await eventually(lambda: any(getattr(record, "alarm", "") == "log-gone" for record in caplog.records), 30)

    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        assert broker.node.core.rendezvous.logs["bulk"].subscribers == []
        await writer.advertise(BULK)
        for _ in range(6):
            assert await publish_bulk(writer, 1) == 16


@pytest.mark.usefixtures("eager")
async def test_who_asks_for_the_oldest_entry_while_it_is_dropped_gets_the_oldest_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_at(tmp_path, SMALL)
    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer, site_at(broker, "r") as site:
        broker.node.core.rendezvous.node.options = RendezvousOptions(log_tail=4)  # what is dropped is not in memory
        await writer.advertise(BULK)
        drop, dropping, asked = broker.node.store.journal.drop_before, asyncio.Event(), asyncio.Event()

        async def slow_drop(sequence: int) -> int:
            dropping.set()
            await asked.wait()
            return await drop(sequence)

        monkeypatch.setattr(broker.node.store.journal, "drop_before", slow_drop)
        while not dropping.is_set():
            await publish_bulk(writer, 1)
        reader = Recorder()
        await site.subscribe(BULK, participant=reader, durable="reader", start="oldest")
        asked.set()

        number = await writer.publish(BULK, {"data": b"last"})

        await eventually(lambda: bool(reader.ordinary) and reader.ordinary[-1].number == number, 30)
        assert reader.ordinary[0].number == broker.node.core.rendezvous.logs["bulk"].oldest > 1


@pytest.mark.usefixtures("eager")
async def test_half_a_checkpoint_does_not_set_a_publisher_back(tmp_path: Path) -> None:
    """Numbers behind an epoch in flight are decided before it: the last entry that all is decided up to is older."""
    log = event_type("log", durable=True)
    config = config_at(tmp_path)
    async with AsyncExitStack() as sites:
        async with Broker.run(config, "b1") as broker:
            writer = await sites.enter_async_context(site_at(broker, "writer"))
            await writer.advertise(log)
            assert await writer.publish(log, {"id": 1}) == 1
            kept = broker.node.core.rendezvous.logs[log.name]
            undecided = kept.reserve()  # as an epoch does
            assert await writer.publish(log, {"id": 2}) == undecided + 1
            for record in broker.retainer._state():
                if isinstance(record, PublishersRetained):
                    break  # killed here
                broker.node.store.append(record)
            await broker.node.store.journal.sync()

        async with Broker.run(config, "b1") as broker:
            async with asyncio.timeout(60):
                assert await writer.publish(log, {"id": 3}) == undecided + 2
            await sites.aclose()


async def test_a_checkpoint_keeps_the_plans_and_the_replicas_of_a_set(tmp_path: Path) -> None:
    log, members = set_definition("rs.shop"), frozenset({"shop/r1", "shop/r2"})
    async with Broker.run(config_at(tmp_path), "b1") as broker, site_at(broker, "shop/r1") as replica:
        await replica.advertise(log, plans=(), members=members)

        kept = list(broker.retainer._state())

    assert PlansDeclared(event_type=log.name, plans=()) in kept
    assert MembersDeclared(event_type=log.name, members=members) in kept


@pytest.mark.usefixtures("eager")
async def test_a_number_that_is_in_flight_while_others_are_dropped_is_not_taken_for_dropped(tmp_path: Path) -> None:
    config = config_at(tmp_path, SMALL)
    async with Broker.run(config, "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(BULK)
        await publish_bulk(writer, 2)
        kept = broker.node.core.rendezvous.logs["bulk"]
        undecided = kept.reserve()  # as an epoch does
        await publish_until_dropped(broker, writer)
        assert 1 < kept.oldest <= undecided

    async with Broker.run(config, "b1") as broker, site_at(broker, "reader") as site:
        kept = broker.node.core.rendezvous.logs["bulk"]
        assert 1 < kept.oldest <= undecided
        assert kept.tail[undecided].event is None
        reader = Recorder()
        await site.subscribe(BULK, participant=reader, durable="reader", position=undecided - 1)
        await eventually(lambda: bool(reader.ordinary) and reader.ordinary[-1].number == kept.last_number, 30)
        assert reader.ordinary[0].number == undecided + 1


async def test_a_failed_sync_stops_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = event_type("log", durable=True)
    async with Broker.run(config_at(tmp_path), "b1") as broker, site_at(broker, "writer") as writer:
        await writer.advertise(log)
        disk = broker.node.store.journal._store._disk

        def fail(*_: object) -> None:
            raise OSError(5, "the disk is gone")

        monkeypatch.setattr(disk, "datasync", fail)
        publishing = asyncio.ensure_future(writer.publish(log, {"id": 1}))

        with pytest.raises(JournalFailed):
            await asyncio.wait_for(broker.wait(), 30)
        assert not publishing.done()
        publishing.cancel()


async def test_damage_in_the_middle_stops_the_start_with_a_clear_message(broker: Cluster) -> None:
    log = event_type("log", durable=True)
    async with broker.site("writer") as writer:
        await writer.advertise(log)
        for i in range(200):
            await writer.publish(log, {"id": i})
    await broker.kill("b1")
    (segment,) = (broker.directory / "data" / "b1" / "journal").glob("*.segment")
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged.rstrip(b"\0")) // 2] ^= 1  # zeros at the end are room for more
    segment.write_bytes(damaged)

    with pytest.raises(AssertionError):
        await broker.start("b1")

    said = (broker.directory / "b1.log").read_text()
    assert "Nothing was opened or changed" in said
    assert await broker.processes["b1"].wait() == 2


async def test_a_torn_tail_is_cut_off_and_reported(broker: Cluster) -> None:
    log = event_type("log", durable=True)
    async with broker.site("writer") as writer:
        await writer.advertise(log)
        assert await writer.publish(log, {"id": 1}) == 1
    await broker.kill("b1")
    (segment,) = (broker.directory / "data" / "b1" / "journal").glob("*.segment")
    with segment.open("ab") as file:
        file.write(b"TOPB half a batch that a crash cut short")

    await broker.start("b1")

    view = await broker.get("b1", "/v1/journal")
    assert view["torn_bytes"] > 0
    assert "interrupted" in (broker.directory / "b1.log").read_text()
    async with broker.site("writer") as writer:
        await writer.advertise(log)
        assert await writer.publish(log, {"id": 2}) == 2


async def test_a_decision_survives_the_broker_and_the_refusal_of_an_unknown_id_too(broker: Cluster) -> None:
    orders = event_type()
    async with broker.site("one") as one, broker.site("two") as two:
        await one.advertise(orders)
        await two.subscribe(orders, participant=Recorder(), scope=Scope.DISTRIBUTED)
        committed = await one.execute(orders, events=[{"id": 1}])
        unknown = f"one.{one.incarnation}.999"
        assert (await one.get_outcome(unknown, orders)).outcome is Outcome.ABORTED
    await broker.kill("b1")
    await broker.start("b1")

    async with broker.site("three") as three:
        assert (await three.get_outcome(committed.tx, orders)).outcome is Outcome.COMMITTED
        assert (await three.get_outcome(unknown, orders)).outcome is Outcome.ABORTED
