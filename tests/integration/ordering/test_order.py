"""Two types at two brokers in one ordering domain: all subscribers see one order, also when a broker is killed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.integration.overlay.cluster import Cluster, Recorder
from tests.support.polling import eventually
from tops import EventType, Site, TxType
from tops.core.overlay.topology import rendezvous_of
from tops.model.errors import InvalidEventType, TransactionAborted
from tops.model.ids import NodeId

BROKERS = (NodeId("b1"), NodeId("b2"))
NAMES = [f"type{number}" for number in range(40)]
AT_1, AT_2 = (next(name for name in NAMES if rendezvous_of(BROKERS, name) == broker) for broker in BROKERS)
BODY = {"id": int}


def domain(*, durable: bool = False, order: str = "total", placement: str = "spread") -> str:
    return (
        f'[[ordering]]\nname = "d"\ntypes = ["{AT_1}", "{AT_2}"]\norder = "{order}"\n'
        f'durable = {str(durable).lower()}\nplacement = "{placement}"\n'
    )


async def started(directory: Path, ordering: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(directory, {"b1": ["b2"], "b2": []})
    cluster.file.write_text(cluster.file.read_text() + ordering)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


@pytest.fixture
async def volatile(tmp_path: Path) -> AsyncIterator[Cluster]:
    async for cluster in started(tmp_path, domain()):
        yield cluster


@pytest.fixture
async def durable(tmp_path: Path) -> AsyncIterator[Cluster]:
    async for cluster in started(tmp_path, domain(durable=True, order="causal")):
        yield cluster


def types(*, durable: bool) -> tuple[EventType, EventType]:
    return EventType(AT_1, BODY, durable=durable), EventType(AT_2, BODY, durable=durable)


async def subscribers(cluster: Cluster, stack: AsyncExitStack, of: Sequence[EventType], count: int) -> list[Recorder]:
    recorders = [Recorder() for _ in range(count)]
    for number, recorder in enumerate(recorders):
        site = await stack.enter_async_context(cluster.site(f"s{number}", number))
        for event_type in of:
            await site.subscribe(event_type, participant=recorder)
    return recorders


async def publish(site: Site, of: Sequence[EventType], first: int, count: int) -> None:
    for number in range(first, first + count):
        await site.publish(of[number % 2], {"id": number})


def disagreement(recorders: Sequence[Recorder]) -> str:
    for recorder in recorders:
        ids = recorder.ids()
        if len(set(ids)) < len(ids):
            return "something was received twice"
        for other in recorders:
            places = {one: place for place, one in enumerate(other.ids())}
            both = [places[one] for one in ids if one in places]
            if both != sorted(both):
                return f"{ids} and {other.ids()}"
    return ""


async def test_all_subscribers_see_the_events_of_several_publishers_in_one_order(volatile: Cluster) -> None:
    of = types(durable=False)
    async with AsyncExitStack() as stack:
        publishers = [await stack.enter_async_context(volatile.site(f"p{n}", n)) for n in range(3)]
        for event_type in of:
            await publishers[0].advertise(event_type)
        for publisher in publishers[1:]:
            for event_type in of:
                await publisher.advertise(event_type)
        recorders = await subscribers(volatile, stack, of, 4)

        await asyncio.gather(*(publish(p, of, 1000 * n, 100) for n, p in enumerate(publishers)))
        await eventually(lambda: all(len(r.ordinary) == 300 for r in recorders))

        for name in volatile.names:
            view = await volatile.get(name, "/v1/ordering")
            assert [domain["stages"] for domain in view["domains"]] == [["b1", "b2"]]
            assert view["domains"][0]["topics"][0]["pending"] == 0

    assert len({tuple(recorder.ids()) for recorder in recorders}) == 1
    assert not any(event.out_of_order for recorder in recorders for event in recorder.ordinary)


async def test_the_order_outlives_brokers_that_are_killed(durable: Cluster) -> None:
    """Subscribers that lose their link miss events; what two of them receive, they receive in one order."""
    of = types(durable=True)
    async with AsyncExitStack() as stack:
        publishers = [await stack.enter_async_context(durable.site(f"p{n}", n)) for n in range(2)]
        for publisher in publishers:
            for event_type in of:
                await publisher.advertise(event_type)
        recorders = await subscribers(durable, stack, of, 4)
        publishing = [asyncio.ensure_future(publish(p, of, 1000 * n, 150)) for n, p in enumerate(publishers)]

        for victim in ("b2", "b1"):
            seen = len(recorders[0].ordinary)
            await eventually(lambda seen=seen: len(recorders[0].ordinary) > seen + 20)
            await durable.kill(victim)
            await durable.start(victim)
        await asyncio.gather(*publishing)
        last = 9999
        await eventually(lambda: all(len(r.ordinary) >= 40 for r in recorders))

        async def all_have_the_last() -> bool:
            nonlocal last
            last += 1
            await publishers[0].publish(of[last % 2], {"id": last})
            await asyncio.sleep(0)
            return all(any(one > 9999 for one in r.ids()) for r in recorders)

        await eventually(all_have_the_last, 60.0)

    assert disagreement(recorders) == ""


async def test_a_type_of_the_other_kind_is_refused(volatile: Cluster) -> None:
    async with volatile.site("p") as site:
        with pytest.raises(InvalidEventType, match="ordering domain 'd' is not durable"):
            await site.advertise(types(durable=True)[0])


async def test_a_transaction_on_a_type_of_a_domain_is_rejected_with_its_reason(volatile: Cluster) -> None:
    first, _ = types(durable=False)
    async with volatile.site("p") as site:
        await site.advertise(first)
        with pytest.raises(TransactionAborted, match="ordering domain"):
            async with site.transaction(first, TxType.DISTRIBUTED) as tx:
                await tx.publish(first, {"id": 1})


async def test_brokers_whose_lists_differ_are_not_linked(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, {"b1": [], "b2": ["b1"]})
    text = cluster.file.read_text()
    try:
        cluster.file.write_text(text + domain())
        await cluster.start("b1")
        cluster.file.write_text(text + domain().replace(f'["{AT_1}", "{AT_2}"]', f'["{AT_2}", "{AT_1}"]'))
        starting = asyncio.ensure_future(cluster.start("b2"))
        log = tmp_path / "b2.log"
        await eventually(lambda: log.exists() and "types are only ever appended" in log.read_text())
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    finally:
        await cluster.stop()
