"""A replica set whose brokers, agents, operator and HTTP side all have keys: the commands and HTTP, from outside."""

import json
import ssl
from pathlib import Path

import aiohttp

from adapters.embedded.free_ports import free_port
from replication.model.config import Cluster
from tests.integration.overlay.secured import issue
from tests.integration.replication.clusters import SCHEMA
from tests.support.command_line import says, started, tops_of
from tops.security import Authority, Kind, utc_now


def secured_file(folder: Path) -> tuple[Path, Authority]:
    """A set of two replicas at one broker, with keys for everybody beside the file."""
    (folder / "schema.sql").write_text(SCHEMA)
    authority = Authority.init(folder / "keys", "test", utc_now(), 30)
    broker = issue(authority, "b1", kind=Kind.BROKER)
    for name in ("shop/r1", "shop/r2"):
        issue(authority, name)
    issue(authority, "http-b1", "service")
    lines = [
        '[cluster]\nname = "test"',
        f'[[broker]]\nname = "b1"\nlisten = "127.0.0.1:{free_port()}"\ndata = "data"\nkeys = "{broker}"',
        '[[replica_set]]\nname = "shop"\npolicy = "write-all"\nschema = "schema.sql"',
        'write_token = "secret-token-of-the-set"\nhttp_keys = "keys/nodes/http-{broker}"',
        *(
            f'[[replica_set.replica]]\nname = "{name}"\nbroker = "b1"\nkeys = "keys/nodes/shop.{name}"'
            for name in ("r1", "r2")
        ),
    ]
    path = folder / "tops.toml"
    path.write_text("\n".join(lines))
    return path, authority


async def test_the_commands_and_http_work_on_a_cluster_with_keys_and_refuse_who_has_none(folder: Path) -> None:
    path, authority = secured_file(folder)
    cluster = Cluster.load(path)
    operator, reader = str(issue(authority, "operator", "admin")), str(issue(authority, "auditor", "reader"))
    up = await started("up", "-c", str(path), "--keys", operator, "--logs", str(folder / "logs"))
    try:
        await says(up, "ready")
        await the_operator_may(cluster, operator)
        await others_may_not(cluster, reader)
        await over_http(cluster, operator, reader)
    finally:
        up.terminate()
        await up.wait()


async def the_operator_may(cluster: Cluster, keys: str) -> None:
    insert = "insert into accounts values (1, 'anna', 100)"
    code, _, err = await tops_of(cluster, "write", "shop", "--sql", insert, "--keys", keys)
    assert code == 0, err
    query = ("read", "shop", "--sql", "select owner from accounts", "--consistency", "current", "--format", "json")
    code, out, err = await tops_of(cluster, *query, "--keys", keys)
    assert (code, json.loads(out)) == (0, [{"owner": "anna"}]), err
    for command in (("rs", "status"), ("rs", "apply"), ("rs", "pause"), ("rs", "resume"), ("rs", "conflicts")):
        code, out, err = await tops_of(cluster, *command, "shop", "--keys", keys)
        assert code == 0, f"{command}: {out}{err}"


async def others_may_not(cluster: Cluster, reader: str) -> None:
    write = ("write", "shop", "--sql", "insert into accounts values (2, 'berta', 100)")
    code, _, err = await tops_of(cluster, *write)
    assert code != 0
    assert "keys" in err
    code, _, err = await tops_of(cluster, *write, "--keys", reader)
    assert code != 0
    assert "auditor" in err
    assert "Traceback" not in err


def certified(keys: str) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=f"{keys}/ca.crt")
    tls.load_cert_chain(f"{keys}/node.crt", f"{keys}/node.key")
    return tls


async def over_http(cluster: Cluster, operator: str, reader: str) -> None:
    url = cluster.urls()[0].replace("ws", "http", 1) + "/v1/replica-sets/shop/write"
    body = {"sql": "update accounts set balance = balance + $1 where id = 1", "args": [5]}
    headers = {"Authorization": "Bearer secret-token-of-the-set", "Idempotency-Key": "once"}
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body, ssl=certified(reader)) as rejected:
            assert (rejected.status, "auditor (reader) may not" in await rejected.text()) == (403, True)
        for shown, keys in ((headers, reader), ({}, operator)):  # the token's service, then the operator itself
            async with session.post(url, json=body, headers=shown, ssl=certified(keys)) as done:
                assert done.status == 200, await done.text()
                assert (await done.json())["rows"] == [1]
