"""Every HTTP route against every role: what the table of rights says is what a running broker does."""

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from adapters.embedded.free_ports import free_port
from replication.http.sets import RIGHTS, SetRoutes
from tests.integration.overlay.cluster import ROOT
from tests.integration.overlay.secured import CLUSTER, Secured, issue
from tests.support.brokers import broker_at, denied
from tests.support.raw_http import raw_request
from tops import Broker
from tops.http.client import bearer_for, http_address
from tops.http.gate import Gate
from tops.http.names import Names
from tops.http.rights import BROKER, HEALTH, Access, Needs, Right
from tops.model.errors import InvariantBroken
from tops.runtime.config import parse_config
from tops.security import Authority, Identity, Kind, Permissions, Verb, utc_now

ROLES = {"reader", "writer", "replica", "admin", "broker"}
# Who gets past the gate of a broker with keys. A route that is not here fails the test: decide who may use it.
EXPECTED: dict[tuple[str, str], set[str]] = {
    ("GET", "/link"): ROLES,  # and then proves itself by the handshake
    ("GET", "/healthz"): ROLES,
    ("GET", "/readyz"): ROLES,
    ("GET", "/metrics"): ROLES,
    ("GET", "/v1/openapi.json"): ROLES,
    ("GET", "/v1/topology"): ROLES,
    ("GET", "/v1/subscriptions"): {"admin"},
    ("GET", "/v1/transactions"): {"admin"},
    ("GET", "/v1/transactions/{tx}"): {"admin"},
    ("GET", "/v1/journal"): {"admin"},
    ("GET", "/v1/ordering"): {"admin"},
    ("GET", "/v1/replica-sets"): ROLES,
    ("GET", "/v1/replica-sets/{name}"): ROLES - {"replica"},  # the replica is one of another set
    ("POST", "/v1/replica-sets/{name}/write"): ROLES - {"reader", "replica"},
}
NARROW = '[[role]]\nname = "narrow"\nallow = ["read rs.other"]'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    """A broker with keys and with the routes of all layers."""
    folder = tmp_path_factory.mktemp("routes")
    authority = Authority.init(folder / "keys", CLUSTER, utc_now(), 30)
    keys = issue(authority, "b1", kind=Kind.BROKER)
    path = folder / "tops.toml"
    path.write_text(
        f'[cluster]\nname = "{CLUSTER}"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\n'
        f'data = "{folder / "data"}"\nkeys = "{keys}"\nhealth_listen = "127.0.0.1:{free_port()}"\n{NARROW}'
    )
    routes = SetRoutes(path, "b1")
    async with Broker.run(parse_config(path.read_text(), path), "b1", extend=routes.add_to) as broker:
        yield Secured(broker, authority)


def keys_of(secured: Secured, role: str) -> Path:
    if role == "broker":
        return issue(secured.authority, "b9", kind=Kind.BROKER)
    return secured.keys("shop/r9" if role == "replica" else f"a-{role}", role)


def tls_of(keys: Path) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=keys / "ca.crt")
    tls.load_cert_chain(keys / "node.crt", keys / "node.key")
    return tls


async def status_of(secured: Secured, tls: ssl.SSLContext | bool, method: str, path: str) -> int:
    address = http_address(secured.broker.url, path.replace("{tx}", "s.1.1").replace("{name}", "nothing"))
    async with aiohttp.ClientSession() as session, session.request(method, address, ssl=tls) as response:
        return response.status


@pytest.mark.asyncio(loop_scope="module")
async def test_the_expectations_name_every_route_and_every_route_has_a_row(secured: Secured) -> None:
    routes = secured.broker.routes
    registered = {
        (route.method, route.resource.canonical)
        for route in routes.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }

    assert registered == set(EXPECTED)
    assert registered <= set(routes.table)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("role", sorted(ROLES))
async def test_every_route_lets_in_whom_it_should_and_audits_the_others(secured: Secured, role: str) -> None:
    tls = tls_of(keys_of(secured, role))
    before = len(denied(secured.broker))

    found = {route: await status_of(secured, tls, *route) for route in EXPECTED}

    admitted = {route for route, status in found.items() if status not in (403, 421)}
    assert admitted == {route for route, roles in EXPECTED.items() if role in roles}
    assert 500 not in found.values()
    assert len(denied(secured.broker)) - before == len(EXPECTED) - len(admitted)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_right_on_one_set_is_none_on_another(secured: Secured) -> None:
    tls = tls_of(secured.keys("narrow", "narrow"))

    assert await status_of(secured, tls, "GET", "/v1/replica-sets/nothing") == 403
    assert await status_of(secured, tls, "GET", "/v1/replica-sets/other") == 400  # there is no such set
    assert await status_of(secured, tls, "GET", "/v1/replica-sets/o*her") == 403


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_certificate_of_the_cluster_nothing_is_served(secured: Secured, tmp_path: Path) -> None:
    trusted = secured.broker.table.keys
    assert trusted is not None
    stranger = issue(Authority.init(tmp_path / "other", CLUSTER, utc_now(), 30), "mallory", "admin")
    bare, foreign = (ssl.create_default_context(cafile=trusted / "ca.crt") for _ in range(2))
    foreign.load_cert_chain(stranger / "node.crt", stranger / "node.key")

    for tls, path in itertools.product((bare, foreign), ("/healthz", "/v1/topology")):
        with pytest.raises(aiohttp.ClientError):
            await status_of(secured, tls, "GET", path)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_plain_listener_serves_health_and_metrics_and_nothing_else(secured: Secured) -> None:
    address = secured.broker.table.health_listen
    assert address is not None
    port = int(address.rpartition(":")[2])

    found = {path: (await raw_request(port, path, [f"Host: {address}"])).status for _, path in EXPECTED}
    metrics = await raw_request(port, "/metrics", [f"Host: {address}"])

    assert {path for path, status in found.items() if status == 200} == {path for _, path in HEALTH}
    assert set(found.values()) == {200, 404}
    assert "tops_links" in metrics.body
    assert (await raw_request(port, "/healthz", ["Host: attacker.example"])).status == 421
    assert (await raw_request(port, "/healthz", [f"Host: {address}", "Origin: http://evil.example"])).status == 403


@pytest.mark.parametrize("role", ["reader", "admin"])
async def test_without_keys_the_secret_gives_the_configured_role_and_nothing_gives_none(
    tmp_path: Path, role: str
) -> None:
    async with broker_at(tmp_path, cluster=f'site_role = "{role}"') as broker, aiohttp.ClientSession() as session:
        for (method, path), right in broker.routes.table.items():
            if right is Access.PROVES_ITSELF:
                continue
            address = http_address(broker.url, path.replace("{tx}", "s.1.1"))
            async with session.request(method, address) as bare:
                assert (bare.status == 403) == (right is not Access.LOCAL), path
            async with session.request(method, address, headers=bearer_for(address, method)) as shown:
                assert (shown.status == 403) == (isinstance(right, Needs) and role == "reader"), path


def test_the_documentation_has_the_table_as_it_is() -> None:
    def shown(right: Right) -> str:
        return right.value if isinstance(right, Access) else f"{right.verb.value} `{right.on}`"

    rows = [f"| `{method} {path}` | {shown(right)} |" for (method, path), right in {**BROKER, **RIGHTS}.items()]
    text = (ROOT / "docs" / "security.md").read_text()

    assert "| route | allowed for |\n|---|---|\n" + "\n".join(rows) + "\n\n" in text


# ------------------------------------------------------------------------------------------------- by construction


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


def gate_for(port: int) -> Gate:
    def everybody(_: web.Request) -> Identity:
        return Identity("test", Kind.SITE, "root", "admin")

    return Gate(Names([f"127.0.0.1:{port}"]), Permissions(), [everybody], lambda *_: None)


def test_a_route_without_a_row_can_t_be_registered() -> None:
    routes = gate_for(1).routes(HEALTH)

    with pytest.raises(InvariantBroken, match="POST /v1/anything has no row"):
        routes.add("POST", "/v1/anything", hello)
    with pytest.raises(InvariantBroken, match="POST /healthz has no row"):
        routes.add("POST", "/healthz", hello)
    assert not list(routes.app.router.routes())


async def test_a_route_that_was_added_past_the_table_is_not_served_to_anybody() -> None:
    port = free_port()
    routes = gate_for(port).routes(HEALTH)
    routes.app.router.add_get("/smuggled", hello)
    routes.add("GET", "/v1/said", hello, Needs(Verb.ADMINISTER))
    runner = web.AppRunner(routes.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with asyncio.timeout(10):
            smuggled = await raw_request(port, "/smuggled", [f"Host: 127.0.0.1:{port}"])
            said = await raw_request(port, "/v1/said", [f"Host: 127.0.0.1:{port}"])
    finally:
        await runner.cleanup()

    assert (smuggled.status, "hello" in smuggled.body) == (500, False)
    assert (said.status, said.body) == (200, "hello")


_names = itertools.count(1)


def admin_keys(secured: Secured) -> Path:
    return secured.keys(f"admin{next(_names)}", "admin")


async def text_of(secured: Secured, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    tls, address = tls_of(admin_keys(secured)), http_address(secured.broker.url, path)
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as session:
        async with session.request(method, address, ssl=tls, data=body, headers=headers) as response:
            return response.status, await response.text()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_response_does_not_tell_where_the_server_has_its_files(secured: Secured) -> None:
    status, text = await text_of(secured, "/v1/replica-sets/none")

    assert status == 400
    assert "no such set" in text
    assert "tops.toml" not in text and str(secured.broker.table.data.parent) not in text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "body",
    [
        b'{"sql": "select $1", "args": [%d]}' % 2**64,
        b'{"sql": "select $1", "args": [{"deep": [[%d]]}]}' % -(2**63 + 1),
        b'{"changes": [{"kind": "insert", "table": "t", "values": {"id": %d}}]}' % 2**63,
        b'{"changes": [{"kind": "delete", "table": "t", "key": {"id": 1}, "expect_version": %d}]}' % 2**70,
    ],
    ids=["argument", "inside", "row", "version"],
)
async def test_an_integer_over_64_bits_in_a_write_is_the_clients_mistake(secured: Secured, body: bytes) -> None:
    status, text = await text_of(secured, "/v1/replica-sets/shop/write", body)

    assert (status, "64 bits" in text) == (400, True), text


@pytest.mark.asyncio(loop_scope="module")
async def test_a_key_that_is_no_text_is_the_clients_mistake(secured: Secured) -> None:
    port, keys = secured.broker.table.port, admin_keys(secured)
    lines = [
        "POST /v1/replica-sets/shop/write HTTP/1.1",
        f"Host: {secured.broker.table.listen}",
        "Idempotency-Key: \xff\xfe",
        "Content-Length: 19",
        "Connection: close",
    ]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls_of(keys))
    writer.write("\r\n".join([*lines, "", '{"sql": "select 1"}']).encode("latin-1"))

    response = await reader.read()
    assert response.startswith(b"HTTP/1.1 400 ") and b"Idempotency-Key" in response
    writer.close()
    await writer.wait_closed()


@asynccontextmanager
async def with_a_set(path: Path, token: str = "secret-token-of-the-set") -> AsyncIterator[Broker]:
    path.write_text(
        f'[cluster]\nname = "test"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "data"\n'
        f'[[replica_set]]\nname = "shop"\npolicy = "write-all"\nwrite_token = "{token}"\n'
        '[[replica_set.replica]]\nname = "r1"\nbroker = "b1"\ndsn = "postgresql://127.0.0.1:1/x"\n'
    )
    async with Broker.run(parse_config(path.read_text(), path), "b1", extend=SetRoutes(path, "b1").add_to) as broker:
        yield broker


WRITE = "/v1/replica-sets/shop/write"


@pytest.mark.parametrize("shown", ["Authorization: Bearer \xff\xfe", "Cookie: tops-{port}=\xff\xfe.x.y"])
async def test_a_token_that_is_no_text_is_rejected(tmp_path: Path, shown: str) -> None:
    async with with_a_set(tmp_path / "tops.toml") as broker:
        headers = [f"Host: {broker.table.listen}", shown.replace("{port}", str(broker.table.port))]
        for method, route in (("GET", "/v1/topology"), ("POST", "/v1/replica-sets/shop/write")):
            assert (await raw_request(broker.table.port, route, headers, method=method)).status == 403


async def test_guesses_of_a_write_token_are_slowed_down(tmp_path: Path) -> None:
    async with with_a_set(tmp_path / "tops.toml") as broker:
        host = f"Host: {broker.table.listen}"
        guesses = [
            await raw_request(broker.table.port, WRITE, [host, f"Authorization: Bearer guess{n}"], method="POST")
            for n in range(40)
        ]
        without = await raw_request(broker.table.port, WRITE, [host], method="POST")

    statuses = [response.status for response in guesses]
    assert statuses[0] == 403 and statuses[-1] == 429 and set(statuses) == {403, 429}
    assert without.status == 403, "who guesses nothing is not slowed down"


async def test_guesses_of_another_user_keep_no_program_out_that_knows_the_secret(tmp_path: Path) -> None:
    async with with_a_set(tmp_path / "tops.toml") as broker:
        host, topology = f"Host: {broker.table.listen}", "/v1/topology"
        guess = [host, "Authorization: Bearer 1.guess.guess"]
        guesses = [await raw_request(broker.table.port, topology, guess) for _ in range(40)]
        bearer = bearer_for(http_address(broker.url, topology))["Authorization"]
        known = await raw_request(broker.table.port, topology, [host, f"Authorization: {bearer}"])
        again = await raw_request(broker.table.port, topology, [host, f"Authorization: {bearer}"])

    assert guesses[-1].status == 429
    assert known.status == 200
    assert again.status == 429, "a token is good once"


async def test_an_empty_write_token_lets_nobody_in(tmp_path: Path) -> None:
    async with with_a_set(tmp_path / "tops.toml", token="") as broker:
        for shown in ([], ["Authorization: Bearer "]):
            headers = [f"Host: {broker.table.listen}", *shown]
            assert (await raw_request(broker.table.port, WRITE, headers, method="POST")).status == 503


async def test_a_file_that_can_t_be_read_is_a_matter_of_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tops.toml"
    async with with_a_set(path) as broker:
        path.write_text("broken [")
        for method, route in (("GET", "/v1/replica-sets"), ("GET", "/v1/replica-sets/shop"), ("POST", WRITE)):
            bearer = bearer_for(http_address(broker.url, route), method)["Authorization"]
            headers = [f"Host: {broker.table.listen}", f"Authorization: {bearer}"]
            response = await raw_request(broker.table.port, route, headers, method=method)
            assert response.status == 503, route
            assert '"code":"bad-config"' in response.body and str(tmp_path) not in response.body
    assert "can't be used" in caplog.text
