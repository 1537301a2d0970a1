"""Real TLS on loopback: who gets through a broker's listener, and whom a client believes."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from tests.security.security_keys import Keys, MakeKeys, Node, load
from tops.model.errors import ConfigError, NotAuthenticated
from tops.security import (
    Acceptor,
    Credentials,
    Identity,
    Initiator,
    Kind,
    Party,
    Peer,
    Trust,
    client_context,
    fresh_nonce,
    peer_identity,
    server_context,
    tls_channel,
    utc_now,
)
from tops.security.tls import TlsConnection

REFUSED = (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)
GREETING = b"welcome"


class Listener:
    """A broker's listener that greets whoever gets through, and remembers who and over which channel."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.arrived = 0  # connections that TLS let through
        self.admitted: list[Identity] = []
        self.bindings: list[bytes] = []
        self.port = 0

    async def serve(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.arrived += 1
        connection = writer.get_extra_info("ssl_object")
        self.admitted.append(peer_identity(cast(TlsConnection, connection), self.node.trust, utc_now()))
        self.bindings.append(tls_channel(connection).binding)
        writer.write(GREETING)
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[Listener]:
    listener = Listener(load(folder))
    context = server_context(listener.node)
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0, ssl=context)
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield listener
    finally:
        server.close()


async def greeted(port: int, context: ssl.SSLContext, host: str = "127.0.0.1") -> tuple[ssl.SSLObject, bytes]:
    """Connect and read the greeting: in TLS 1.3 a client hears of its refusal only when it reads."""
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    try:
        await reader.readexactly(len(GREETING))
        connection = writer.get_extra_info("ssl_object")
        return connection, tls_channel(connection).binding
    finally:
        writer.close()


async def test_a_certified_site_gets_through_and_both_sides_know_each_other(keys: Keys) -> None:
    site = load(keys.node("s1", role="reader"))
    async with listening(keys.broker()) as listener:
        connection, binding = await greeted(listener.port, client_context(site.credentials, site.trust))

    assert listener.admitted == [Identity("shop", Kind.SITE, "s1", "reader")]
    assert peer_identity(cast(TlsConnection, connection), site.trust, utc_now()) == Identity(
        "shop", Kind.BROKER, "b1", "broker"
    )
    assert connection.version() == "TLSv1.3"
    assert listener.bindings == [binding]


async def test_two_connections_have_different_bindings_and_never_resume_a_session(keys: Keys) -> None:
    site = load(keys.node("s1"))
    context = client_context(site.credentials, site.trust)
    async with listening(keys.broker()) as listener:
        first, _ = await greeted(listener.port, context)
        second, _ = await greeted(listener.port, context)

    assert len(set(listener.bindings)) == 2
    assert not first.session_reused
    assert not second.session_reused
    assert first.session is None or not first.session.has_ticket


async def rejected(listener: Listener, context: ssl.SSLContext, host: str = "127.0.0.1") -> None:
    with pytest.raises(REFUSED):
        await greeted(listener.port, context, host)
    assert listener.arrived == 0


async def test_an_expired_certificate_is_refused(keys: Keys) -> None:
    site = load(keys.node("s1", begins=timedelta(days=-2), ends=timedelta(minutes=-1)))
    async with listening(keys.broker()) as listener:
        await rejected(listener, client_context(site.credentials, site.trust))


async def test_a_foreign_certificate_is_refused(make_keys: MakeKeys) -> None:
    ours, theirs = make_keys(folder="ours"), make_keys(folder="theirs")
    broker, foreign = ours.broker(), theirs.node("s1")
    context = client_context(Credentials.load(foreign), Trust.load(broker))
    async with listening(broker) as listener:
        await rejected(listener, context)


async def test_a_client_without_a_certificate_is_refused(keys: Keys) -> None:
    broker = keys.broker()
    async with listening(broker) as listener:
        await rejected(listener, ssl.create_default_context(cafile=broker / "ca.crt"))


async def test_tls_1_2_is_refused(keys: Keys) -> None:
    site = keys.node("s1")
    context = ssl.create_default_context(cafile=site / "ca.crt")
    context.load_cert_chain(site / "node.crt", site / "node.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(keys.broker()) as listener:
        await rejected(listener, context)


async def test_a_certificate_revoked_before_the_start_is_refused(keys: Keys) -> None:
    broker, site = keys.broker(), load(keys.node("s1"))
    context = client_context(site.credentials, site.trust)
    keys.authority.revoke("s1", utc_now())
    async with listening(broker) as listener:
        await rejected(listener, context)


async def test_a_running_listener_follows_a_new_revocation_list(keys: Keys) -> None:
    broker, site, other = keys.broker(), load(keys.node("s1")), load(keys.node("s2"))
    context = client_context(site.credentials, site.trust)
    async with listening(broker) as listener:
        await greeted(listener.port, context)
        keys.authority.revoke("s1", utc_now())
        assert listener.node.trust.reload()

        with pytest.raises(REFUSED):
            await greeted(listener.port, context)
        await greeted(listener.port, client_context(other.credentials, other.trust))

    assert [identity.name for identity in listener.admitted] == ["s1", "s2"]
    assert listener.arrived == 2


async def test_a_live_connection_is_found_out_after_its_certificate_was_revoked(keys: Keys) -> None:
    site = load(keys.node("s1"))
    async with listening(keys.broker()) as listener:
        connection, _ = await greeted(listener.port, client_context(site.credentials, site.trust))
        keys.authority.revoke("b1", utc_now())
        site.trust.reload()

        with pytest.raises(NotAuthenticated, match="revoked"):
            peer_identity(cast(TlsConnection, connection), site.trust, utc_now())


async def test_a_revoked_or_expired_broker_is_refused_by_its_clients(keys: Keys) -> None:
    expired = keys.node("b2", Kind.BROKER, begins=timedelta(days=-2), ends=timedelta(days=-1))
    broker, site = keys.broker(), keys.node("s1")
    keys.authority.revoke("b1", utc_now())
    for folder in (broker, expired):
        async with listening(folder) as listener:
            client = load(site)
            with pytest.raises(ssl.SSLCertVerificationError):
                await greeted(listener.port, client_context(client.credentials, client.trust))


async def test_a_broker_at_a_host_that_its_certificate_does_not_name_is_refused(keys: Keys) -> None:
    broker, site = keys.node("b1", Kind.BROKER, hosts=["broker.example.org"]), load(keys.node("s1"))
    async with listening(broker) as listener:
        with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
            await greeted(listener.port, client_context(site.credentials, site.trust))


async def test_tls_works_where_the_system_has_no_files_in_memory(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, site = keys.broker(), load(keys.node("s1"))
    monkeypatch.delattr(os, "memfd_create")
    before = sorted(broker.iterdir())
    async with listening(broker) as listener:
        await greeted(listener.port, client_context(site.credentials, site.trust))

    assert [identity.name for identity in listener.admitted] == ["s1"]
    assert sorted(broker.iterdir()) == before


async def test_a_sites_key_can_not_be_used_to_pose_as_a_broker(keys: Keys) -> None:
    impostor, site = keys.node("s2", hosts=["127.0.0.1"]), load(keys.node("s1"))
    with pytest.raises(ConfigError, match="only a broker"):
        server_context(load(impostor))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(impostor / "node.crt", impostor / "node.key")
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0, ssl=context)
    async with server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await greeted(server.sockets[0].getsockname()[1], client_context(site.credentials, site.trust))


@contextlib.asynccontextmanager
async def websocket_broker(node: Node, admitted: list[Peer]) -> AsyncIterator[str]:
    """A link as the overlay has it: aiohttp, TLS, and our handshake as the first frames."""
    party = Party.secured(node.credentials, node.trust, incarnation=1)

    async def link(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        assert request.transport is not None
        acceptor = Acceptor(party, tls_channel(request.transport.get_extra_info("ssl_object")), fresh_nonce())
        try:
            await socket.send_bytes(acceptor.on_hello(await socket.receive_bytes(), utc_now()))
            admitted.append(acceptor.on_proof(await socket.receive_bytes()))
            await socket.send_bytes(b"admitted")
        except NotAuthenticated as error:
            await socket.close(code=4401, message=str(error).encode()[:120])
        return socket

    app = web.Application()
    app.router.add_get("/link", link)
    runner = web.AppRunner(app)
    await runner.setup()
    tls_site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(node))
    await tls_site.start()
    try:
        port = runner.addresses[0][1]
        yield f"wss://127.0.0.1:{port}/link"
    finally:
        await runner.cleanup()


async def shake(url: str, tls: Node, hands: Node) -> aiohttp.WSMessage:
    """Connect with the TLS keys of one node and shake hands with those of another, honest if they are the same."""
    context = client_context(tls.credentials, tls.trust)
    async with aiohttp.ClientSession() as session, session.ws_connect(url, ssl=context) as socket:
        channel = tls_channel(socket.get_extra_info("ssl_object"))
        party = Party.secured(hands.credentials, hands.trust, incarnation=7)
        initiator = Initiator(party, channel, fresh_nonce(), expected="b1")
        await socket.send_bytes(initiator.hello())
        answer = await socket.receive()
        if answer.type is not aiohttp.WSMsgType.BINARY:
            return answer
        proof, peer = initiator.on_welcome(answer.data, utc_now())
        assert peer.identity.name == "b1"
        await socket.send_bytes(proof)
        return await socket.receive()


async def test_the_handshake_runs_over_an_aiohttp_link_with_tls(keys: Keys) -> None:
    site, admitted = load(keys.node("s1")), list[Peer]()
    async with websocket_broker(load(keys.broker()), admitted) as url:
        answer = await shake(url, tls=site, hands=site)

    assert answer.data == b"admitted"
    assert admitted == [Peer(Identity("shop", Kind.SITE, "s1", "writer"), 7)]


async def test_a_renewal_on_disk_leaves_running_nodes_with_what_they_loaded(keys: Keys) -> None:
    broker, site, admitted = load(keys.broker()), load(keys.node("s1")), list[Peer]()
    async with websocket_broker(broker, admitted) as url:
        keys.node("b1", Kind.BROKER, renew=True)
        keys.node("s1", renew=True)
        assert broker.trust.reload()

        answer = await shake(url, tls=site, hands=site)
        renewed = load(site.folder)
        answer_to_renewed = await shake(url, tls=renewed, hands=renewed)

    assert answer.data == answer_to_renewed.data == b"admitted"


async def test_the_handshake_must_use_the_certificate_of_its_tls_connection(keys: Keys) -> None:
    reader, admin, admitted = load(keys.node("s1", role="reader")), load(keys.node("s2", role="admin")), list[Peer]()
    async with websocket_broker(load(keys.broker()), admitted) as url:
        answer = await shake(url, tls=reader, hands=admin)

    assert (answer.data, answer.extra) == (4401, "the certificate is not the one of the TLS connection")
    assert admitted == []
