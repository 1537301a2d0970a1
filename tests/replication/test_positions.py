"""Where a replica says it is: a number that it has promised is promised or reached at every moment in between."""

import asyncio
import sqlite3
from pathlib import Path

from adapters import SqliteAdapter
from replication.participant import ReplicaParticipant
from tops.effects import Memo
from tops.messages import EpochId
from tops.transactions import Scope


async def test_whoever_asks_during_a_commit_hears_of_the_number(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("create table accounts (id integer primary key)")
    async with SqliteAdapter(tmp_path / "shop.db", cluster="test", replica_set="shop") as database:
        replica = ReplicaParticipant(database, "rs.shop", "shop-r1", Scope.DISTRIBUTED)
        memo = Memo(EpochId("rs.shop", 1, 1, "b1", 1), "digest", "voter", ())
        await replica.prepare_batch(memo, ())

        async with replica._moved:  # as readers hold it, one after the other, that were woken by the number before
            finishing = asyncio.ensure_future(replica.finish_batch(memo, committed=True))
            while not await is_applied(database, 1):
                assert (replica.reached, list(replica.prepared)) == (0, [1])
            for _ in range(10):
                await asyncio.sleep(0)
            assert (replica.reached, list(replica.prepared)) == (0, [1])
        await finishing

        assert (replica.reached, replica.prepared) == (1, {})


async def is_applied(database: SqliteAdapter, number: int) -> bool:
    return (await database.applied()).prefix >= number
