"""Writes that are longer than the log takes: rejected under every policy before anything is committed or logged."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert
from replication import ReplicaSet
from replication.rpc.rejections import WriteTooLarge
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.integration.replication.test_administration import http_side
from tops.model.errors import Retry

SCHEMA = "create table notes (id int primary key, text text not null); create table big (id int primary key, v int);"
LOCAL_FIRST = {
    "peer-to-peer": 'policy = "peer-to-peer"',
    "peer-to-peer by columns": 'policy = "peer-to-peer"\nresolver = "per-column"',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "primary-site logged": 'policy = "primary-site"\nprimary = "r1"\nack = "logged"',
}
COORDINATED = {
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "write-all": 'policy = "write-all"',
    "serializable": 'policy = "serializable"',
    "ordered": 'policy = "peer-to-peer"\norder = "ordered"',
}
FITS, TOO_LONG_AT_A_REPLICA, TOO_LONG = 4_000_000, 5_000_000, 9_000_000
Attempt = Callable[[ReplicaSet, int, int], Coroutine[Any, Any, object]]


async def as_a_row(shop: ReplicaSet, number: int, size: int) -> object:
    return await shop.write([Insert("notes", {"id": number, "text": "x" * size})])


async def as_many_rows(shop: ReplicaSet, number: int, size: int) -> object:
    rows = [Insert("notes", {"id": number + n, "text": "x" * (size // 10)}) for n in range(10)]
    return await shop.write(rows)


async def in_a_transaction(shop: ReplicaSet, number: int, size: int) -> object:
    async with shop.transaction() as tx:
        await tx.insert("notes", {"id": number, "text": "x" * (size // 2)})
        await tx.insert("notes", {"id": number + 1, "text": "x" * (size // 2)})
    return None


async def as_a_statement(shop: ReplicaSet, number: int, size: int) -> object:
    return await shop.execute("insert into notes values ($1, $2)", number, "x" * size)


async def executed_once(shop: ReplicaSet, number: int, size: int) -> object:
    sql = f"insert into notes select {number}, rpad(random()::text, {size}, 'x')"
    return await shop.execute(sql)


ATTEMPTS: list[Attempt] = [as_a_row, as_many_rows, in_a_transaction, as_a_statement, executed_once]


async def rejects(cluster: SmallCluster, shop: ReplicaSet, size: int) -> None:
    """Every way to write so much is rejected, leaves nothing behind, and holds up nobody."""
    for number, attempt in enumerate(ATTEMPTS):
        with pytest.raises(WriteTooLarge) as rejected:
            await attempt(shop, 1000 * number, size)
        assert (rejected.value.why, rejected.value.retry) == ("too-large", Retry.NEVER), attempt.__name__
        assert "split it" in str(rejected.value), attempt.__name__
    await shop.write([Insert("big", {"id": size, "v": 1})])
    await shop.wait_in_sync()
    for rows in (
        await rows_everywhere(shop, f"select (select count(*) from notes), v from big where id = {size}")
    ).values():
        assert rows == [(0, 1)]


@pytest.mark.parametrize("policy", LOCAL_FIRST)
async def test_what_a_replica_could_not_publish_is_rejected_before_it_commits(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, LOCAL_FIRST[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await rejects(cluster, shop, TOO_LONG_AT_A_REPLICA)
        await rejects(cluster, shop, TOO_LONG)


@pytest.mark.parametrize("policy", COORDINATED)
async def test_what_the_log_does_not_take_is_rejected_before_it_is_logged(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, COORDINATED[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await rejects(cluster, shop, TOO_LONG)


@pytest.mark.parametrize("policy", [*LOCAL_FIRST, "quorum"])
async def test_what_is_just_short_enough_reaches_every_replica(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    keys = {**LOCAL_FIRST, **COORDINATED}[policy]
    async with small_cluster(server, folder, keys, schema=SCHEMA) as cluster, cluster.connect(prefer="r1") as shop:
        for number, attempt in enumerate(ATTEMPTS):
            await attempt(shop, 1000 * number, FITS)
        await shop.wait_in_sync(60.0)

        counted = await rows_everywhere(shop, "select count(*), sum(length(text)) from notes")

        assert set(map(tuple, counted.values())) == {((15, 5 * FITS),)}


async def test_a_statement_whose_rows_take_too_much_with_their_clocks_is_rejected(
    server: EmbeddedPostgres, folder: Path
) -> None:
    """Its text is short, and so are its rows: what is published has a version for each."""
    sql = "insert into big select g, g from generate_series(1, 60000) g"
    async with (
        small_cluster(server, folder, LOCAL_FIRST["peer-to-peer"], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        with pytest.raises(WriteTooLarge, match="split it"):
            await shop.execute(sql)

        await shop.execute("insert into big select g, g from generate_series(1, 10000) g")
        await shop.wait_in_sync()
        assert set(map(tuple, (await rows_everywhere(shop, "select count(*) from big")).values())) == {((10000,),)}


async def test_over_http_a_write_that_is_too_large_gets_status_413_and_the_code(
    server: EmbeddedPostgres, folder: Path
) -> None:
    keys = LOCAL_FIRST["peer-to-peer"] + '\nwrite_token = "secret-token-of-the-set"'
    async with small_cluster(server, folder, keys, schema=SCHEMA) as cluster:
        runner, url = await http_side(cluster)
        body = {"sql": "insert into notes select 1, rpad(random()::text, 5000000, 'x')"}
        headers = {"Authorization": "Bearer secret-token-of-the-set"}
        try:
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{url}/shop/write", json=body) as response,
            ):
                reply = await response.json()
        finally:
            await runner.cleanup()

        assert (response.status, reply["code"], reply["retry"]) == (413, "too-large", "never")


async def test_writes_that_come_together_are_rejected_one_by_one(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, LOCAL_FIRST["primary-site"], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        sizes = [1, TOO_LONG_AT_A_REPLICA, 2, 3]
        done = await asyncio.gather(
            *(shop.execute(f"insert into notes select {n}, rpad(random()::text, {n}, 'x')") for n in sizes),
            return_exceptions=True,
        )

        assert [isinstance(one, WriteTooLarge) for one in done] == [False, True, False, False]
