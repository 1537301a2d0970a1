"""Clusters without keys: who can't read the broker's secret gets nothing, whichever side it pretends to be."""

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from aiohttp import web

from adapters.embedded.free_ports import free_port
from tests.integration.overlay.cluster import TOPOLOGIES, Cluster, event_type
from tests.support.brokers import broker_at, denied
from tests.support.command_line import tops
from tests.support.raw_http import raw_request
from tops import Broker, Site
from tops.http import client
from tops.model.errors import ConfigError, NotAuthenticated, NotReachable, ProtocolError
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.identity import Self
from tops.runtime.links.link import receive_bytes
from tops.security import PLAIN_WORDS, Initiator, Kind, Secret, find_secret, fresh_nonce, make_secret, plain_channel
from tops.security.handshake import Proof
from tops.security.secret import VARIABLE, secret_path

WRONG = b"a secret that is long enough and wrong"


@contextlib.contextmanager
def another_user(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """What a program of another user finds: its own state folder, without our secrets."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield


async def test_the_secret_is_made_for_the_user_alone_and_kept_over_restarts(tmp_path: Path) -> None:
    async with broker_at(tmp_path) as broker:
        path = secret_path(broker.table.listen)
        first, modes = path.read_text(), [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)]
    async with Broker.run(broker.config, "b1"):
        assert path.read_text() == first

    assert modes == [0o600, 0o700]
    assert len(first.strip()) == 64


@pytest.mark.parametrize("insecure", ["", f'insecure = "{PLAIN_WORDS}"'], ids=["loopback", "insecure"])
async def test_who_has_no_secret_is_told_what_is_missing_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, insecure: str
) -> None:
    async with broker_at(tmp_path, cluster=insecure) as broker:
        with another_user(monkeypatch, tmp_path / "mallory"):
            for named in ("test", None):  # also when the cluster's name has to be asked for
                with pytest.raises(NotAuthenticated) as lacking:
                    async with Site.connect(broker.url, name="mallory", cluster=named):
                        pytest.fail("it must not get in")

    for part in (broker.table.listen, str(tmp_path / "mallory"), "does not exist", VARIABLE, "another machine"):
        assert part in str(lacking.value)


async def test_a_client_whose_token_is_older_than_the_broker_s_start_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker_at(tmp_path) as broker, client_session() as session:
        made_at = iter([time.time() - 20])
        monkeypatch.setattr(client, "time", SimpleNamespace(time=lambda: next(made_at, None) or time.time()))

        status, topology = await client.get_json(session, broker.url, "/v1/topology")

    assert (status, [b["name"] for b in topology["brokers"]]) == (200, ["b1"])
    assert next(made_at, None) is None  # the old token was shown


async def test_a_wrong_an_open_and_a_short_secret_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    async with broker_at(tmp_path) as broker:
        monkeypatch.setenv(VARIABLE, str(file))
        for content, mode, expected in (
            (WRONG, 0o600, "does not know the secret"),
            (WRONG, 0o604, "chmod 600"),
            (b"short", 0o600, "at least 32 characters"),
        ):
            file.write_bytes(content)
            file.chmod(mode)
            with pytest.raises(NotAuthenticated, match=expected):
                async with Site.connect(broker.url, name="mallory", cluster="test"):
                    pytest.fail("it must not get in")
        assert not broker.node.links


async def test_a_client_that_skips_its_own_checks_is_rejected_and_audited(tmp_path: Path) -> None:
    async with broker_at(tmp_path) as broker, client_session() as session:
        for proof in (b"", bytes(32), Secret(Path("x"), WRONG).proof(b"anything")):
            own = Self.without_keys("test", Kind.SITE, "mallory", 1, "admin", secret=Secret(Path("x"), WRONG))
            async with await open_socket(session, broker.url, own, 30) as socket:
                initiator = Initiator(own.party, plain_channel("127.0.0.1", socket.address), fresh_nonce())
                await socket.send_bytes(initiator.hello())
                await receive_bytes(socket, 10)
                await socket.send_bytes(msgspec.msgpack.encode(Proof(proof)))
                with pytest.raises(ProtocolError, match="closed"):
                    await receive_bytes(socket, 10)

        details = [record["detail"] for record in denied(broker)]
        assert len(details) == 3
        assert all("'mallory' does not know the secret" in text for text in details)
        assert not broker.node.links


async def test_requests_that_never_upgrade_do_not_use_up_the_places_of_those_that_do(tmp_path: Path) -> None:
    async with broker_at(tmp_path, extra="[broker.limits]\nwaiting_per_address = 4") as broker:
        for _ in range(10):
            found = await raw_request(broker.table.port, "/link", [f"Host: {broker.table.listen}"])
            assert found.status == 400

        async with Site.connect(broker.url, name="late", cluster="test") as late:
            assert late.broker == "b1"


async def test_a_program_that_took_the_port_first_learns_nothing_that_opens_the_broker(tmp_path: Path) -> None:
    """It gets the proof of nobody: a client proves itself only to who has proved itself before."""
    port, received_of = free_port(), bytearray()
    secret = make_secret([f"127.0.0.1:{port}"])
    impostor = Self.without_keys("test", Kind.BROKER, "b1", 1, "admin", secret=Secret(Path("x"), WRONG))

    async def link(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        received_of.extend(str(request.headers).encode())
        socket.address = request.host  # type: ignore[attr-defined]
        with contextlib.suppress(ProtocolError, NotAuthenticated, TypeError):
            await impostor.accept(socket, "127.0.0.1")  # type: ignore[arg-type]
        async for message in socket:
            received_of.extend(message.data)
        return socket

    async def topology(request: web.Request) -> web.Response:
        received_of.extend(str(request.headers).encode())
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/link", link)
    app.router.add_get("/v1/topology", topology)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        with pytest.raises(NotAuthenticated, match="broker 'b1' does not know the secret"):
            async with Site.connect(f"ws://127.0.0.1:{port}", name="victim", cluster="test"):
                pytest.fail("it believed an impostor")
        with pytest.raises(NotReachable):
            async with Site.connect(f"ws://127.0.0.1:{port}", name="victim"):
                pytest.fail("it believed an impostor")
    finally:
        await runner.cleanup()

    assert received_of
    assert secret.path.read_bytes().strip() not in received_of


@pytest.mark.parametrize("rewrites", [False, True], ids=["as it is", "with the right Host"])
async def test_a_relay_on_another_port_is_noticed_also_if_all_share_one_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrites: bool
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "token"))
    async with broker_at(tmp_path) as broker:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", broker.table.port)

            async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    if rewrites:
                        data = data.replace(f"127.0.0.1:{port}".encode(), broker.table.listen.encode())
                    sink.write(data)
                sink.close()

            await asyncio.gather(pass_on(reader, back), pass_on(there, writer), return_exceptions=True)

        squatter = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = squatter.sockets[0].getsockname()[1]
        try:
            expected = "does not know the secret" if rewrites else "'hosts'"
            with pytest.raises(NotAuthenticated, match=expected):
                async with Site.connect(f"ws://127.0.0.1:{port}", name="victim", cluster="test"):
                    pytest.fail("it spoke through a relay")
        finally:
            squatter.close()
        assert not broker.node.links


async def test_brokers_of_different_users_meet_by_one_token_file(tmp_path: Path) -> None:
    """As in containers: each has a state folder of its own, and one file is given to all."""
    chain = {"b1": ["b2"], "b2": []}
    shared = {VARIABLE: str(tmp_path / "token")}
    cluster = Cluster(tmp_path, chain, environment={**shared, "XDG_STATE_HOME": "/dev/null"})
    os.environ.update(shared)
    try:
        await cluster.start()  # returns when both are linked
        orders = event_type()
        async with cluster.site("one", "b1") as one:
            await one.advertise(orders)
    finally:
        del os.environ[VARIABLE]
        await cluster.stop()


async def test_a_broker_that_can_t_keep_its_secret_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, expected in ((Path("/dev/null"), "can't be stored there"), (tmp_path / "open", "chmod 700")):
        if folder == tmp_path / "open":
            (folder / "tops").mkdir(parents=True, mode=0o755)
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        with pytest.raises(ConfigError, match=expected):
            async with broker_at(tmp_path):
                pytest.fail("it must not start")


def test_a_token_file_that_is_no_file_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(pipe := tmp_path / "pipe", 0o600)
    monkeypatch.setenv(VARIABLE, str(pipe))

    with pytest.raises(NotAuthenticated, match="regular file"):
        find_secret("127.0.0.1:7420")
    with pytest.raises(ConfigError, match="regular file"):
        make_secret(["127.0.0.1:7420"])


async def test_the_command_line_finds_the_secret_and_says_when_it_does_not(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, TOPOLOGIES["single"])
    try:
        await cluster.start()
        for environment, code, expected in (({}, 0, "[]"), ({"XDG_STATE_HOME": str(tmp_path / "other")}, 2, VARIABLE)):
            ended, out, errors = await tops(
                "tx", "list", "--url", cluster.url("b1"), "--format", "json", environ=environment
            )
            assert (ended, expected in out + errors) == (code, True), out + errors
    finally:
        await cluster.stop()


def test_a_secret_is_hidden_when_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    secret = make_secret(["127.0.0.1:7420", "broker.example.org:7420"])

    text = secret.path.read_text().strip()

    assert text not in repr(secret)
    assert secret_path("broker.example.org:7420").read_text().strip() == text
    assert secret_path("localhost:7420") == secret.path == secret_path("0.0.0.0:7420")
