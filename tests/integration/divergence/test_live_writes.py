"""Checks of databases that follow each other asynchronously, while they are being written."""

import asyncio
import random
from dataclasses import replace

import asyncpg

from replication.divergence.results.model import Verdict
from tests.integration.divergence.conftest import QUICK, Databases, kinds

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v int)"


async def write(dsn: str, stop: asyncio.Event, rate_per_s: int, rows: int) -> int:
    """Updates of random rows, until told to stop; returns how many."""
    connection = await asyncpg.connect(dsn)
    generator, done = random.Random(7), 0
    try:
        while not stop.is_set():
            keys = [generator.randint(1001, rows) for _ in range(rate_per_s // 20)]
            await connection.executemany("UPDATE t SET v = v + 1 WHERE id = $1", [(key,) for key in keys])
            done += len(keys)
            await asyncio.sleep(0.05)
    finally:
        await connection.close()
    return done


async def test_under_asynchronous_replication_and_live_writes_only_real_differences_are_reported(
    databases: Databases,
) -> None:
    rows = 30_000
    source, target = databases.endpoints[:2]
    await databases.on("r1", TABLE, f"INSERT INTO t SELECT i, 0 FROM generate_series(1, {rows}) i")
    await databases.on("r2", TABLE)
    await databases.on("r1", "CREATE PUBLICATION everything FOR TABLE t")
    await databases.on("r2", f"CREATE SUBSCRIPTION follow CONNECTION '{source.dsn}' PUBLICATION everything")
    stop = asyncio.Event()
    try:
        for _ in range(600):
            if (await databases.fetch("r2", "SELECT count(*) FROM t"))[0][0] == rows:
                break
            await asyncio.sleep(0.1)
        await databases.on("r2", "UPDATE t SET v = -5 WHERE id = 10", "DELETE FROM t WHERE id = 20")
        writer = asyncio.create_task(write(source.dsn, stop, 500, rows))

        results = [
            await databases.compare("t", endpoints=[source, target], options=replace(QUICK, settle_s=1.0))
            for _ in range(2)
        ]
        stop.set()
        written = await writer
    finally:
        await databases.on("r2", "DROP SUBSCRIPTION follow")

    assert written > 100
    for result in results:
        assert result.verdict is Verdict.DIFFERENT
        assert kinds(databases.differences(result)) == {
            (("10",), "r2", "changed", ("v",)),
            (("20",), "r2", "missing", ()),
        }
