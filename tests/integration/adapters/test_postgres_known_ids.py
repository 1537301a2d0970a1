"""Ids by which transactions are known, in PostgreSQL: many in a row, forgotten together, taken over from before."""

from adapters.postgres.keys import known_keys
from adapters.postgres.schema import VERSION
from tests.contract.harness import PostgresDatabase, entry, member
from tests.contract.test_known_ids import numbered, settling, told
from tops.ports import Why

FOUND = "select series, block, seen, expires_ms from tops.known_ids order by series, block"


async def test_many_ids_share_a_row(database: PostgresDatabase) -> None:
    async with database.open() as adapter:
        for first in range(0, 630, 70):
            await adapter.write_all_local([numbered(number) for number in range(first, first + 70)])

    assert await database.sql("select block, bit_count(seen::bit(64))::int from tops.known_ids order by block") == [
        (block, 63) for block in range(10)
    ]
    assert await database.sql("select count(*)::int from tops.idempotency_keys") == [(0,)]


async def test_ids_are_forgotten_by_compaction_when_the_time_of_a_rows_last_one_is_over(
    database: PostgresDatabase,
) -> None:
    async with database.open() as adapter:
        at_ms, day_ms = 1_000_000, 86_400_000
        await adapter.apply([entry(1, numbered(1), at_ms=at_ms), entry(2, numbered(100), at_ms=at_ms)])
        await adapter.apply([entry(3, numbered(2), at_ms=at_ms + 1)])
        await adapter.apply([entry(4, member("t", key="k"), at_ms=at_ms + day_ms)])

        await adapter.compact()

        assert await database.sql(FOUND) == [("till.life.@r1", 0, 0b110, at_ms + 1 + day_ms)]


async def test_one_query_finds_keys_of_both_kinds(database: PostgresDatabase) -> None:
    keyed, elsewhere = member("t1", key="k"), member("t9", key="other")
    async with database.open() as adapter:
        await adapter.write_all_local([numbered(1), keyed])

        found = await adapter.read(*known_keys("shop", [numbered(1), numbered(2), keyed, elsewhere]))
        nothing = await adapter.read(*known_keys("shop", []))

        assert {row["key"]: row["tx"] for row in found.rows} == {"k": "t1", numbered(1).key: numbered(1).tx}
        assert not nothing.rows


async def test_a_key_that_only_looks_like_an_id_is_a_key_on_either_path(database: PostgresDatabase) -> None:
    alone, together = numbered(1).key, numbered(2).key
    async with database.open() as adapter:
        await adapter.write_all_local([numbered(1)])
        first = await adapter.write_all_local([member("t1", key=alone)])
        fast = await adapter.write_all_local([member("t2", key=together), numbered(2)])
        slow = await adapter.write_all_local([member("t3", key=together), numbered(2), numbered(3)])

    assert told([*first, *fast]) == [None] * 3
    assert told(list(slow)) == [Why.DUPLICATE, Why.DUPLICATE, None]


async def test_what_an_earlier_version_knew_is_still_known(database: PostgresDatabase) -> None:
    """That version kept an id as a key like any other."""
    ids = {number: numbered(number) for number in (1, 62, 63, 64, 5000)}
    async with database.open():
        pass
    await database.sql("drop table tops.known_ids; delete from tops.schema_version; delete from tops.position")
    await database.sql("insert into tops.schema_version values (2)")
    for one in ids.values():
        await database.sql(
            f"insert into tops.idempotency_keys values ('shop', '{one.key}', 'tx', '{one.tx}', 0, 99999999999999)"
        )

    async with database.open() as adapter:
        votes = await adapter.write_all_local([*ids.values(), numbered(2), numbered(4999), settling(64)])

    assert told(list(votes)) == [*[Why.DUPLICATE] * 5, None, None, Why.KEY_REUSED]
    assert await database.sql("select max(version) from tops.schema_version") == [(VERSION,)]
