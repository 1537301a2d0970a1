"""One client asks a broker for as much as it may: the broker goes on serving everyone else, and holds a bounded amount.

The attacks speak to broker processes as a site without good manners would.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.attack.raw_link import RawLink
from tests.integration.overlay.cluster import Cluster, Recorder
from tests.integration.overlay.secured import Secured, secured_broker
from tests.integration.overlay.test_links import type_that_meets_at
from tests.support.polling import eventually
from tops import EventType, Filter
from tops.core.link.session import Frame
from tops.model.errors import ProtocolError
from tops.model.ids import NodeId
from tops.protocol.messages import Address, ConfirmRoute, Envelope, LinkMessage, RouteConfirmed, SubscriptionChanged
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import exchange_link_hello, receive_bytes
from tops.runtime.links.sockets import DialledSocket
from tops.runtime.links.wire import Goodbye, decode, encode_frame, make_link_hello
from tops.security import Kind

SILENCE_S = 2.0  # in which a broker answers anybody; alone it takes milliseconds
PAIR = {"b1": ["b2"], "b2": []}


@asynccontextmanager
async def raw_link(cluster: Cluster, name: str) -> AsyncIterator[DialledSocket]:
    async with client_session() as session:
        own = Self.without_keys("test", Kind.SITE, name, 1, "writer")
        socket = await open_socket(session, cluster.url("b1"), own, 30)
        await own.introduce(socket, "127.0.0.1")
        await exchange_link_hello(socket, make_link_hello("", 0, "", (), ()), 10)
        yield socket


def subscription(number: int, of: EventType, interest: Filter) -> SubscriptionChanged:
    return SubscriptionChanged(subscription=number, definitions=(of,), filter=interest, scope=None, durable=False)


async def answered(socket: DialledSocket) -> None:
    """Returns when the broker has acted on all that was sent before the question, which is in frame 2."""
    request = Envelope(to=Address(NodeId("b1")), body=ConfirmRoute(subscription=1))
    await socket.send_bytes(encode_frame(Frame(2, 0, (request,))))
    while True:
        item = decode(await receive_bytes(socket, 60))
        if isinstance(item, Frame) and any(
            isinstance(m, Envelope) and isinstance(m.body, RouteConfirmed) for m in item.messages
        ):
            return


async def longest_silence(cluster: Cluster, until: "asyncio.Task[None]") -> float:
    longest = 0.0
    while not until.done():
        asked = time.monotonic()
        assert await cluster.get("b1", "/v1/topology") is not None
        longest = max(longest, time.monotonic() - asked)
        await asyncio.sleep(0.01)
    await until
    return longest


@pytest.mark.parametrize("kind", ["overlapping", "single values"])
async def test_a_frame_full_of_subscriptions_stops_no_one_else(tmp_path: Path, kind: str) -> None:
    cluster = Cluster(tmp_path, PAIR)
    name = type_that_meets_at("b2").name
    of = EventType(name, {"a": int, "b": int, "c": str})
    messages: Sequence[LinkMessage] = [
        subscription(
            n + 1,
            of,
            Filter.where("a", "range", (n, 10**6 + n)).where("b", "!=", n).where("c", "prefix", f"p{n % 7}")
            if kind == "overlapping"
            else Filter.where("a", "=", n),
        )
        for n in range(10_000)
    ]
    try:
        await cluster.start()
        async with raw_link(cluster, "greedy") as socket:

            async def attack() -> None:
                await socket.send_bytes(encode_frame(Frame(1, 0, tuple(messages))))
                await answered(socket)

            silence_s = await longest_silence(cluster, asyncio.ensure_future(attack()))
    finally:
        await cluster.stop()
    assert silence_s < SILENCE_S


NOISE = EventType("noise", {"x": bytes})


class Silent:
    """A session that reads all it gets, answers pings, and acknowledges nothing."""

    def __init__(self, secured: Secured, keys: Path) -> None:
        self._secured, self._keys = secured, keys
        self.ended_because: str | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Silent":
        self._http = client_session()
        broker = self._secured.broker
        self._link = RawLink(self._http, broker.url, "b1", self._keys, f"s{secrets.token_hex(4)}")
        await self._link.send(subscription(1, NOISE, Filter()))
        self._task = asyncio.ensure_future(self._read())
        return self

    async def _read(self) -> None:
        socket = self._link._socket
        assert socket is not None
        try:
            while True:
                item = decode(await receive_bytes(socket, 60))
                if isinstance(item, Goodbye):
                    self.ended_because = item.reason
        except (ProtocolError, ConnectionError) as error:
            self.ended_because = self.ended_because or str(error)

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._link.close()
        await self._http.close()


def held_for_sites(secured: Secured) -> int:
    node = secured.broker.node
    return sum(node.links[name].pending_bytes for name in node.guards)


@pytest.mark.parametrize("bound", ["identity_bytes_max", "sites_bytes_max"])
async def test_sessions_that_acknowledge_nothing_hold_a_bounded_amount_together(tmp_path: Path, bound: str) -> None:
    async with secured_broker(tmp_path, limits=f'{bound} = "6 MiB"') as secured, AsyncExitStack() as stack:
        keys = secured.keys("hoarder", "reader")
        publisher = await stack.enter_async_context(secured.site("publisher"))
        honest = await stack.enter_async_context(secured.site("honest", "reader"))
        await publisher.advertise(NOISE)
        taken = Recorder()
        await honest.subscribe(NOISE, participant=taken)
        silent = [await stack.enter_async_context(Silent(secured, keys)) for _ in range(8)]

        for _ in range(20):
            await publisher.publish(NOISE, {"x": bytes(100_000)})
            await publisher.flush()
            await asyncio.sleep(0.02)

        await eventually(lambda: held_for_sites(secured) <= 6 * 2**20, 5)
        await eventually(lambda: len([each for each in silent if each.ended_because]) >= 5, 5)
        reasons = {each.ended_because for each in silent if each.ended_because}
        assert all(f"`{bound}`" in reason for reason in reasons), reasons
        await eventually(lambda: len(taken.ordinary) == 20, 5)
        assert secured.broker.node.counters["slow_readers"] >= 5


async def test_a_session_that_acknowledges_nothing_for_long_is_cut_off_and_others_are_not(tmp_path: Path) -> None:
    async with secured_broker(tmp_path, limits="acknowledge_s = 1") as secured:
        keys = secured.keys("hoarder", "reader")
        async with (
            secured.site("publisher") as publisher,
            secured.site("honest", "reader") as honest,
            Silent(secured, keys) as silent,
        ):
            await publisher.advertise(NOISE)
            taken = Recorder()
            await honest.subscribe(NOISE, participant=taken)
            first = honest._node.link
            await publisher.publish(NOISE, {"x": b"1"})

            await eventually(lambda: silent.ended_because is not None, 5)

            assert silent.ended_because is not None and "acknowledged nothing for 1 s" in silent.ended_because
            await publisher.publish(NOISE, {"x": b"2"})
            await eventually(lambda: len(taken.ordinary) == 2, 5)
            assert honest._node.link is first
