"""Ids by which transactions are known, in PostgreSQL: many in a row, forgotten together, taken over from before."""

from collections.abc import Iterable

import pytest

from adapters import Logins, PostgresAdapter
from adapters.changes import Member, content_digest
from adapters.postgres.apply import log
from adapters.postgres.apply.keys import known_keys
from adapters.postgres.sql.schema import IDS_PER_ROW, VERSION
from adapters.resource import KEPT_BEYOND_MS, Why
from tests.contract.harness import PostgresDatabase, entry, member, numbered, settling, told
from tops.model.errors import ConfigError

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
        await adapter.apply([entry(4, member("t", key="k"), at_ms=at_ms + day_ms + KEPT_BEYOND_MS)])

        await adapter.compact()

        assert await database.sql(FOUND) == [("till.life.@r1", 0, 0b110, at_ms + 1 + day_ms)]


async def test_one_query_finds_keys_of_both_kinds(database: PostgresDatabase) -> None:
    keyed, elsewhere = member("t1", key="k"), member("t9", key="other")
    async with database.open() as adapter:
        await adapter.write_all_local([numbered(1), keyed])

        found = await adapter.read_own(*known_keys("shop", [numbered(1), numbered(2), keyed, elsewhere]))
        nothing = await adapter.read_own(*known_keys("shop", []))

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


async def test_a_set_that_only_follows_forgets_as_well(database: PostgresDatabase) -> None:
    async with database.open() as adapter:
        day_ms = 86_400_000
        for day in range(1, 5):
            members = (numbered(day * 100), member(f"t{day}", key=f"k{day}"))
            await adapter.apply([entry(day, *members, at_ms=day * (day_ms + KEPT_BEYOND_MS))])

        assert await database.sql("select block from tops.known_ids") == [(400 // IDS_PER_ROW,)]
        assert await database.sql("select key from tops.idempotency_keys") == [("k4",)]


async def test_many_are_forgotten_in_turns(database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_FORGOTTEN_MAX", 10)
    async with database.open() as adapter:
        await adapter.apply([entry(1, *(member(f"t{n}", key=f"k{n}") for n in range(35)))])
        await adapter.apply([entry(2, member("new", key="new"), at_ms=10**12)])
        await adapter.compact()

        assert await database.sql("select key from tops.idempotency_keys") == [("new",)]


async def back_to_version_2(database: PostgresDatabase, members: Iterable[Member]) -> None:
    """That version kept an id as a key like any other."""
    async with database.open():
        pass
    await database.sql("drop table tops.known_ids; delete from tops.schema_version")
    await database.sql("insert into tops.schema_version values (2)")
    for one in members:
        await database.sql(
            "insert into tops.idempotency_keys values "
            f"('shop', '{one.key}', '{content_digest(one)}', '{one.tx}', 0, 99999999999999)"
        )


async def test_what_an_earlier_version_knew_is_still_known(database: PostgresDatabase) -> None:
    ids = [numbered(number) for number in (1, 62, 63, 64, 5000)]
    await back_to_version_2(database, [*ids, settling(65), settling(200), member("t", key="k")])

    async with database.open() as adapter:
        votes = await adapter.write_all_local([*ids, numbered(2), numbered(4999), settling(64), settling(65)])
        fast = await adapter.write_all_local([numbered(200)])
        slow = await adapter.write_all_local([numbered(65), numbered(66), numbered(66), member("t2", key="k")])

    assert told(list(votes)) == [*[Why.DUPLICATE] * 5, None, None, Why.KEY_REUSED, Why.DUPLICATE]
    assert told([*fast, *slow]) == [Why.KEY_REUSED, Why.KEY_REUSED, None, Why.DUPLICATE, Why.DUPLICATE]
    assert await database.sql("select max(version) from tops.schema_version") == [(VERSION,)]


async def test_taking_over_twice_adds_to_what_is_known(database: PostgresDatabase) -> None:
    await back_to_version_2(database, [numbered(1), settling(2)])
    async with database.open() as adapter:
        await adapter.write_all_local([numbered(3)])
    await database.sql("delete from tops.idempotency_keys; delete from tops.schema_version where version > 2")
    one = numbered(4)
    await database.sql(f"insert into tops.idempotency_keys values ('shop', '{one.key}', 'tx', '{one.tx}', 0, 10)")

    async with database.open():
        pass

    assert await database.sql("select seen, settled from tops.known_ids") == [(0b11110, 0b100)]


async def test_a_hundred_thousand_ids_are_taken_over_whatever_a_statement_may_take(database: PostgresDatabase) -> None:
    await back_to_version_2(database, [])
    await database.sql(
        "insert into tops.idempotency_keys select 'shop', 'tx:' || tx, 'tx', tx, 0, 99999999999999 from ("
        "select 'till.life.' || lpad(to_hex(n), 10, '0') || '@r1' as tx from generate_series(0, 99999) as n) as known"
    )

    async with database.open(statement_timeout_s=0.25, lock_timeout_s=0.25):
        pass
    async with database.open() as adapter:
        votes = await adapter.write_all_local([numbered(99_999), numbered(100_000)])

    assert told(list(votes)) == [Why.DUPLICATE, None]


async def test_a_role_that_may_not_write_to_one_of_the_tables_is_told_at_the_start(database: PostgresDatabase) -> None:
    async with database.open():
        pass
    await database.sql(
        "create role limited login password 'limited'; grant usage on schema tops to limited;"
        f"grant connect on database {database.name} to limited;"
        "grant execute on all functions in schema pg_catalog to limited;"
        "grant all on all tables in schema tops to limited; revoke all on tops.known_ids from limited"
    )
    adapter = PostgresAdapter(Logins.alone(database.dsn_as("limited")), cluster="test", replica_set="shop")
    try:
        with pytest.raises(ConfigError, match=r"no right to write to tops\.known_ids: grant all"):
            await adapter.start()
    finally:
        await adapter.close()
        await database.sql("drop owned by limited; drop role limited")
