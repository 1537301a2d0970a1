"""A web page against a developer's cluster: DNS rebinding, foreign origins, cookies; by raw requests and a browser."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from adapters.embedded.free_ports import free_port
from tests.support.brokers import broker_at, denied
from tests.support.raw_http import UPGRADE, raw_request
from tops import Broker
from tops.http.client import bearer_for, console_address, http_address

PROXY = 'hosts = ["tops.example.org", "gateway:8080"]\norigins = ["https://tops.example.org"]'


@pytest_asyncio.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with broker_at(tmp_path, extra=PROXY) as running:
        yield running


PATHS = ("/link", "/healthz", "/metrics", "/v1/topology", "/v1/transactions", "/nothing")


@pytest.mark.parametrize(
    "hosts",
    [
        ["Host: attacker.example:{port}"],
        ["Host: attacker.example"],
        ["Host: 127.0.0.1.attacker.example:{port}"],
        ["Host: 127.0.0.1:1"],
        ["Host: 127.0.0.1"],
        ["Host: tops.example.org.attacker.example"],
        ["Host: gateway:8081"],
        ["Host: user@127.0.0.1:{port}"],
        ["Host: 127.0.0.1:{port}/"],
        ["Host: "],
        ["Host: 127.0.0.1:{port}", "Host: attacker.example"],
    ],
    ids=lambda hosts: "+".join(hosts),
)
async def test_a_host_that_is_not_the_listeners_is_rejected_and_audited(broker: Broker, hosts: Sequence[str]) -> None:
    port, statuses = broker.table.port, set()
    headers = [host.format(port=port) for host in hosts]

    for path in PATHS:
        statuses.add((await raw_request(port, path, [*headers, *(UPGRADE if path == "/link" else ())])).status)

    assert statuses in ({421}, {400})  # 400: what the HTTP library itself does not take, such as two hosts
    if statuses == {421}:
        assert [record["act"] for record in denied(broker)] == [f"GET {path}" for path in PATHS]


async def test_a_request_without_a_host_is_rejected(broker: Broker) -> None:
    for version in ("1.0", "1.1"):
        found = await raw_request(broker.table.port, "/healthz", [], version=version)
        assert found.status in (400, 421), version


@pytest.mark.parametrize(
    "origin",
    [
        "http://attacker.example",
        "https://attacker.example",
        "http://127.0.0.1:1",
        "http://127.0.0.1",
        "https://127.0.0.1:{port}",
        "http://localhost:{port}",
        "http://tops.example.org",
        "null",
        "",
    ],
)
async def test_a_foreign_origin_is_rejected_and_audited(broker: Broker, origin: str) -> None:
    port = broker.table.port
    headers = [f"Host: 127.0.0.1:{port}", f"Origin: {origin.format(port=port)}"]

    for path in PATHS:
        found = await raw_request(port, path, [*headers, *(UPGRADE if path == "/link" else ())])
        assert found.status == 403, (path, found)

    records = [(record["act"], record["who"]) for record in denied(broker)]
    assert records == [(f"GET {path}", "127.0.0.1") for path in PATHS]


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:{port}", None),
        ("localhost:{port}", None),
        ("LOCALHOST:{port}", None),
        ("[::1]:{port}", None),
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}"),
        ("localhost:{port}", "http://localhost:{port}"),
        ("tops.example.org", None),
        ("tops.example.org:443", "https://tops.example.org"),
        ("gateway:8080", "http://gateway:8080"),
    ],
)
async def test_the_listeners_own_names_and_the_configured_ones_pass(
    broker: Broker, host: str, origin: str | None
) -> None:
    port = broker.table.port
    headers = [f"Host: {host.format(port=port)}"]
    if origin is not None:
        headers.append(f"Origin: {origin.format(port=port)}")

    assert (await raw_request(port, "/healthz", headers)).status == 200
    assert (await raw_request(port, "/link", [*headers, *UPGRADE])).status == 101


async def test_a_flood_of_rejected_requests_does_not_fill_the_audit_log(broker: Broker) -> None:
    port = broker.table.port
    for _ in range(100):
        await raw_request(port, "/v1/topology", ["Host: attacker.example"])

    assert 20 < len(denied(broker)) < 60
    assert broker.node.counters["rejected"] == 100


async def test_views_need_a_token_that_is_good_once_for_one_request(broker: Broker) -> None:
    port, address = broker.table.port, http_address(broker.url, "/v1/topology")
    host, token = f"Host: 127.0.0.1:{port}", f"Authorization: {bearer_for(address)['Authorization']}"

    assert (await raw_request(port, "/v1/topology", [host])).status == 403
    assert (await raw_request(port, "/v1/journal", [host, token])).status == 403
    assert (await raw_request(port, "/v1/topology", [f"Host: localhost:{port}", token])).status == 403
    assert (await raw_request(port, "/v1/topology", [host, token])).status == 200
    assert (await raw_request(port, "/v1/topology", [host, token])).status == 403


async def test_a_one_time_address_gives_a_strict_cookie_once(broker: Broker) -> None:
    port, address = broker.table.port, console_address(broker.url)
    host = f"Host: 127.0.0.1:{port}"

    first = await raw_request(port, address.raw_path_qs, [host])
    cookie = next(line for line in first.head.splitlines() if line.startswith("Set-Cookie: "))
    again = await raw_request(port, address.raw_path_qs, [host])

    assert first.status == 303
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    assert again.status == 403
    session = "Cookie: " + cookie.removeprefix("Set-Cookie: ").partition(";")[0]
    assert (await raw_request(port, "/v1/topology", [host, session])).status == 200
    assert (await raw_request(port, "/v1/topology", [host, session[:-4] + "AAAA"])).status == 403
    foreign = "Origin: http://attacker.example"
    assert (await raw_request(port, "/v1/topology", [host, session, foreign])).status == 403


# ------------------------------------------------------------------------------------------------------ a real browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
PAGE = """<!doctype html><script>
const report = (what, result) => fetch("/report", {method: "POST", body: JSON.stringify([what, result])});
async function read(what, url, options) {
  try { const r = await fetch(url, options); return report(what, r.status + " " + (await r.text()).slice(0, 40)); }
  catch (e) { return report(what, "blocked"); }
}
function dial(what, url) {
  return new Promise(done => {
    const socket = new WebSocket(url);
    socket.onopen = () => report(what, "open").then(done);
    socket.onerror = () => report(what, "closed").then(done);
  });
}
(async () => {
  const port = BROKER;
  await dial("link", `ws://127.0.0.1:${port}/link`);
  await dial("link by its name", `ws://localhost:${port}/link`);
  await read("view", `http://127.0.0.1:${port}/v1/topology`);
  await read("write", `http://127.0.0.1:${port}/v1/replica-sets/shop/write`, {method: "POST", body: "{}"});
  await read("rebound", `http://attacker.example:${port}/v1/topology`);
  await dial("rebound link", `ws://attacker.example:${port}/link`);
  await report("done", "");
})();
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: install Debian's package to run the page in a real browser")
async def test_a_web_page_in_a_real_browser_gets_nothing(broker: Broker, tmp_path: Path) -> None:
    reports: dict[str, str] = {}
    done = asyncio.Event()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=PAGE.replace("BROKER", str(broker.table.port)), content_type="text/html")

    async def report(request: web.Request) -> web.Response:
        what, result = json.loads(await request.text())
        reports[what] = result
        if what == "done":
            done.set()
        return web.Response()

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_post("/report", report)
    runner = web.AppRunner(app)
    await runner.setup()
    evil = free_port()
    await web.TCPSite(runner, "127.0.0.1", evil).start()
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP attacker.example 127.0.0.1",  # what a rebinding DNS server does
        "--remote-debugging-port=0",  # keeps it running while the page works
        f"http://attacker.example:{evil}/",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            await done.wait()
    finally:
        browser.terminate()
        await browser.wait()
        await runner.cleanup()

    assert reports == {
        "link": "closed",
        "link by its name": "closed",
        "view": "blocked",
        "write": "blocked",
        "rebound": "blocked",
        "rebound link": "closed",
        "done": "",
    }
    acts = {(record["act"], "not 'attacker" in record["detail"]) for record in denied(broker)}
    assert {("GET /link", False), ("GET /v1/topology", False), ("GET /link", True)} <= acts
    assert not broker.node.links, "a page became a neighbour"
