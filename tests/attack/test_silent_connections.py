"""Connections of strangers that say nothing, or never come to the point."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.overlay.cluster import until
from tests.integration.overlay.secured import Secured, secured_broker
from tests.support.brokers import broker_at, denied
from tests.support.raw_http import UPGRADE
from tops import Broker, Site
from tops.runtime import connections

PLACES = 20
LIMITS = f"waiting_per_address = {PLACES}"


@pytest_asyncio.fixture
async def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Secured]:
    """A broker with keys that gives connections one second."""
    monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT_S", 1.0)
    async with secured_broker(tmp_path, limits=LIMITS) as running:
        yield running


async def silent(broker: Broker) -> socket.socket:
    """A connection, made without a word."""
    opened = socket.socket()
    opened.setblocking(False)
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

        await until(lambda: broker.connections.budget.waiting == 0)
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
            await until(lambda: broker.connections.budget.waiting == 1, 5)

            await ends(opened)

            await until(lambda: broker.connections.budget.waiting == 0)
        finally:
            opened.close()


async def test_a_site_keeps_its_connection_and_gives_its_place_back(quick: Secured) -> None:
    budget, loop = quick.broker.connections.budget, asyncio.get_running_loop()
    async with quick.site("honest") as honest:
        await until(lambda: budget.waiting == 0)
        link = honest._node.link
        beyond = loop.time() + 2 * budget.wait_s
        await until(lambda: loop.time() > beyond)

        assert link is not None and link.connected and honest._node.link is link


async def test_more_sites_than_places_are_connected_at_once(quick: Secured) -> None:
    keys = quick.keys("many")
    sites = [Site.connect(quick.broker.url, keys=keys, instance=f"i{n}") for n in range(PLACES + 5)]
    try:
        for site in sites:
            await site.__aenter__()

        await until(lambda: len(quick.broker.node.links) == PLACES + 5)
    finally:
        for site in sites:
            await site.__aexit__(None, None, None)
