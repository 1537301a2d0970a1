"""A copy that its target gave up holds nothing at its source, and no copy keeps another one from being taken."""

from pathlib import Path

import pytest

from replication.replica import copies
from replication.replica.start import starter
from replication.rpc.calls import GetCopyChunk, OpenCopy
from tests.integration.start.seeding import SeededSet, seeded_set
from tests.support.polling import eventually
from tops.model.errors import NotReachable

KEYS = 'policy = "quorum"\nwrite_quorum = 2\nseed = "r1"\ntables = "*"'
TABLES = """
create type mood as enum ('fine', 'bad');
create table people (id int primary key, feels mood);
insert into people select i, 'fine' from generate_series(1, 10) i;
"""
HELD = "select count(*) as held from pg_stat_activity where state = 'idle in transaction' and usename <> current_user"


async def held(seeded: SeededSet, replica: str = "r1") -> int:
    ((found,),) = await seeded.fetch(replica, HELD)
    return int(found)


async def test_a_seed_is_taken_after_many_copies_failed(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "PAUSE_S", 0.05)
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        await seeded.before("r1", TABLES)
        await seeded.before("r2", "create type mood as enum ('in the way');")  # the copy's schema has one, too
        await seeded.start("r1", "r2")

        async def failed_often() -> bool:
            return caplog.text.count("a copy was interrupted") > 10

        await eventually(failed_often, 60.0, "the copy fails again and again")
        assert await held(seeded) <= 1

        await seeded.fetch("r2", "drop type mood; select 1;")
        await seeded.joined()

        assert await seeded.fetch("r1", "select * from people") == await seeded.fetch("r2", "select * from people")
        assert await held(seeded) == 0


async def test_open_copies_are_bounded_and_take_no_connection_from_the_agents_own_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "IDLE_MAX_S", 2.0)
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        await seeded.before("r1", TABLES)
        await seeded.start("r1", "r2")
        await seeded.joined()
        agent = seeded.agents["r1"]

        for attempt in range(3):
            await agent.copies.respond(OpenCopy(copy=f"new-{attempt}", target="shop/r3"))
        assert await held(seeded) == 1  # a target's new copy replaces its former one
        with pytest.raises(NotReachable, match="new-0 is no longer open"):
            await agent.copies.respond(GetCopyChunk(copy="new-0", piece=0, number=0))

        for number in range(1, copies.COPIES_MAX):
            await agent.copies.respond(OpenCopy(copy=f"copy-{number}", target=f"shop/x{number}"))
        assert (await agent.resource.read_own("select 1 as one")).rows == [{"one": 1}]
        with pytest.raises(NotReachable, match=f"gives {copies.COPIES_MAX} copies already"):
            await agent.copies.respond(OpenCopy(copy="one-more", target="shop/more"))

        async def released() -> bool:
            return await held(seeded) == 0

        await eventually(released, 10.0, "copies that nobody asks for are let go")
        await agent.copies.respond(OpenCopy(copy="one-more", target="shop/more"))


async def test_a_copy_of_rows_refreshes_materialized_views_that_are_there_already(folder: Path) -> None:
    view = "create materialized view counted as select count(*) as n from people"
    async with seeded_set(folder, KEYS, replicas=2) as seeded:
        await seeded.before("r1", f"{TABLES} {view};")
        empty = TABLES.partition("insert")[0]
        await seeded.before("r2", f"{empty} {view} with no data;")  # as pg_dump -s makes it
        await seeded.start("r1", "r2")
        await seeded.joined()

        assert [row["n"] for row in await seeded.fetch("r2", "select n from counted")] == [10]
