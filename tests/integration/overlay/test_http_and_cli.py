"""What a broker shows of itself, and the commands that use it."""

import json

import aiohttp

from tests.integration.overlay.cluster import Cluster, Recorder, event_type
from tests.support.command_line import tops
from tests.support.polling import eventually
from tops import Scope, TxType
from tops.http.client import bearer_for, http_address
from tops.protocol.messages import CensusPolicy, TxSpec


async def text(cluster: Cluster, path: str) -> tuple[int, str]:
    address = http_address(cluster.url("b1"), path)
    async with aiohttp.ClientSession() as session, session.get(address, headers=bearer_for(address)) as response:
        return response.status, await response.text()


async def test_health_readiness_and_the_document_of_the_views(broker: Cluster) -> None:
    assert await broker.get("b1", "/healthz") == {"status": "ok"}
    assert await broker.get("b1", "/readyz") == {"ready": True, "lacking": []}
    document = await broker.get("b1", "/v1/openapi.json")
    assert document["openapi"].startswith("3.")
    for path in document["paths"]:
        if "{" not in path:
            status, _ = await text(broker, path)
            assert status == 200, path


async def test_metrics_follow_what_happens(broker: Cluster) -> None:
    log = event_type("log", durable=True)
    async with broker.site("writer") as writer, broker.site("reader") as reader:
        await writer.advertise(log)
        await reader.subscribe(log, participant=Recorder(), durable="reader")
        for i in range(3):
            await writer.publish(log, {"id": i})
        _, metrics = await text(broker, "/metrics")

    found = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert found['tops_links{kind="site"}'] == "2.0"
    assert found["tops_subscriptions"] == "1.0"
    assert found[f'tops_log_last_index{{event_type="{log.name}"}}'] == "3.0"
    assert float(found["tops_journal_fsyncs_total"]) >= 1
    assert "tops_transactions_in_doubt" in found


async def test_an_unknown_transaction_is_a_404_with_the_same_words(broker: Cluster) -> None:
    status, body = await text(broker, "/v1/transactions/nobody.1.1")

    assert status == 404
    assert "no transaction nobody.1.1 is known here" in body


async def test_tx_list_show_abort_and_resolve(broker: Cluster) -> None:
    orders = event_type()
    url = broker.url("b1")
    async with broker.site("publisher") as publisher, broker.site("participant") as other:
        await publisher.advertise(orders)
        participant = Recorder()
        await other.subscribe(orders, participant=participant)
        census = CensusPolicy(20.0, replies=1)
        spec = TxSpec(orders.name, TxType.DISTRIBUTED, census=census, vote_timeout_s=60.0, decide_within_s=120.0)
        tx = await publisher.begin(spec)

        code, out, _ = await tops("tx", "list", "--url", url, "--format", "json")
        assert code == 0
        assert [(t["tx"], t["state"], t["in_doubt"]) for t in json.loads(out)] == [(tx.id, "active", False)]
        code, out, _ = await tops("tx", "show", tx.id, "--url", url, "--format", "json")
        assert (code, json.loads(out)["coordinator"]) == (0, "b1")
        code, out, error = await tops("tx", "abort", tx.id, "--url", url)
        assert (code, "aborted" in out) == (0, True), error
        await eventually(lambda: tx.id in participant.aborted)
        code, _, _ = await tops("tx", "show", tx.id, "--url", url, "--format", "json")
        assert code == 1

        await other.subscribe(orders, participant=Recorder(), scope=Scope.DISTRIBUTED)
        committed = await publisher.execute(orders, events=[{"id": 1}])
        code, out, _ = await tops("tx", "resolve", committed.tx, "--event-type", orders.name, "--url", url)
        assert (code, out.strip()) == (0, f"{committed.tx}: committed")


async def test_commands_say_what_is_wrong_in_one_line() -> None:
    code, _, error = await tops("broker", "run", "-c", "/nowhere/tops.toml", "--name", "b1")
    assert code == 2
    assert "No such file" in error.splitlines()[-1]

    code, _, error = await tops("tx", "list", "--url", "ws://127.0.0.1:1")
    assert code == 3
    assert "no broker responds" in error


async def test_a_broker_stops_on_sigterm_and_closes_its_journal(broker: Cluster) -> None:
    log = event_type("log", durable=True)
    async with broker.site("writer") as writer:
        await writer.advertise(log)
        await writer.publish(log, {"id": 1})
        broker.processes["b1"].terminate()
        assert await broker.processes["b1"].wait() == 0
        await broker.start("b1")
        assert await writer.publish(log, {"id": 2}) == 2
    lines = (broker.directory / "b1.log").read_text().splitlines()
    assert all(json.loads(line)["level"] in ("info", "warning") for line in lines)
