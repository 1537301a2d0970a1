"""A connection that breaks between a request and its answer: the client hears the truth, or that nobody knows yet.

A wire in front of the broker loses the request or the answer of a write. What the client then hears is compared with
what is in the databases, for every policy; the same request sent again with its idempotency key counts once.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Change, Insert, Update
from replication import ReplicaSet, connect
from replication.rpc.rejections import WriteRejected
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.integration.replication.test_kills import POLICIES
from tests.integration.replication.wires import Loss, Wire, wire_to
from tops.model.errors import OutcomeUnknown, Retry, TopsError


async def balance(shop: ReplicaSet, row: int) -> int:
    """What all replicas agree on once they are in sync."""
    await shop.wait_in_sync()
    found = await rows_everywhere(shop, f"select balance from accounts where id = {row}")
    assert found["r1"] == found["r2"] == found["r3"]
    return int(found["r1"][0][0])


def add_to(row: int) -> list[Change]:
    return [Update("accounts", {"id": row}, add={"balance": 1})]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_lost_request_or_answer_is_unknown_and_can_be_asked_about_and_repeated(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy]) as cluster,
        cluster.connect(prefer="r1") as direct,
    ):
        await direct.write([Insert("accounts", {"id": row, "balance": 0}) for row in range(4)])
        await direct.wait_in_sync()
        await asyncio.gather(
            asked_about(cluster, direct, 0, Loss.REQUESTS),
            asked_about(cluster, direct, 1, Loss.ANSWERS),
            repeated(cluster, direct, 2, Loss.REQUESTS),
            repeated(cluster, direct, 3, Loss.ANSWERS),
        )


async def asked_about(cluster: SmallCluster, direct: ReplicaSet, row: int, loss: Loss) -> None:
    async with unknown_write(cluster, row, loss) as unknown:
        outcome = await direct.outcome(unknown.tx)

    assert outcome == ("aborted" if loss is Loss.REQUESTS else "committed")
    assert await balance(direct, row) == (outcome == "committed"), "a request that came late was carried out"
    assert await direct.outcome(unknown.tx) == outcome, "the second answer differs from the first"


async def repeated(cluster: SmallCluster, direct: ReplicaSet, row: int, loss: Loss) -> None:
    async with unknown_write(cluster, row, loss, key=f"key {row}") as unknown:
        again = await direct.write(add_to(row), idempotency_key=f"key {row}")

    assert await balance(direct, row) == 1, f"{loss.value} lost, sent again: {again}"
    outcome = await direct.outcome(unknown.tx, idempotency_key=f"key {row}")
    assert outcome == "committed", "the request is there, whichever transaction carried it"
    with pytest.raises(WriteRejected, match="other content"):
        await direct.write(add_to(row) * 2, idempotency_key=f"key {row}")


@asynccontextmanager
async def unknown_write(cluster: SmallCluster, row: int, loss: Loss, key: str = "") -> AsyncIterator[OutcomeUnknown]:
    """A write whose request or answer is lost; on leaving, the connection is whole again and its client goes away."""
    async with (
        wire_to(cluster.cluster.urls()[0]) as wire,
        connect(wire.url, "shop", prefer="r1", timeout_s=2.0) as shop,
    ):
        wire.lose(loss)
        with pytest.raises(OutcomeUnknown) as unknown:
            await shop.write(add_to(row), idempotency_key=key)
        assert wire.lost.is_set()
        yield unknown.value
        wire.cut()


async def some_requests(server: EmbeddedPostgres, folder: Path, policy: str, count: int) -> None:
    """Requests through connections that break in the middle, each repeated until it has an answer."""
    async with (
        small_cluster(server, folder, POLICIES[policy]) as cluster,
        cluster.connect(prefer="r1") as direct,
        wire_to(cluster.cluster.urls()[0]) as wire,
    ):
        await direct.write([Insert("accounts", {"id": 1, "balance": 0})])
        await direct.wait_in_sync()
        pick = random.Random(policy)
        for number in range(count):
            async with connect(wire.url, "shop", prefer="r1", timeout_s=5.0) as shop:
                wire.lose(pick.choice([Loss.REQUESTS, Loss.ANSWERS]))
                cutting = asyncio.ensure_future(cut_when_lost(wire))
                await insist(shop, f"request-{number}")
                await cutting

        assert await balance(direct, 1) == count


async def insist(shop: ReplicaSet, key: str) -> None:
    while True:
        try:
            await shop.write(add_to(1), idempotency_key=key)
        except TopsError as error:
            if error.retry is Retry.NEVER:
                raise
        else:
            return


async def cut_when_lost(wire: Wire) -> None:
    await wire.lost.wait()
    wire.cut()


@pytest.mark.parametrize("policy", ["quorum", "peer-to-peer"])
async def test_requests_repeated_over_a_breaking_connection_count_once(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    await some_requests(server, folder, policy, 16)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES)
async def test_many_requests_repeated_over_a_breaking_connection_count_once(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    await some_requests(server, folder, policy, 100)
