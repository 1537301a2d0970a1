"""A copy that is interrupted goes on with what is missing, and nothing else gets into its tables meanwhile."""

import logging
from pathlib import Path

import asyncpg
import pytest

from adapters.changes import Insert
from adapters.postgres.access.guard_triggers import REJECTED
from replication import connect
from tests.integration.start.seeding import SeededSet, listed, seeded_set
from tests.support.polling import eventually

KEYS = 'policy = "quorum"\nwrite_quorum = 2\nseed = "r1"\ntables = "*"'
TABLES = """
create table large (id int primary key, note text);
create table medium (id int primary key, note text);
insert into large select i, repeat('x', 100) from generate_series(1, 60000) i;
insert into medium select i, repeat('y', 100) from generate_series(1, 50000) i;
create index on large (note);
analyze;
"""
PIECE_BYTES = 32 * 1024  # a row of the record each: about 240 and 200 pieces
COPIED = "select relation, count(*) as pieces from tops.copied where relation like 'public.%' group by 1"
WRITTEN = "select xmin::text as by, count(*) as rows from {} group by 1"
SUMS = "select (select sum(id) from large) as large, (select sum(id) from medium) as medium"


async def copied(seeded: SeededSet, replica: str) -> dict[str, int]:
    try:
        return {row["relation"]: row["pieces"] for row in await seeded.fetch(replica, COPIED)}
    except asyncpg.UndefinedTableError:
        return {}


async def interrupted(seeded: SeededSet, source: str, replica: str, table: str) -> set[tuple[str, int]]:
    """Stop a target while the second table is under way; who wrote the rows of `table` until then."""
    seeded.agents[source].copies.piece_bytes = PIECE_BYTES

    async def under_way() -> bool:
        return (await copied(seeded, replica)).get(f"public.{table}", 0) > 5

    await seeded.start(replica)
    await eventually(under_way, 30.0, "the copy")
    written = {tuple(row) for row in await seeded.fetch(replica, WRITTEN.format("large"))}
    with pytest.raises(asyncpg.PostgresError) as rejected:
        await seeded.fetch(replica, "insert into large values (-1, 'by hand');")
    assert rejected.value.sqlstate == REJECTED
    await seeded.stop(replica)
    return written


async def has_kept(seeded: SeededSet, replica: str, written: set[tuple[str, int]]) -> bool:
    return written <= {tuple(row) for row in await seeded.fetch(replica, WRITTEN.format("large"))}


async def test_a_target_that_comes_back_takes_only_the_pieces_that_are_missing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        await seeded.before("r1", TABLES)
        await seeded.start("r1")
        written = await interrupted(seeded, "r1", "r2", "large")

        await seeded.start("r2")
        await seeded.joined()

        assert written
        assert await has_kept(seeded, "r2", written)
        assert "copy goes on" in caplog.text
        assert await seeded.fetch("r1", SUMS) == await seeded.fetch("r2", SUMS)
        assert not await seeded.fetch("r2", "select from tops.copies")


async def test_finished_tables_are_kept_when_the_seed_restarts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        await seeded.before("r1", TABLES)
        await seeded.start("r1")
        written = await interrupted(seeded, "r1", "r2", "medium")
        await seeded.stop("r1")

        await seeded.start("r1", "r2")
        await seeded.joined()

        assert sum(rows for _, rows in written) == 60000
        assert await has_kept(seeded, "r2", written)
        assert "copy goes on with the tables that are not complete" in caplog.text
        assert await seeded.fetch("r1", SUMS) == await seeded.fetch("r2", SUMS)


async def test_a_seed_that_changed_meanwhile_is_copied_from_the_beginning(folder: Path) -> None:
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        await seeded.before("r1", TABLES)
        await seeded.start("r1")
        await interrupted(seeded, "r1", "r2", "medium")
        await seeded.stop("r1")
        await seeded.before("r1", "update large set id = -1 where id = 1;")

        await seeded.start("r1", "r2")
        await seeded.joined()

        assert await seeded.fetch("r1", SUMS) == await seeded.fetch("r2", SUMS)
        assert [tuple(row) for row in await seeded.fetch("r2", "select min(id) from large")] == [(-1,)]


async def test_a_copy_of_a_live_replica_goes_on_in_the_same_snapshot_while_writes_go_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        await seeded.before("r1", TABLES)
        await seeded.start("r1", "r2")
        await seeded.joined()
        await seeded.stop("r1", "r2")
        path = seeded.cluster.path
        path.write_text(path.read_text().replace(listed(2), listed(3)))
        seeded.cluster = type(seeded.cluster).load(path)
        await seeded.start("r1", "r2")
        await seeded.joined()
        seeded.agents["r2"].copies.piece_bytes = PIECE_BYTES
        async with connect(seeded.cluster.urls(), "shop") as shop:
            await shop.write([Insert("large", {"id": -1, "note": "before"})])
            written = await interrupted(seeded, "r1", "r3", "large")
            await shop.write([Insert("large", {"id": -2, "note": "between"})])

            await seeded.start("r3")
            await seeded.joined()
            await shop.write([Insert("medium", {"id": -3, "note": "after"})])
            await shop.wait_in_sync()

        assert written
        assert await has_kept(seeded, "r3", written)
        assert "copy goes on" in caplog.text
        assert await seeded.fetch("r1", SUMS) == await seeded.fetch("r3", SUMS)
