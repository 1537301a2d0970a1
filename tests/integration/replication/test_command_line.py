"""The commands and the HTTP side of a running cluster, from outside, and what the README tells to paste."""

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from yarl import URL

from adapters import EmbeddedPostgres
from adapters.embedded.free_ports import free_port
from replication import connect
from replication.model.config import SUPERUSER_ACCEPTED, Cluster
from replication.operations.processes import STOP_PATIENCE_S
from tests.integration.replication.clusters import RunningCluster, running, toml
from tests.support.command_line import environment, says, started, tops, tops_of
from tops.http.client import bearer_for


async def test_the_command_line_and_http_work_on_a_running_set(folder: Path) -> None:
    keys = 'policy = "quorum"\nwrite_quorum = 2\nwrite_token = "secret-token-of-the-set"'
    async with running(folder, {"shop": keys}, brokers=1) as cluster:
        await write_read_status(cluster)
        await wrong_use(cluster)
        await http(cluster)
        await pause_and_resume(cluster)


async def wrong_use(cluster: RunningCluster) -> None:
    code, _, err = await tops_of(cluster.cluster, "rs", "status", "shoop")
    assert (code, "the file has shop" in err) == (2, True)
    code, _, err = await tops_of(cluster.cluster, "read", "shop", "--sql", "select 1", "--format", "xml")
    assert (code, "xml" in err) == (2, True)
    code, out, _ = await tops_of(cluster.cluster, "rs", "outcome", "shop", "nobody.1.1")
    assert (code, out) == (1, "nobody.1.1: aborted\n")
    code, _, err = await tops_of(cluster.cluster, "read", "shop", "--sql", "select 1", "--replica", "r9")
    assert (code, "has no replica 'r9'; it has r1, r2, r3" in err) == (2, True)
    code, _, err = await tops_of(cluster.cluster, "rs", "status", "shop", "--url", "127.0.0.1:7420")
    assert (code, "write ws://HOST:PORT" in err) == (2, True)
    code, out, _ = await tops_of(cluster.cluster, "rs", "conflicts", "shop")
    assert (code, out) == (0, "no conflicts\n")


async def write_read_status(cluster: RunningCluster) -> None:
    code, out, err = await tops_of(
        cluster.cluster, "write", "shop", "--sql", "insert into accounts values ($1, $2, $3)",
        "--arg", "1", "--arg", "anna", "--arg", "100", "--format", "json",
    )  # fmt: skip
    assert code == 0, err
    token = json.loads(out)[0]["token"]
    code, out, err = await tops_of(
        cluster.cluster, "read", "shop", "--sql", "select owner from accounts where id = $1", "--arg", "1",
        "--consistency", "quorum", "--after", token, "--format", "json",
    )  # fmt: skip
    assert (code, json.loads(out)) == (0, [{"owner": "anna"}]), err
    returning = "insert into accounts values (2, 'berta', 7) returning id, owner, 50000::numeric as n"
    code, out, err = await tops_of(cluster.cluster, "write", "shop", "--sql", returning, "--format", "json")
    assert (code, json.loads(out)[0]["returned"]) == (0, [{"id": 2, "owner": "berta", "n": "50000"}]), err
    code, out, err = await tops_of(
        cluster.cluster, "write", "shop", "--sql", "delete from accounts where id = 2 returning owner"
    )
    assert (code, "berta" in out, "token" in out) == (0, True, True), err
    code, out, err = await tops_of(
        cluster.cluster, "read", "shop", "--sql", "select 50000::numeric as n, null as x", "--format", "json"
    )
    assert (code, json.loads(out)) == (0, [{"n": "50000", "x": None}]), err
    code, out, err = await tops_of(cluster.cluster, "write", "shop", "--sql", "update accounts set balance = -1")
    assert code == 1
    assert "constraint" in err
    code, out, err = await tops_of(cluster.cluster, "write", "shop", "--sql", "truncate accounts")
    assert code == 1
    assert "use DELETE" in err
    code, out, err = await tops_of(cluster.cluster, "rs", "status", "shop", "--format", "json")
    assert code == 0, err
    assert all(replica["in_sync"] for replica in json.loads(out)[0]["replicas"])
    code, out, err = await tops_of(cluster.cluster, "rs", "apply", "shop", "--dry-run", "--format", "json")
    assert (code, json.loads(out)[0]["step"]) == (0, "nothing to do"), err
    code, out, err = await tops_of(cluster.cluster, "doctor", "shop", "--format", "json")
    assert code == 0, out + err
    assert [finding["level"] for finding in json.loads(out)] == ["ok"]


async def http(cluster: RunningCluster) -> None:
    base = cluster.cluster.urls()[0].replace("ws", "http", 1) + "/v1/replica-sets/shop"
    body: dict[str, Any] = {"sql": "update accounts set balance = balance + $1 where id = 1", "args": [5]}
    headers = {"Authorization": "Bearer secret-token-of-the-set", "Idempotency-Key": "once"}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{base}/write", json=body) as rejected:
            assert rejected.status == 403
        for _ in range(2):
            async with session.post(f"{base}/write", json=body, headers=headers) as done:
                assert done.status == 200, await done.text()
                written = await done.json()
        assert written["duplicate"]
        async with session.post(f"{base}/write", json={"sequel": "x"}, headers=headers) as wrong:
            assert wrong.status == 400
            assert "sequel" in (await wrong.json())["error"]
        async with session.get(base, headers=bearer_for(URL(base))) as shown:
            assert (await shown.json())["policy"] == "quorum"
    async with cluster.connect() as shop:
        assert await shop.fetchval("select balance from accounts where id = 1", consistency="current") == 105


async def pause_and_resume(cluster: RunningCluster) -> None:
    code, out, _ = await tops_of(cluster.cluster, "rs", "pause", "shop", "--replica", "r3")
    assert (code, "paused" in out) == (0, True)
    async with cluster.connect() as shop:
        await shop.execute("update accounts set balance = balance + 1 where id = 1")
    code, out, _ = await tops_of(cluster.cluster, "rs", "status", "shop")
    assert code == 1
    assert "r3: stopped: paused by an operator" in out
    assert "…" not in out, "something does not fit on 80 columns"
    code, out, _ = await tops_of(cluster.cluster, "rs", "retry", "shop", "--replica", "r1")
    assert (code, out.startswith("r1: 0 of 0")) == (0, True)
    code, out, _ = await tops_of(cluster.cluster, "rs", "resume", "shop", "--replica", "r3")
    assert code == 0
    async with cluster.connect() as shop:
        await shop.wait_in_sync()


async def test_the_five_minutes_of_the_readme_work_as_they_are_pasted(folder: Path) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    readme = readme.replace("source .venv/bin/activate\n", "").replace("~/shop", str(folder / "shop"))
    readme = readme.replace("7420", str(free_port()))
    up, commands = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    tops_on_path = f'tops() {{ "{sys.executable}" -m tops "$@"; }}\n'
    running = await pasted(tops_on_path + up.replace("\ntops up", f"\nexec {sys.executable} -m tops up"))
    try:
        await says(running, "ready")
        told = await pasted(f"cd {folder}/shop\n{tops_on_path}set -e\n{commands}")
        out, err = await told.communicate()
        assert told.returncode == 0, err.decode()
        assert "100" in out.decode()
        returned, first, second = re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}.*?(\d\d:\d\d:\d\d\.\d+)", out.decode())
        assert returned == first == second
        asked = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, env=environment()
        )
        out, _ = await asked.communicate()
        assert out.decode() == "{'balance': 90}\n"
    finally:
        running.send_signal(signal.SIGINT)
        assert await running.wait() == 0


async def pasted(script: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec("bash", "-c", script, stdout=pipe, stderr=pipe, env=environment())


async def up(cluster: Cluster, folder: Path) -> asyncio.subprocess.Process:
    return await started("up", "-c", str(cluster.path), "--logs", str(folder / "logs"))


async def test_tops_up_goes_on_without_a_replica_whose_database_is_away(folder: Path) -> None:
    keys = f'policy = "quorum"\nwrite_quorum = 2\nallow_superuser = "{SUPERUSER_ACCEPTED}"'
    path = toml(folder, {"shop": keys}, brokers=1, replicas=3)
    database = EmbeddedPostgres(folder / "r3", port=free_port())
    async with database:
        path.write_text(path.read_text().replace('name = "r3"', f'name = "r3"\ndsn = "{database.dsn}"'))
        cluster = Cluster.load(path)
        process = await up(cluster, folder)
        await says(process, "ready")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    process = await up(cluster, folder)
    try:
        await says(process, "running, but not in sync")
        async with connect(cluster.urls(), "shop") as shop:
            await shop.execute("insert into accounts values (1, '', 1)")
        assert "waiting for the database" in (folder / "logs" / "shop-r3.log").read_text()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(STOP_PATIENCE_S):  # what does not end by itself is killed after it
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


async def test_tops_up_says_why_a_set_has_not_started_and_who_is_missing(folder: Path) -> None:
    path = toml(folder, {"shop": 'policy = "quorum"\nwrite_quorum = 2'}, brokers=1, replicas=3)
    away = f'name = "r3"\ndsn = "postgresql://nobody@127.0.0.1:{free_port()}/none"'
    path.write_text(path.read_text().replace('name = "r3"', away))
    cluster = Cluster.load(path)
    process = await up(cluster, folder)
    try:
        await says(process, "shop has not started: no response from r3")
        code, _, err = await tops_of(cluster, "write", "shop", "--sql", "insert into accounts values (1, '', 1)")
        assert (code, "not-started" in err, "no response from r3" in err) == (1, True, True)
    finally:
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def test_tops_up_ends_when_only_brokers_are_left(server: EmbeddedPostgres, folder: Path) -> None:
    path = toml(folder, {"shop": 'policy = "quorum"\nwrite_quorum = 2'}, brokers=1, replicas=2)
    for name, database in (("r1", "postgres"), ("r2", "template1")):  # a superuser's, which the file does not allow
        dsn = f'name = "{name}"\ndsn = "{server.dsn_for(database)}"'
        path.write_text(path.read_text().replace(f'name = "{name}"', dsn))
    process = await up(Cluster.load(path), folder)
    try:
        await says(process, "no replica is left running (shop/")
        async with asyncio.timeout(STOP_PATIENCE_S):
            assert await process.wait() == 1
    finally:
        if process.returncode is None:
            process.kill()


async def test_a_second_agent_needs_to_be_told_to_take_over_and_the_rest_goes_on(folder: Path) -> None:
    cluster = Cluster.load(toml(folder, {"shop": 'policy = "quorum"\nwrite_quorum = 2'}, brokers=1, replicas=3))
    servers = [EmbeddedPostgres(folder / f"pg{number}") for number in (1, 2, 3)]
    async with servers[0], servers[1], servers[2]:
        text = cluster.path.read_text()
        for number, server in enumerate(servers, 1):
            text = text.replace(f'name = "r{number}"', f'name = "r{number}"\ndsn = "{server.dsn}"')
        accepted = f'name = "shop"\nallow_superuser = "{SUPERUSER_ACCEPTED}"'
        cluster.path.write_text(text.replace('name = "shop"', accepted))
        cluster = Cluster.load(cluster.path)
        process = await up(cluster, folder)
        try:
            await says(process, "ready")
            first = next(p for p in psutil.Process(process.pid).children() if "shop/r1" in p.cmdline())
            code, _, err = await tops_of(cluster, "replica", "run", "--name", "shop/r1")
            assert (code, f"process {first.pid} on host" in err, "--take-over" in err) == (2, True, True)

            second = await started("replica", "run", "--name", "shop/r1", "--take-over", "-c", str(cluster.path))
            try:
                await says(process, "shop/r1 ended with code 2; the rest goes on without it")
                async with connect(cluster.urls(), "shop") as shop:
                    await shop.execute("insert into accounts values (1, '', 1)")
                    await shop.wait_in_sync()
            finally:
                second.terminate()
                await second.wait()
        finally:
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 1


async def test_tops_up_runs_everything_and_stops_it_on_an_interrupt(folder: Path) -> None:
    cluster = Cluster.load(toml(folder, {"shop": 'policy = "write-all"'}, brokers=1, replicas=2))
    process = await up(cluster, folder)
    try:
        await says(process, "ready")
        code, _, err = await tops_of(cluster, "up")
        assert (code, "somebody listens there already" in err) == (2, True)
        first = next(p for p in psutil.Process(process.pid).children() if "shop/r1" in p.cmdline())
        confs = {file: file.read_text() for file in folder.rglob("tops.conf")}
        for options in ([], ["--take-over"]):
            async with asyncio.timeout(20.0):
                code, _, err = await tops_of(cluster, "replica", "run", "--name", "shop/r1", *options)
            assert (code, f"process {first.pid} on host" in err, "stop that one first" in err) == (2, True, True), err
        assert {file: file.read_text() for file in confs} == confs, "a running server's settings were changed"
        async with connect(cluster.urls(), "shop") as shop:
            await shop.execute("insert into accounts values (1, '', 1)")
            pids = [int(pid.read_text().split()[0]) for pid in folder.rglob("postmaster.pid")]
            assert len(pids) == 2
            killed = next(p for p in psutil.Process(process.pid).children() if "shop/r2" in p.cmdline())
            killed.kill()
            await says(process, "shop/r2 was ended by signal 9")
            await shop.wait_in_sync()
            pids = [int(pid.read_text().split()[0]) for pid in folder.rglob("postmaster.pid")]
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()

    assert not any(psutil.pid_exists(pid) for pid in pids), "a server outlived its cluster"


async def test_the_demo_keeps_every_write_and_ends_with_equal_replicas() -> None:
    code, out, _ = await tops("demo", "--policy", "quorum")

    assert code == 0
    assert "replicas are equal, row for row" in out
