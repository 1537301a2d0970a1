"""Direct connections: quick where a statement comes again, and nowhere less than the road through brokers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Upsert
from replication import ReplicaSet
from replication.client import direct as client_end
from replication.client.direct import DirectConnection
from replication.rpc.calls import GetDirectAddress, ReplicaFailed
from replication.rpc.direct import PATH, QUICK, READY
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.polling import eventually
from tops.model.errors import NotAuthenticated, NotReachable
from tops.runtime.links.dialling import client_session, open_socket
from tops.runtime.links.link import receive_bytes
from tops.runtime.links.sockets import DialledSocket
from tops.security import Kind

BALANCE = "select balance from accounts where id = $1"
WRITE_ALL = 'policy = "write-all"'


async def connection_to(shop: ReplicaSet, replica: str) -> DirectConnection:
    assert shop.direct is not None
    connections = shop.direct

    async def is_open() -> bool:
        return connections.to(replica) is not None

    await eventually(is_open, what=f"a direct connection to {replica}")
    connection = connections.to(replica)
    assert connection is not None
    return connection


async def quick(shop: ReplicaSet, replica: str, sql: str, *args: object) -> DirectConnection:
    """The connection over which the query is quick from now on."""
    connection = await connection_to(shop, replica)
    before = connection.quick_reads

    async def is_quick() -> bool:
        await shop.fetch(sql, *args, replica=replica)
        return connection.quick_reads > before

    await eventually(is_quick, what="a quick read")
    return connection


async def test_a_read_that_comes_again_is_quick_and_sees_what_was_acknowledged(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, WRITE_ALL) as cluster, cluster.connect(prefer="r2") as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 0})])
        connection = await quick(shop, "r2", BALANCE, 1)
        before = connection.quick_reads
        for number in range(1, 30):
            done = await shop.write([Upsert("accounts", {"id": 1}, {"balance": number})])
            assert await shop.fetchval(BALANCE, 1) == number
            assert await shop.fetchval(BALANCE, 1, after=done.token) == number
            assert await shop.fetchval(BALANCE, 1, consistency="current") == number

        assert connection.quick_reads >= before + 50
        assert await shop.fetchrow(BALANCE, 404) is None


async def test_reads_at_the_same_time_get_their_own_rows(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, WRITE_ALL) as cluster, cluster.connect(prefer="r1") as shop:
        await shop.write([Insert("accounts", {"id": number, "balance": number}) for number in range(200)])
        await quick(shop, "r1", BALANCE, 1)

        found = await asyncio.gather(*(shop.fetchval(BALANCE, number) for number in range(200)))
        current = await asyncio.gather(*(shop.fetchval(BALANCE, n, consistency="current") for n in range(200)))

        assert found == current == list(range(200))


async def test_without_direct_connections_reads_go_through_brokers_and_the_log_says_so_once(
    server: EmbeddedPostgres, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_end, "AGAIN_FIRST_S", 0.01)
    async with small_cluster(server, folder, WRITE_ALL, replicas=2, replica_keys='read_listen = "off"') as cluster:
        with caplog.at_level(logging.WARNING, "tops.replication"):
            async with cluster.connect(prefer="r1") as shop:
                await shop.write([Insert("accounts", {"id": 1, "balance": 5})])

                async def was_said() -> bool:
                    assert await shop.fetchval(BALANCE, 1) == 5
                    return "reads go through brokers" in caplog.text

                await eventually(was_said, what="a word in the log")
                for _ in range(20):
                    assert await shop.fetchval(BALANCE, 1) == 5

        assert caplog.text.count("reads go through brokers") == 1


async def test_reads_go_on_while_an_agent_is_restarted(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"') as cluster, cluster.connect(prefer="r3") as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 5})])
        former = await quick(shop, "r3", BALANCE, 1)
        stop = asyncio.Event()

        async def read() -> int:
            count = 0
            while not stop.is_set():
                assert await shop.fetchval(BALANCE, 1) == 5
                count += 1
            return count

        reading = [asyncio.ensure_future(read()) for _ in range(5)]
        await cluster.stop("r3")
        assert not former.is_open
        await cluster.start("r3")
        await shop.wait_in_sync()
        later = await quick(shop, "r3", BALANCE, 1)
        stop.set()

        assert later is not former
        assert sum(await asyncio.gather(*reading)) > 0


async def test_a_cancelled_read_leaves_the_connection_to_the_others(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, WRITE_ALL, replicas=2) as cluster, cluster.connect(prefer="r1") as shop:
        sleep = "select pg_sleep($1)::text as v"
        connection = await quick(shop, "r1", sleep, 0.0)
        sleeping = asyncio.ensure_future(shop.fetch(sleep, 30.0))
        await asyncio.sleep(0)
        sleeping.cancel()

        assert await shop.fetchval("select 1 as v") == 1
        assert connection.is_open


async def test_an_error_of_the_query_is_told_as_through_brokers(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, WRITE_ALL, replicas=2) as cluster, cluster.connect(prefer="r1") as shop:
        divide = "select 10 / $1::int as v"
        await quick(shop, "r1", divide, 5)
        with pytest.raises(ReplicaFailed) as quickly:
            await shop.fetch(divide, 0)
        async with cluster.connect(prefer="r1", direct=False) as brokered:
            with pytest.raises(ReplicaFailed) as through_brokers:
                await brokered.fetch(divide, 0)

        assert str(quickly.value) == str(through_brokers.value)
        assert quickly.value.code == through_brokers.value.code


async def test_a_value_that_is_not_quick_arrives_as_through_brokers(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, WRITE_ALL, replicas=2) as cluster, cluster.connect(prefer="r1") as shop:
        text = "select $1::text as v"
        await quick(shop, "r1", text, "x")

        assert await shop.fetchval(text, 5) == "5"
        assert await shop.fetchval("select repeat('x', $1) as v", 3_000_000) == "x" * 3_000_000
        assert await shop.fetchval("select array[1, 2] as v") == [1, 2]


async def test_a_read_waits_for_the_position_of_its_token(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, 'policy = "quorum"') as cluster, cluster.connect(prefer="r3") as shop:
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.wait_in_sync()
        await quick(shop, "r3", BALANCE, 1)
        await shop.order("r3", "pause")
        done = await shop.write([Upsert("accounts", {"id": 1}, {"balance": 2})])

        assert await shop.fetchval(BALANCE, 1, replica="r3") == 1
        with pytest.raises((NotReachable, ReplicaFailed), match="did not reach"):
            await shop.fetchval(BALANCE, 1, replica="r3", after=done.token, wait_s=0.5)
        waiting = asyncio.ensure_future(shop.fetchval(BALANCE, 1, replica="r3", after=done.token, wait_s=20.0))
        await shop.order("r3", "resume")
        assert await waiting == 2


# --------------------------------------------------------------------------------------------------------- bad clients


@asynccontextmanager
async def raw_connection(cluster: SmallCluster, shop: ReplicaSet, replica: str) -> AsyncIterator[DialledSocket]:
    """A client that sends what it likes."""
    found = await shop._caller.request(shop.config.site_of(replica), GetDirectAddress(), 10.0)
    own = shop._site.own
    async with client_session() as session, await open_socket(session, found.url, own, 5.0, PATH) as socket:
        await own.introduce(
            socket, "127.0.0.1", shop.config.site_of(replica), kind=Kind.REPLICA, secret_of=found.secret_of
        )
        assert await receive_bytes(socket, 10.0) == READY
        yield socket


@pytest.mark.parametrize(
    "message", [b"", b"\x07", bytes([QUICK]), bytes([QUICK]) + b"\xc1\xc1", bytes([QUICK]) + b"\x90"]
)
async def test_a_message_that_is_not_ours_ends_its_own_connection_alone(
    server: EmbeddedPostgres, folder: Path, message: bytes
) -> None:
    async with small_cluster(server, folder, WRITE_ALL, replicas=2) as cluster, cluster.connect(prefer="r1") as shop:
        connection = await quick(shop, "r1", "select 1 as v")
        async with raw_connection(cluster, shop, "r1") as socket:
            await socket.send_bytes(message)
            async with asyncio.timeout(10.0):
                ended = await socket.receive()
            assert ended.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING)

        assert connection.is_open
        assert await shop.fetchval("select 1 as v") == 1


async def test_a_client_expects_the_replica_that_it_dials(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, WRITE_ALL, replicas=2) as cluster, cluster.connect() as shop:
        found = await shop._caller.request("shop/r1", GetDirectAddress(), 10.0)
        own = shop._site.own
        for expected, kind in (("shop/r2", Kind.REPLICA), (None, Kind.BROKER)):
            async with client_session() as session, await open_socket(session, found.url, own, 5.0, PATH) as socket:
                with pytest.raises(NotAuthenticated, match="responded where"):
                    await own.introduce(socket, "127.0.0.1", expected, kind=kind, secret_of=found.secret_of)
