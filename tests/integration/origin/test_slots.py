"""Sequences of replicas that commit by themselves: no two of them draw the same value."""

import asyncio
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Statement
from adapters.postgres.copy.scripts import user_tables
from adapters.postgres.origin import Executed, Origin, Rejected, Slots
from adapters.postgres.origin.slots import BLOCK, SLOTS
from tests.integration.origin.databases import OPTIONS, OriginDatabase
from tests.integration.origin.policies import POLICIES
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import small_cluster

SCHEMA = "create table orders (id serial primary key, note text)"


async def origin_with(database: OriginDatabase, slot: int) -> Origin:
    """As a replica's agent opens it after a start."""
    tables = await user_tables(database.dsn)
    origin = Origin(database.logins.write, database.logins.agent, "the origin", tables, OPTIONS, Slots(slot))
    await origin.start()
    return origin


async def drawn(origin: Origin, sql: str = "insert into orders (note) values ('x') returning id") -> list[int]:
    (outcome,) = await origin.execute([(Statement(sql),)])
    assert isinstance(outcome, Executed), outcome
    return [row["id"] for row in outcome.returned[0]]


async def test_every_slot_draws_from_blocks_of_its_own(database: OriginDatabase) -> None:
    await database.begin(SCHEMA)

    for slot in (0, 1, 15):
        origin = await origin_with(database, slot)
        values = [*await drawn(origin), *await drawn(origin)]
        again = await origin_with(database, slot)
        values += await drawn(again)
        await origin.close()
        await again.close()

        assert {value // BLOCK % SLOTS for value in values} == {slot}
        assert values == list(range(values[0], values[0] + 3)), "a restart uses no block up"


async def test_a_block_that_holds_rows_is_passed_over_and_a_block_that_is_used_up_is_left(
    database: OriginDatabase,
) -> None:
    await database.begin(SCHEMA)
    await database.sql(f"insert into orders values ({BLOCK + 7}, 'of a former owner')")
    origin = await origin_with(database, 1)

    first = (await drawn(origin))[0]
    await database.sql(f"select setval('orders_id_seq', {first + BLOCK - 2})")
    following = await drawn(origin, "insert into orders (note) select 'many' from generate_series(1, 10) returning id")
    await origin.close()

    assert first == (SLOTS + 1) * BLOCK
    assert following == list(range((2 * SLOTS + 1) * BLOCK, (2 * SLOTS + 1) * BLOCK + 10))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("alter sequence orders_id_seq increment by -1 minvalue -100 maxvalue 100 start 1", "counts down"),
        ("alter sequence orders_id_seq cycle", "CYCLE"),
        ("alter sequence orders_id_seq cache 10", "CACHE"),
    ],
)
async def test_a_sequence_that_can_not_be_shared_is_rejected(
    database: OriginDatabase, change: str, reason: str
) -> None:
    await database.begin(SCHEMA)
    await database.sql(change)
    origin = await origin_with(database, 1)

    (outcome,) = await origin.execute([(Statement("insert into orders (note) values ('x')"),)])
    await origin.close()

    assert isinstance(outcome, Rejected)
    assert outcome.sqlstate == "0A000"
    assert reason in outcome.message


async def test_a_statement_that_needs_more_than_a_block_is_rejected_and_others_go_on(database: OriginDatabase) -> None:
    await database.begin("create table orders (id smallserial primary key, note text)")  # 127 values a block
    origin = await origin_with(database, 1)
    many = Statement("insert into orders (note) select 'many' from generate_series(1, 300)")

    (outcome,) = await origin.execute([(many,)])
    following = await drawn(origin)
    await origin.close()

    assert isinstance(outcome, Rejected)
    assert "fewer rows" in outcome.message
    assert following[0] // 127 % SLOTS == 1


async def test_concurrent_inserts_at_three_sites_all_survive(server: EmbeddedPostgres, folder: Path) -> None:
    async with small_cluster(server, folder, POLICIES["peer-to-peer"], schema=SCHEMA) as cluster:

        async def insert(site: str) -> list[int]:
            async with cluster.connect(prefer=site) as shop:
                found = []
                for _ in range(10):
                    done = await shop.execute("insert into orders (note) values ($1) returning id", site)
                    found.append(done.returned[0][0]["id"])
                return found

        ids = await asyncio.gather(*(insert(site) for site in ("r1", "r2", "r3")))

        async with cluster.connect() as shop:
            await shop.wait_in_sync()
            expected = sorted(
                (value, site) for site, some in zip(("r1", "r2", "r3"), ids, strict=True) for value in some
            )
            assert len({value for value, _ in expected}) == 30
            found = await rows_everywhere(shop, "select id, note from orders order by id")
            assert found == dict.fromkeys(("r1", "r2", "r3"), expected)
            assert [line for lines in (await shop.conflicts()).values() for line in lines] == []
