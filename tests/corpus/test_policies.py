"""The corpus through a real set, under every policy: brokers, agents, the log, and three databases."""

import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from replication import ReplicaSet
from tests.corpus.cases import Case, features
from tests.corpus.worlds import READING, contents_of, first_difference, make_different
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tops.errors import TopsError

POLICIES = {
    "write-all": 'policy = "write-all"',
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "combined": 'policy = "combined"\nsync = ["r1", "r2"]',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "ordered": 'policy = "peer-to-peer"\norder = "ordered"',
    "serializable": 'policy = "serializable"',
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off", "max_prepared_transactions": 20}) as started:
        yield started


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tops-corpus-") as made:
        yield Path(made)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("feature", features(), ids=lambda feature: feature.name)
async def test_replicas_of_a_set_are_equal_after_every_statement(server, folder, policy, feature) -> None:  # type: ignore[no-untyped-def]
    async with (
        AsyncExitStack() as readers,
        small_cluster(server, folder, POLICIES[policy], schema=feature.schema) as cluster,
        cluster.connect() as shop,
    ):
        connections = [await _opened(cluster, replica, readers) for replica in cluster.databases]
        for place, connection in enumerate(connections):
            await make_different(connection, place)
        for case in feature.cases:
            where = f"{feature.path.name}:{case.line + 1}: {case.text}"
            error = await _written(shop, case)
            assert (error is None) == (case.expected == "executed"), f"{where}: {error}"
            await shop.wait_in_sync()
            contents = [await contents_of(connection) for connection in connections]
            assert first_difference(contents) == "", where
        for connection in connections:
            await connection.execute("drop schema if exists other cascade")


async def _opened(cluster: SmallCluster, replica: str, until: AsyncExitStack) -> asyncpg.Connection:
    dsn = cluster.server.dsn_for(cluster.databases[replica])
    connection = await asyncpg.connect(dsn, server_settings=READING)
    until.push_async_callback(connection.close)
    return connection


async def _written(shop: ReplicaSet, case: Case) -> TopsError | None:
    try:
        await shop.write([case.change])
    except TopsError as error:
        return error
    return None
