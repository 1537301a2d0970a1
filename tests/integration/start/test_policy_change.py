"""A policy changes only while all replicas are at the end of the log; one that is behind says why it can't go on."""

from pathlib import Path

from adapters import EmbeddedPostgres
from adapters.changes import Insert
from replication.model.config import Cluster
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.command_line import tops_of

QUORUM, PEERS = 'policy = "quorum"\nwrite_quorum = 2', 'policy = "peer-to-peer"'


def rewrite(cluster: SmallCluster, old: str, new: str) -> None:
    path = cluster.cluster.path
    path.write_text(path.read_text().replace(old, new))
    cluster.cluster = Cluster.load(path)


async def test_a_change_of_policy_is_rejected_while_a_replica_is_behind(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, QUORUM) as cluster, cluster.connect() as shop:
        await shop.order("r3", "pause")
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        rewrite(cluster, QUORUM, PEERS)

        code, _, err = await tops_of(cluster.cluster, "rs", "apply", "shop", "--dry-run")
        assert (code, "r3 is at index 0 of 1" in err) == (2, True), err

        await shop.order("r3", "resume")
        await shop.wait_in_sync()
        code, out, err = await tops_of(cluster.cluster, "rs", "apply", "shop", "--dry-run", "--format", "json")
        assert (code, "policy" in out) == (0, True), err


async def test_a_replica_that_is_behind_across_a_change_of_policy_says_so(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, QUORUM) as cluster:
        await cluster.stop("r3")
        async with cluster.connect() as shop:
            for key in (1, 2):
                await shop.write([Insert("accounts", {"id": key, "balance": 1})])
        await cluster.stop("r1", "r2")
        rewrite(cluster, QUORUM, PEERS)
        await cluster.start("r1", "r2", "r3")
        stopped = (await cluster.agents["r3"].status())["stopped"]
        assert "entries 1 to 2 of the log" in stopped
        assert "former policy" in stopped

        await cluster.stop("r1", "r2", "r3")
        rewrite(cluster, PEERS, QUORUM)
        await cluster.start("r1", "r2", "r3")
        async with cluster.connect() as shop:
            await shop.wait_in_sync()
            rows = await rows_everywhere(shop, "select count(*) from accounts")
            assert set(map(tuple, rows.values())) == {((2,),)}
