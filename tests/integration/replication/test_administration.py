"""What an operator asks and orders: plans, checks before go-live, health and metrics, writes over HTTP."""

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
from aiohttp import web

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Member, Update, Upsert
from adapters.embedded.free_ports import free_port
from replication.http.agent import CONNECTIONS_MAX, serve_agent
from replication.http.sets import SetRoutes
from replication.model.config import Cluster
from replication.model.events import log_type, write_body
from replication.operations.doctor import Finding, examine
from replication.replica.agent import Agent
from replication.rpc.rejections import TooFewReplicas
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.command_line import tops_of
from tests.support.polling import eventually
from tops import Site
from tops.http.gate import Gate
from tops.http.names import Names
from tops.model.errors import TopsError
from tops.model.ids import TxId
from tops.security import Identity, Kind, Permissions

HEALTHY = {"level": "ok", "replica": "", "finding": "nothing was found that would go wrong", "remedy": ""}
QUORUM = 'policy = "quorum"\nwrite_quorum = 2'


# ---------------------------------------------------------------------------------------------------------- rs apply


def rewrite(cluster: SmallCluster, old: str, new: str) -> None:
    path = cluster.cluster.path
    path.write_text(path.read_text().replace(old, new))


async def test_apply_shows_its_plan_does_what_it_can_and_says_what_needs_a_hand(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, f"{QUORUM}\nwait_s = 5") as cluster:
        rewrite(cluster, "wait_s = 5", "wait_s = 9")
        code, out, err = await tops_of(cluster.cluster, "rs", "apply", "shop", "--dry-run", "--format", "json")
        assert (code, out.count("take over wait_s")) == (0, 3), err
        assert {agent.config.wait_s for agent in cluster.agents.values()} == {5.0}, "a dry run changed something"

        code, _, err = await tops_of(cluster.cluster, "rs", "apply", "shop")
        assert code == 0, err
        assert {agent.config.wait_s for agent in cluster.agents.values()} == {9.0}

        rewrite(cluster, "write_quorum = 2", "write_quorum = 3")
        await cluster.stop("r3")
        code, out, err = await tops_of(cluster.cluster, "rs", "apply", "shop", "--format", "json")
        assert (code, "need a hand" in err) == (1, True)
        assert "start replica r3" in out
        assert "r1: write_quorum changed" in out


async def test_after_apply_the_set_has_the_replicas_of_the_file_and_no_others(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, 'policy = "peer-to-peer"') as cluster:
        await cluster.stop("r3")
        rewrite(cluster, 'name = "r3"', 'name = "r7"')
        log = log_type("shop")
        body = write_body(Member(TxId(""), (Upsert("accounts", {"id": 1}, {"balance": 1}),)))

        async def publish_as(replica: str) -> int | None:
            async with Site.connect(cluster.cluster.urls(), name=f"shop/{replica}", cluster="test") as site:
                await site.advertise(log)
                return await site.publish(log, body)

        with pytest.raises(TopsError, match="not in the declared list of replicas"):
            await publish_as("r7")
        code, _, err = await tops_of(cluster.cluster, "rs", "apply", "shop")
        assert (code, "need a hand" in err) == (1, True)

        assert await publish_as("r7") is not None
        with pytest.raises(TopsError, match="not in the declared list of replicas"):
            await publish_as("r3")


# ------------------------------------------------------------------------------------------------------------- doctor


async def findings_about(folder: Path, dsns: dict[str, str], keys: str) -> list[Finding]:
    lines = [f'[cluster]\nname = "c"\n[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "./b1"']
    lines.append(f'[[replica_set]]\nname = "shop"\n{keys}')
    lines += [f'[[replica_set.replica]]\nname = "{name}"\nbroker = "b1"\ndsn = "{dsn}"' for name, dsn in dsns.items()]
    path = folder / "tops.toml"
    path.write_text("\n".join(lines))
    cluster = Cluster.load(path)
    return await examine(cluster, cluster.replica_set("shop"))


async def database_with(server: EmbeddedPostgres, name: str, schema: str) -> str:
    connection = await asyncpg.connect(server.dsn)
    await connection.execute(f'create database "{name}"')
    await connection.execute("do $$ begin create role reader login password 'x'; exception when others then end $$")
    await connection.close()
    connection = await asyncpg.connect(server.dsn_for(name))
    await connection.execute(schema)
    await connection.close()
    return server.dsn_for(name)


async def test_doctor_finds_what_would_go_wrong_and_names_the_replica_and_the_remedy(
    server: EmbeddedPostgres, folder: Path
) -> None:
    good = await database_with(
        server, "doctor1", "create table t (id int primary key, n int); insert into t values (1)"
    )
    schema = "create table t (id int, n bigint unique, s serial); alter sequence t_s_seq cache 9"
    await database_with(server, "doctor2", f"{schema}; grant select on t to reader; grant usage on t_s_seq to reader")
    dsns = {
        "r1": good,
        "r2": server.dsn_for("doctor2", user="reader", password="x"),
        "r3": f"postgresql://nobody@127.0.0.1:{free_port()}/none",
    }

    found = await findings_about(folder, dsns, 'policy = "peer-to-peer"\ntables = ["t", "gone"]')

    errors = {(f.replica, f.text) for f in found if f.level == "error"}
    for replica, text in [
        ("r1", "table gone does not exist"),
        ("r2", "table t has no primary key"),
        ("r2", "no right to insert, update, delete on t"),
        ("r2", "no right to create the schema tops"),
        ("r2", "t.s: sequence public.t_s_seq hands out 9 values at once (CACHE): replicas can't share it"),
        ("r2", "table t differs from that of r1"),
        ("r2", "table t holds none here, unlike at r1"),
    ]:
        assert (replica, text) in errors, f"not found: {replica}: {text}"
    assert any(replica == "r3" for replica, _ in errors), "an unreachable server is an error"
    warnings = " | ".join(f.text for f in found if f.level == "warning")
    assert "UNIQUE (n) can be violated by changes that meet" in warnings
    assert "the set does not run" in warnings
    assert all(f.remedy for f in found), "a finding without a remedy"


HANDLED = """
create function note() returns trigger language plpgsql as 'begin new.note = current_user; return new; end';
create table orders (
    id bigserial primary key, ref uuid not null default gen_random_uuid(), at timestamptz not null default now(),
    number int generated always as identity, place int, note text);
create trigger note before insert on orders for each row execute function note();
create table swaps (id int primary key deferrable, n int);
"""


@pytest.mark.parametrize("policy", [QUORUM, 'policy = "primary-site"\nprimary = "r1"', 'policy = "peer-to-peer"'])
async def test_doctor_finds_nothing_about_a_healthy_set_whatever_is_executed_once_in_it(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    keys = f'{policy}\ndirect_writes = "reject"'
    async with small_cluster(server, folder, keys, schema=HANDLED) as cluster, cluster.connect() as shop:
        await shop.execute("insert into orders (place) values (1) returning id, ref, at, number, note")
        await shop.execute("insert into swaps values (1, 1)")
        await shop.wait_in_sync()

        code, out, err = await tops_of(cluster.cluster, "doctor", "shop", "--format", "json")

    assert (code, json.loads(out)) == (0, [HEALTHY]), err


async def test_doctor_names_what_replicas_that_commit_first_can_not_share(
    server: EmbeddedPostgres, folder: Path
) -> None:
    schema = """
        create sequence down increment -1; create sequence round cycle; create sequence fine;
        create table a (id int primary key default nextval('down'), n int default nextval('round'),
            f int default nextval('fine'), i int generated always as identity (cache 20), c int check (c > 0));
    """
    dsn = await database_with(server, "shared1", schema)

    found = await findings_about(folder, {"r1": dsn}, 'policy = "peer-to-peer"\ntables = ["a"]')
    ordered = await findings_about(folder, {"r1": dsn}, 'policy = "peer-to-peer"\norder = "ordered"\ntables = ["a"]')

    shared = [f.text for f in found if "replicas can't share it" in f.text and f.level == "error"]
    assert shared == [
        "a.i: sequence public.a_i_seq hands out 20 values at once (CACHE): replicas can't share it",
        "a.id: sequence public.down counts down or has negative values: replicas can't share it",
        "a.n: sequence public.round begins again at its end (CYCLE): replicas can't share it",
    ]
    assert [f.level for f in found if "can be violated by changes that meet" in f.text] == ["warning"]
    assert not [f for f in ordered if "share" in f.text or "changes that meet" in f.text]


async def test_doctor_names_replicas_that_stopped_differ_do_not_answer_or_have_a_wrong_clock(
    server: EmbeddedPostgres, folder: Path
) -> None:
    schema = "create table t (id int primary key, n int unique)"
    keys = 'policy = "peer-to-peer"\non_apply_error = "set-aside"\nclock_skew_max_s = 0.000000001'
    async with small_cluster(server, folder, keys, schema=schema) as cluster:
        for number, replica in enumerate(("r1", "r2"), 1):
            cluster.agents[replica].participant.stop("paused by an operator")
            async with cluster.connect(prefer=replica) as shop:
                await shop.write([Insert("t", {"id": number, "n": 7})])
        cluster.agents["r1"].participant.resume()

        async def divergent() -> bool:
            return bool((await cluster.agents["r1"].status())["divergent"])

        await eventually(divergent, what="the quarantined transaction")
        await cluster.stop("r3")

        found = {(f.level, f.replica, f.text) for f in await examine(cluster.cluster, cluster.cluster.replica_sets[0])}

    assert found >= {
        ("error", "r1", "may differ from the others"),
        ("error", "r2", "stopped: paused by an operator"),
        ("warning", "r3", "its agent does not answer"),
    }
    assert {replica for level, replica, text in found if level == "warning" and "s off ours" in text} == {
        "r1",
        "r2",
        "r3",
    }


async def test_doctor_refuses_a_server_on_which_nothing_can_be_prepared(folder: Path) -> None:
    with EmbeddedPostgres(settings={"max_prepared_transactions": "0"}) as server:
        found = await findings_about(folder, {"r1": server.dsn}, 'policy = "quorum"')

    assert any(f.level == "error" and "max_prepared_transactions is 0" in f.text for f in found)


# ------------------------------------------------------------------------------------------- an agent's own endpoints


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_an_agent_tells_its_health_readiness_and_figures(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, QUORUM) as cluster, cluster.connect() as shop:
        agent = cluster.agents["r3"]
        agent.replica = agent.replica.model_copy(update={"listen": f"127.0.0.1:{free_port()}"})
        base = f"http://{agent.replica.listen}"
        async with serve_agent(agent):
            await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
            await shop.wait_in_sync()
            assert (await get(f"{base}/healthz"))[0] == 200
            assert (await get(f"{base}/readyz?max_lag=1"))[0] == 200
            status, text = await get(f"{base}/readyz?max_lag=soon")
            assert (status, "number of seconds" in text) == (400, True)
            labels = '{replica="r3",replica_set="shop"}'
            metrics = (await get(f"{base}/metrics"))[1]
            assert f"tops_replica_in_sync{labels} 1.0" in metrics
            assert f"tops_replica_lag_entries{labels} 0.0" in metrics

            await shop.order("r3", "pause")
            for _ in range(3):
                await shop.write([Update("accounts", {"id": 1}, add={"balance": 1})])

            async def behind() -> bool:
                return f"tops_replica_lag_entries{labels} 3.0" in (await get(f"{base}/metrics"))[1]

            await eventually(behind, what="the lag in the metrics")
            assert f"tops_replica_stopped{labels} 1.0" in (await get(f"{base}/metrics"))[1]
            status, text = await get(f"{base}/healthz")
            assert (status, "paused by an operator" in text) == (503, True)
            assert (await get(f"{base}/readyz"))[0] == 503

            await shop.order("r3", "resume")
            await shop.wait_in_sync()
            assert (await get(f"{base}/readyz?max_lag=1"))[0] == 200


async def test_silent_connections_to_an_agent_are_bounded_and_keep_no_probe_out(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replication.http.agent.REQUEST_S", 2.0)
    async with small_cluster(server, folder, QUORUM) as cluster, contextlib.AsyncExitStack() as opened:
        agent = cluster.agents["r3"]
        agent.replica = agent.replica.model_copy(update={"listen": f"127.0.0.1:{free_port()}"})
        before = len(os.listdir("/proc/self/fd"))
        async with serve_agent(agent):
            silent = [opened.enter_context(socket.socket()) for _ in range(3 * CONNECTIONS_MAX)]
            for each in silent:
                each.setblocking(False)
                await asyncio.get_running_loop().sock_connect(each, agent_address(agent))
            await asyncio.sleep(1.1)  # after which a silent connection makes room

            assert (await get(f"http://{agent.replica.listen}/metrics"))[0] == 200
            assert len(os.listdir("/proc/self/fd")) - before - len(silent) <= CONNECTIONS_MAX + 20
            async with asyncio.timeout(5):
                for each in silent:
                    with contextlib.suppress(ConnectionError):
                        assert await asyncio.get_running_loop().sock_recv(each, 1) == b""


def agent_address(agent: Agent) -> tuple[str, int]:
    host, _, port = str(agent.replica.listen).rpartition(":")
    return host, int(port)


# ------------------------------------------------------------------------------------------------- writes over HTTP


def reader_of_views(request: web.Request) -> Identity | None:
    return Identity("test", Kind.SITE, "auditor", "reader") if request.method == "GET" else None


async def http_side(cluster: SmallCluster) -> tuple[web.AppRunner, str]:
    """The sets' routes alone, and their address."""
    address = f"127.0.0.1:{free_port()}"
    gate = Gate(Names([address]), Permissions(), [reader_of_views], lambda *_: None)
    routes = gate.routes({})
    SetRoutes(cluster.cluster.path, "b1").add_to(routes, gate)
    runner = web.AppRunner(routes.app)
    await runner.setup()
    await web.TCPSite(runner, *address.split(":")).start()  # type: ignore[arg-type]
    return runner, f"http://{address}/v1/replica-sets"


async def test_writes_over_http_need_the_token_and_count_once_per_key(
    server: EmbeddedPostgres, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tops.replication")
    keys = f'{QUORUM}\nwrite_token = "secret-of-the-set"'
    async with small_cluster(server, folder, keys) as cluster, aiohttp.ClientSession() as session:
        runner, url = await http_side(cluster)

        async def post(
            body: Any, token: str | None = "secret-of-the-set", key: str = "", name: str = "shop"
        ) -> tuple[int, dict[str, Any]]:
            headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
            headers |= {"Idempotency-Key": key} if key else {}
            async with session.post(f"{url}/{name}/write", json=body, headers=headers) as response:
                return response.status, await response.json()

        insert = {"changes": [{"kind": "insert", "table": "accounts", "key": {"id": 1}, "values": {"balance": 0}}]}
        add = {"changes": [{"kind": "update", "table": "accounts", "key": {"id": 1}, "add": {"balance": 5}}]}
        try:
            for token in (None, "", "Secret-of-the-set", "secret-of-the-set2"):
                assert (await post(insert, token))[0] == 403
            path = cluster.cluster.path
            away = "[[replica_set]]\nname = 'away'\npolicy = 'quorum'\n[[replica_set.replica]]\nname='a'\nbroker='b1'"
            path.write_text(f"{path.read_text()}\n{away}")
            waiting = asyncio.ensure_future(session.get(f"{url}/away"))
            assert (await post(insert))[0] == 200
            assert [vars(r)["on_behalf_of"] for r in caplog.records if r.message == "write over HTTP"] == ["shop-http"]
            assert not waiting.done(), "a set that is away held up another one"
            assert (await waiting).status == 503
            results = await asyncio.gather(*(post(add, key="k") for _ in range(4)))
            assert [status for status, _ in results] == [200] * 4
            assert len({body["tx"] for _, body in results}) == 1
            status, body = await post({"sql": "update accounts set balance = 0", "args": []}, key="k")
            assert (status, "other content" in body["error"]) == (409, True)
            status, body = await post({"sql": "update accounts set balance = -1"})
            assert (status, "constraint" in body["error"]) == (409, True)
            assert (await post({"sql": "update accounts set owner = now()"}))[0] == 200  # executed once
            status, body = await post({"sql": "truncate accounts"})
            assert (status, "use DELETE" in body["error"]) == (409, True)
            status, body = await post({"changes": [{"kind": "upset", "table": "accounts"}]})
            assert (status, "changes.0.kind" in body["error"]) == (400, True)
            assert (await post({}))[0] == 400
            assert (await post(insert, name="nothing"))[0] == 403, "the token of one set is none of another"
            await cluster.stop("r2", "r3")
            status, body = await post(add)
            assert (status, "r2" in body["error"], body["retry"]) == (503, True, "safe")
            await cluster.start("r2", "r3")
            async with cluster.connect() as shop:
                await shop.wait_in_sync()
                read = await shop.fetchval("select balance from accounts where id = 1", consistency="quorum")
                assert read == 5, "a refused write was carried out, or a repeated one counted twice"
        finally:
            await runner.cleanup()


async def test_a_set_without_a_token_takes_no_writes_over_http(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, QUORUM, replicas=2) as cluster, aiohttp.ClientSession() as session:
        runner, url = await http_side(cluster)
        try:
            headers = {"Authorization": "Bearer None"}
            async with session.post(
                f"{url}/shop/write", json={"sql": "delete from accounts"}, headers=headers
            ) as response:
                assert response.status == 403
        finally:
            await runner.cleanup()


# ------------------------------------------------------------------------------------------------- too few replicas


async def test_a_write_that_waits_for_replicas_gives_up_at_its_bound_and_names_them(
    server: EmbeddedPostgres, folder: Path
) -> None:
    keys = 'policy = "write-all"\non_failure = "block"\nblock_s = 0.5'
    async with small_cluster(server, folder, keys) as cluster, cluster.connect() as shop:
        await cluster.stop("r2")

        with pytest.raises(TooFewReplicas, match="missing: r2"):
            await shop.write([Upsert("accounts", {"id": 1}, {"balance": 1})])

        assert await cluster.sql("r1", "select * from accounts") == []
