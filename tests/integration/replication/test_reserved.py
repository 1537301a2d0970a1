"""What only agents write is out of a client's reach, under every policy: by row change, and by an agent's own SQL."""

from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from replication.certification import PRUNE
from replication.conflicts.pruning import DROP_SUMS
from replication.divergence.at_replica import REPAIR_CALL
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tests.support.hostile_client import unchecked
from tops.changes import Change, Delete, Insert, Statement, Upsert
from tops.errors import TopsError

POLICIES = {
    "write-all": 'policy = "write-all"',
    "serializable": 'policy = "serializable"',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "peer-to-peer": 'policy = "peer-to-peer"',
}
ATTACKS: list[Change] = [
    Upsert("tops.row_clocks", {"table_name": "accounts", "key": "{}"}, {"generation": 9}),
    Insert('"tops".conflicts', {"id": "x"}),
    Delete("tops.agent_locks", {"replica_set": "shop"}),
    Insert("tops.write_sets", {"number": 10**9, "places": "[]"}),
    Statement(PRUNE, (10**9,)),
    Statement(DROP_SUMS, (["accounts"], ["1"])),
    Statement(REPAIR_CALL, ("x", ["delete from tops.position"])),
]


async def memory(small: SmallCluster) -> list[object]:
    """What agents remember, but for what goes on by itself."""
    tables = ("agent_locks", "row_clocks", "row_sums", "write_sets", "set_aside", "began")
    return [
        await small.sql(name, f"select * from tops.{table} order by 1") for table in tables for name in small.agents
    ]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_client_cannot_write_what_is_an_agents(
    server: EmbeddedPostgres, folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchecked(monkeypatch)
    async with small_cluster(server, folder, POLICIES[policy], replicas=2) as small, small.connect() as shop:
        before = await memory(small)
        for attack in ATTACKS:
            with pytest.raises(TopsError):
                await shop.write([attack])

        assert await memory(small) == before
        await shop.write([Insert("accounts", {"id": 1, "balance": 1})])
        await shop.wait_in_sync()
