"""Connections of strangers that say nothing, or never come to the point."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.integration.overlay.secured import Secured, secured_broker
from tests.support.brokers import broker_at, denied
from tests.support.polling import eventually
from tests.support.raw_http import UPGRADE
from tops import Broker, Site
from tops.model.errors import NotReachable
from tops.runtime.links.identity import Self
from tops.server import connections

PLACES = 20
LIMITS = f"waiting_per_address = {PLACES}"


@pytest_asyncio.fixture
async def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Secured]:
    """A broker with keys that gives connections one second."""
    monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT_S", 1.0)
    async with secured_broker(tmp_path, limits=LIMITS) as running:
        yield running


async def silent(broker: Broker, address: str = "127.0.0.1") -> socket.socket:
    """A connection from this address, made without a word."""
    opened = socket.socket()
    opened.setblocking(False)
    opened.bind((address, 0))
    await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", broker.table.port))
    return opened


async def ends(opened: socket.socket) -> None:
    """The other end closes the connection."""
    async with asyncio.timeout(8):
        try:
            while await asyncio.get_running_loop().sock_recv(opened, 4096):
                pass
        except ConnectionError:
            pass


async def test_silent_connections_count_from_the_first_moment_and_are_cut_off(quick: Secured) -> None:
    broker = quick.broker
    opened = [await silent(broker) for _ in range(5 * PLACES)]
    try:
        await asyncio.gather(*map(ends, opened[PLACES:]))
        assert broker.connections.budget.waiting <= PLACES
        await asyncio.gather(*map(ends, opened))

        await eventually(lambda: broker.connections.budget.waiting == 0)
        assert any("wait for authentication" in record["detail"] for record in denied(broker))
        async with quick.site("honest") as honest:
            assert honest.broker == "b1"
    finally:
        for each in opened:
            each.close()


@pytest.mark.parametrize(
    "said",
    [
        "",
        "GET /link HTTP/1.1\r\n",
        "GET /healthz HTTP/1.1\r\nHost: {listen}\r\n\r\n",
        "GET /nothing HTTP/1.1\r\nHost: {listen}\r\n\r\n",
        "\r\n".join(["GET /link HTTP/1.1", "Host: {listen}", *UPGRADE, "", ""]),
    ],
    ids=["nothing", "half a request", "health", "no such path", "an upgrade"],
)
async def test_whoever_proves_no_identity_does_not_keep_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Without TLS, however far it gets."""
    monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT_S", 1.0)
    async with broker_at(tmp_path) as broker:
        opened = await silent(broker)
        try:
            await asyncio.get_running_loop().sock_sendall(opened, said.format(listen=broker.table.listen).encode())
            await eventually(lambda: broker.connections.budget.waiting == 1, 5)

            await ends(opened)

            await eventually(lambda: broker.connections.budget.waiting == 0)
        finally:
            opened.close()


async def test_a_site_keeps_its_connection_and_gives_its_place_back(quick: Secured) -> None:
    budget, loop = quick.broker.connections.budget, asyncio.get_running_loop()
    async with quick.site("honest") as honest:
        await eventually(lambda: budget.waiting == 0)
        link = honest._node.link
        beyond = loop.time() + 2 * budget.wait_s
        await eventually(lambda: loop.time() > beyond)

        assert link is not None and link.connected and honest._node.link is link


async def test_more_sites_than_places_are_connected_at_once(quick: Secured) -> None:
    keys = quick.keys("many")
    sites = [Site.connect(quick.broker.url, keys=keys, instance=f"i{n}") for n in range(PLACES + 5)]
    try:
        for site in sites:
            await site.__aenter__()

        await eventually(lambda: len(quick.broker.node.links) == PLACES + 5)
    finally:
        for site in sites:
            await site.__aexit__(None, None, None)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"], ids=["its own address", "another address"])
async def test_silent_connections_of_one_address_lock_nobody_out(tmp_path: Path, address: str) -> None:
    """With the default limits: as many as the broker takes, and a new one for each that is cut off."""
    async with secured_broker(tmp_path) as secured:
        opened: list[socket.socket] = []
        flood = asyncio.ensure_future(flooding(secured.broker, address, opened))
        try:
            await eventually(lambda: len(opened) > 256)

            async with secured.site("honest", timeout_s=5.0) as honest:
                assert honest.broker == "b1"
        finally:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
            for each in opened:
                each.close()


async def flooding(broker: Broker, address: str, opened: list[socket.socket]) -> None:
    """About a hundred connections per second, none of which says a word."""
    while True:
        for _ in range(1 if len(opened) > 256 else 50):
            opened.append(await silent(broker, address))
        await asyncio.sleep(0.01)


async def test_one_identity_can_not_have_more_sessions_than_its_quota(tmp_path: Path) -> None:
    async with secured_broker(tmp_path, limits="sessions_max = 3") as secured:
        keys, url = secured.keys("greedy"), secured.broker.url
        async with AsyncExitStack() as stack:
            for number in range(3):
                await stack.enter_async_context(Site.connect(url, keys=keys, instance=f"i{number}"))

            with pytest.raises(NotReachable, match="3 connections"):
                await stack.enter_async_context(Site.connect(url, keys=keys, instance="i3", timeout_s=1.0))
            async with secured.site("honest") as honest:
                assert honest.broker == "b1"
            assert {record["who"] for record in denied(secured.broker)} == {"greedy:i3"}

        await eventually(lambda: not secured.broker.connections.sockets)
        async with Site.connect(url, keys=keys, instance="i3") as again:
            assert again.broker == "b1"


async def test_requests_over_http_count_among_the_connections_of_an_identity(tmp_path: Path) -> None:
    async with secured_broker(tmp_path, limits="sessions_max = 2") as secured:
        own = Self.with_keys(secured.keys("greedy"), 1)
        url = f"{secured.broker.url.replace('wss:', 'https:')}/v1/topology"
        async with AsyncExitStack() as stack:
            answered = []
            for _ in range(3):
                session = await stack.enter_async_context(aiohttp.ClientSession())
                response = await session.get(url, ssl=own.client_tls() or True)
                answered.append(response.status)
                await response.read()

            assert answered == [200, 200, 429]
