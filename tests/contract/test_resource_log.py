"""Every adapter: the log is applied in order and exactly once, local writes wait to be published, reads are whole."""

import asyncio
import sqlite3
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import asyncpg
import msgspec
import pytest

from adapters.changes import (
    Change,
    Delete,
    Insert,
    InvalidChange,
    Statement,
    Update,
    Upsert,
    decode_member,
    encode_member,
    known_by_id,
)
from adapters.resource import KEPT_BEYOND_MS, Position, Resource, Why
from tests.contract.harness import Database, attempt, entry, epoch, member
from tops.model.errors import AgentReplaced, ConfigError, InvariantBroken, MemberRejected, ResourceError, TopsError
from tops.model.ids import TxId
from tops.model.sizes import LOCAL_TX_BYTES_MAX


def balance(row: int, add: int) -> Update:
    return Update("acct", {"id": row}, add={"bal": add})


async def test_entries_are_applied_once_however_often_they_come(resource: Resource, database: Database) -> None:
    entries = [entry(n, member(f"t{n}", balance(1, n))) for n in range(1, 6)]

    await resource.apply(entries[:3])
    await resource.apply(entries)
    result = await resource.apply(entries[1:4])

    assert (result.position, result.failed) == (5, None)
    assert await database.sql("select bal from acct where id = 1") == [(115,)]


async def test_a_void_number_moves_the_position(resource: Resource) -> None:
    result = await resource.apply([entry(1, member("t1", balance(1, 1))), entry(2), entry(3)])

    assert result.position == 3
    assert await resource.applied() == Position(3)


async def test_a_gap_keeps_the_prefix_short_until_it_is_filled(resource: Resource) -> None:
    await resource.apply([entry(1), entry(3), entry(4)])
    assert await resource.applied() == Position(1, frozenset({3, 4}))

    await resource.apply([entry(2)])
    assert await resource.applied() == Position(4)


async def test_an_epoch_beyond_the_prefix_joins_it_when_the_log_has_caught_up(
    resource: Resource, database: Database
) -> None:
    await resource.prepare(epoch(3, member("t3", balance(1, 1))))
    await resource.commit(attempt(3))
    assert await resource.applied() == Position(0, frozenset({3}))

    await resource.apply([entry(n, member(f"t{n}", balance(2, 1))) for n in (1, 2)])

    assert await resource.applied() == Position(3)
    assert await database.sql("select bal from acct order by id") == [(101,), (102,), (100,)]


@pytest.mark.parametrize("committed", [True, False])
async def test_what_the_log_says_of_a_number_takes_the_place_of_its_promise(
    resource: Resource, database: Database, committed: bool
) -> None:
    """A replica that missed the decision hears of it from the log: the promise must not happen on top of it."""
    work = member("t1", balance(1, 1))
    await resource.prepare(epoch(1, work))

    result = await resource.apply([entry(1, work) if committed else entry(1)])

    assert (result.position, result.failed, await resource.recover()) == (1, None, [])
    if committed:
        await resource.commit(attempt(1))  # the decision arrives late
    else:
        await resource.rollback(attempt(1))
    assert await database.sql("select bal from acct where id = 1") == [(101 if committed else 100,)]
    assert await resource.applied() == Position(1)


async def test_entries_do_not_borrow_from_later_ones_even_if_the_reference_may_wait(resource: Resource) -> None:
    child, parent = Insert("pair", {"id": 50, "partner": 51}), Insert("pair", {"id": 51})

    result = await resource.apply([entry(1, member("t1", child)), entry(2, member("t2", parent))])

    assert result.failed is not None
    assert (result.failed.number, result.position) == (1, 0)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1, 12, 30, 0, 1),
        date(2026, 1, 1),
        time(1, 2, tzinfo=UTC),
        timedelta(days=-1, seconds=5),
        Decimal("1.50"),
        UUID(int=5),
        1.5,
    ],
    ids=str,
)
async def test_a_value_is_stored_the_same_whether_or_not_it_came_over_the_wire(
    resource: Resource, database: Database, value: object
) -> None:
    direct = member("t1", Update("acct", {"id": 1}, {"note": value}))
    wired = decode_member(encode_member(member("t2", Update("acct", {"id": 2}, {"note": value}))))

    await resource.apply([entry(1, direct), entry(2, wired)])

    (first,), (second,) = await database.sql("select note from acct where id < 3 order by id")
    assert first is not None
    assert first == second


async def test_entries_out_of_order_are_a_bug(resource: Resource) -> None:
    with pytest.raises(InvariantBroken):
        await resource.apply([entry(2), entry(1)])


async def test_a_failing_entry_is_named_and_everything_before_it_is_kept(
    resource: Resource, database: Database
) -> None:
    result = await resource.apply(
        [
            entry(1, member("t1", balance(1, 1))),
            entry(2, member("t2", balance(1, 1)), member("t3", balance(1, 1), balance(2, -1000))),
            entry(3, member("t4", balance(1, 1))),
        ]
    )

    assert result.position == 1
    assert result.failed is not None
    assert (result.failed.number, result.failed.tx, result.failed.reason.why) == (2, "t3", Why.CONSTRAINT)
    assert await database.sql("select bal from acct order by id") == [(101,), (100,), (100,)]


async def test_after_a_failed_entry_was_made_void_the_rest_follows(resource: Resource) -> None:
    entries = [entry(1, member("t1", balance(2, -1000))), entry(2, member("t2", balance(2, 1)))]
    assert (await resource.apply(entries)).failed is not None

    result = await resource.apply([entry(1), entries[1]])

    assert (result.position, result.failed) == (2, None)


async def test_many_entries_of_every_kind_end_like_one_by_one(resource: Resource, database: Database) -> None:
    entries = []
    for number in range(1, 401, 4):
        row = 100 + number
        entries += [
            entry(number, member(f"a{number}", Insert("acct", {"id": row, "bal": number}))),
            entry(
                number + 1,
                member(f"b{number}", balance(row, 1), Insert("transfer", {"id": row, "acct": row, "amount": 1})),
            ),
            entry(number + 2, member(f"c{number}", Upsert("acct", {"id": row}, {"bal": 7, "note": "n"}))),
            entry(number + 3, member(f"d{number}", Delete("transfer", {"id": row}), balance(row, 1))),
        ]

    result = await resource.apply(entries, durable=False)

    assert (result.position, result.failed) == (400, None)
    assert await database.sql("select count(*), sum(bal) from acct where id > 100") == [(100, 800)]
    assert await database.sql("select count(*) from transfer") == [(0,)]


async def test_the_position_survives_the_agent_and_compaction(resource: Resource, database: Database) -> None:
    await resource.apply([entry(n, member(f"t{n}", balance(1, 1))) for n in range(1, 11)])
    await resource.prepare(epoch(11, member("t11", balance(1, 1))))
    await resource.commit(attempt(11))
    await resource.compact()
    await resource.close()

    successor = database.open()
    await successor.start()

    assert await successor.applied() == Position(11)
    await successor.apply([entry(11, member("t11", balance(1, 1)))])
    assert await database.sql("select bal from acct where id = 1") == [(111,)]
    await successor.close()


async def test_compaction_keeps_what_is_beyond_a_gap(resource: Resource) -> None:
    await resource.apply([entry(1), entry(2), entry(5)])

    await resource.compact()
    await resource.compact()

    assert await resource.applied() == Position(2, frozenset({5}))


# -- versions and idempotency keys


async def test_the_version_of_a_row_is_the_number_that_last_changed_it(database: Database) -> None:
    resource = database.open(versioned=["acct"])
    await resource.start()
    await resource.apply([entry(4, member("t1", balance(1, 1))), entry(5, member("t2", balance(1, 1), balance(2, 1)))])

    assert [await resource.version("acct", {"id": row}) for row in (1, 2, 3)] == [5, 5, 0]
    await resource.close()


async def test_a_writer_that_saw_an_older_row_is_excluded(database: Database) -> None:
    resource = database.open(versioned=["acct"])
    await resource.start()
    await resource.apply([entry(1, member("t1", balance(1, 1)))])

    def seen(version: int) -> Update:
        return Update("acct", {"id": 1}, add={"bal": 10}, expect_version=version)

    answer = await resource.prepare(
        epoch(2, member("t2", seen(0)), member("t3", seen(1)), member("t4", seen(1)), member("t5", seen(2)))
    )
    await resource.commit(answer.attempt)

    assert [vote.excluded.why if vote.excluded else None for vote in answer.votes] == [
        Why.VERSION,
        None,
        Why.VERSION,
        None,
    ]
    assert await database.sql("select bal from acct where id = 1") == [(121,)]
    await resource.close()


async def test_a_rolled_back_epoch_leaves_versions_and_keys_as_they_were(database: Database) -> None:
    resource = database.open(versioned=["acct"])
    await resource.start()
    await resource.apply([entry(1, member("t1", balance(1, 1)))])

    await resource.prepare(epoch(2, member("t2", balance(1, 1), key="k")))
    await resource.rollback(attempt(2))
    answer = await resource.prepare(
        epoch(3, member("t3", Update("acct", {"id": 1}, add={"bal": 1}, expect_version=1), key="k"))
    )

    assert answer.votes[0].excluded is None
    await resource.rollback(attempt(3))
    await resource.close()


async def test_the_same_key_again_gets_the_first_outcome(resource: Resource, database: Database) -> None:
    await resource.apply([entry(1, member("t1", balance(1, 1), key="k"))])

    answer = await resource.prepare(epoch(2, member("t2", balance(1, 1), key="k"), member("t3", balance(2, 1))))
    await resource.commit(answer.attempt)

    duplicate = answer.votes[0].excluded
    assert duplicate is not None
    assert (duplicate.why, duplicate.first_tx, duplicate.first_number) == (Why.DUPLICATE, "t1", 1)
    assert answer.votes[1].excluded is None
    assert await database.sql("select bal from acct order by id") == [(101,), (101,), (100,)]


async def test_the_same_key_with_other_content_is_refused(resource: Resource) -> None:
    await resource.apply([entry(1, member("t1", balance(1, 1), key="k"))])

    answer = await resource.prepare(epoch(2, member("t2", balance(1, 2), key="k")))

    assert answer.votes[0].excluded is not None
    assert answer.votes[0].excluded.why is Why.KEY_REUSED


async def test_the_same_key_twice_in_one_epoch_counts_once(resource: Resource, database: Database) -> None:
    answer = await resource.prepare(
        epoch(1, member("t1", balance(1, 1), key="k"), member("t2", balance(1, 1), key="k"))
    )
    await resource.commit(answer.attempt)

    assert [vote.excluded is None for vote in answer.votes] == [True, False]
    assert await database.sql("select bal from acct where id = 1") == [(101,)]


async def test_a_key_lives_as_long_as_the_logs_own_clock_says(resource: Resource) -> None:
    await resource.apply([entry(1, member("t1", balance(1, 1), key="k", ttl_s=60), at_ms=1_000_000)])

    alive = await resource.prepare(epoch(2, member("t2", balance(1, 1), key="k"), at_ms=1_059_999))
    await resource.rollback(attempt(2))
    over = await resource.prepare(epoch(2, member("t2", balance(1, 2), key="k"), of=attempt(2, 1), at_ms=1_060_000))

    assert alive.votes[0].excluded is not None
    assert over.votes[0].excluded is None


async def test_a_transaction_known_by_its_id_is_written_once_whoever_brings_it(
    resource: Resource, database: Database
) -> None:
    table = "tops.idempotency_keys" if not resource.compensatable else "tops_idempotency_keys"
    first, second, third = (known_by_id(member("", balance(n, 1)), TxId(f"c.1.{n}")) for n in (1, 2, 3))
    keyed = member("c.1.4", balance(3, 1), key="k")
    await resource.write_all_local([first, second])

    votes = await resource.write_all_local([third, first, keyed])
    again = await resource.apply([entry(1, first, second, third), entry(2, keyed)])

    assert [vote.excluded.why if vote.excluded else None for vote in votes] == [None, Why.DUPLICATE, None]
    assert (again.position, again.failed) == (2, None)
    assert await database.sql("select bal from acct order by id") == [(101,), (101,), (102,)]
    found = await database.sql(f"select key, tx, number from {table} order by tx")
    assert found == [("tx:c.1.1", "c.1.1", 0), ("tx:c.1.2", "c.1.2", 0), ("tx:c.1.3", "c.1.3", 0), ("k", "c.1.4", 0)]
    published = [one for record in await resource.unpublished() for one in record.members]
    assert published == [first, second, third, keyed]


async def test_a_local_write_that_is_too_long_to_be_published_leaves_nothing(
    resource: Resource, database: Database
) -> None:
    long = known_by_id(member("", *[balance(1, 1)] * 200_000), TxId("c.1.1"))
    first, second = (known_by_id(member("", balance(n, 1)), TxId(f"c.1.{n}")) for n in (2, 3))
    assert len(encode_member(long)) > LOCAL_TX_BYTES_MAX

    votes = await resource.write_all_local([first, long, second])
    repeated = await resource.write_all_local([msgspec.structs.replace(long, tx=TxId("c.1.2"))])

    assert [vote.excluded.why if vote.excluded else None for vote in votes] == [None, Why.TOO_LARGE, None]
    assert [vote.excluded.why for vote in repeated if vote.excluded] == [Why.DUPLICATE]
    assert await database.sql("select bal from acct order by id") == [(100,), (101,), (101,)]
    published = [one for record in await resource.unpublished() for one in record.members]
    assert published == [first, second]


async def test_keys_whose_time_is_over_are_forgotten_by_compaction(resource: Resource, database: Database) -> None:
    table = "tops.idempotency_keys" if not resource.compensatable else "tops_idempotency_keys"
    await resource.prepare(epoch(1, member("t1", balance(1, 1), key="short", ttl_s=1), member("t2", key="long")))
    await resource.commit(attempt(1))
    await resource.prepare(epoch(2, member("t3", balance(1, 1)), at_ms=1_002_000))
    await resource.commit(attempt(2))

    await resource.compact()
    kept = await database.sql(f"select key from {table} order by key")
    await resource.apply([entry(3, member("t4", balance(1, 1)), at_ms=1_002_000 + KEPT_BEYOND_MS)])
    await resource.compact()

    assert kept == [("long",), ("short",)], "an entry with an earlier clock may follow"
    assert await database.sql(f"select key from {table}") == [("long",)]


async def test_a_local_write_leaves_versions_as_they_are(database: Database) -> None:
    resource = database.open(versioned=["acct"])
    await resource.start()
    await resource.apply([entry(1, member("t1", balance(1, 1)))])

    await resource.write_local(member("t2", balance(1, 1)))

    assert await resource.version("acct", {"id": 1}) == 1
    await resource.close()


async def test_a_repeated_transaction_in_the_log_is_applied_once(resource: Resource, database: Database) -> None:
    result = await resource.apply(
        [entry(1, member("t1", balance(1, 1), key="k")), entry(2, member("t2", balance(1, 1), key="k"))]
    )

    assert (result.position, result.failed) == (2, None)
    assert await database.sql("select bal from acct where id = 1") == [(101,)]


# -- changes that say how they meet the row


async def test_what_an_upsert_adds_a_new_row_begins_with(resource: Resource, database: Database) -> None:
    new = Upsert("acct", {"id": 9}, {"note": "new"}, add={"bal": 5})
    members = [member("t1", new), member("t2", new), member("t3", Upsert("acct", {"id": 1}, add={"bal": 5}))]

    result = await resource.apply([entry(number, one) for number, one in enumerate(members, 1)])

    assert (result.position, result.failed) == (3, None)
    assert await database.sql("select id, bal from acct where id in (1, 9) order by id") == [(1, 105), (9, 10)]


async def test_an_update_whose_row_must_exist_fails_alone_if_it_does_not(
    resource: Resource, database: Database
) -> None:
    missing = Update("acct", {"id": 99}, add={"bal": 1}, must_exist=True)
    there = Update("acct", {"id": 1}, add={"bal": 1}, must_exist=True)

    votes = await resource.write_all_local([member("t1", there), member("t2", balance(2, 1), missing)])
    result = await resource.apply([entry(1, member("t3", there)), entry(2, member("t4", balance(2, 1), missing))])

    assert votes[0].rows == (1,)
    assert votes[1].excluded is not None and votes[1].excluded.why is Why.VERSION
    assert result.position == 1
    assert result.failed is not None and result.failed.reason.why is Why.VERSION
    assert await database.sql("select bal from acct where id in (1, 2) order by id") == [(102,), (100,)]


async def test_members_that_do_alike_do_what_they_would_one_by_one(resource: Resource, database: Database) -> None:
    await database.sql("create table plain (id int primary key, n int not null)")
    await database.sql("create table tally (name text, part text, n int not null, last int, primary key (name, part))")
    await database.sql("insert into plain values (0, 0), (1, 0), (2, 0)")

    def alike(n: int) -> tuple[Change, ...]:
        counted = Upsert("tally", {"name": "x", "part": str(n % 4)}, {"last": n}, add={"n": 1})
        return Update("plain", {"id": n % 3}, add={"n": n}), counted

    result = await resource.apply([entry(n, member(f"t{n}", *alike(n))) for n in range(1, 21)])

    assert (result.position, result.failed) == (20, None)
    assert await database.sql("select n from plain order by id") == [(63,), (70,), (77,)]
    assert await database.sql("select n, last from tally order by part") == [(5, 20), (5, 17), (5, 18), (5, 19)]


# -- local writes


async def test_a_local_write_and_its_record_are_one(resource: Resource, database: Database) -> None:
    written = member("t1", balance(1, 1), Statement("update acct set note = $1 where id = $2", ("x", 2)))

    vote = await resource.write_local(written)
    (record,) = await resource.unpublished()

    assert vote.rows == (1, 1)
    assert record.members == [written]
    assert await database.sql("select bal from acct where id = 1") == [(101,)]


async def test_a_refused_local_write_leaves_neither_data_nor_record(resource: Resource, database: Database) -> None:
    with pytest.raises(MemberRejected, match="t1") as rejected:
        await resource.write_local(member("t1", balance(1, 1), balance(2, -1000)))

    assert rejected.value.sqlstate == "23514"
    assert await resource.unpublished() == []
    assert await database.sql("select bal from acct where id = 1") == [(100,)]


async def test_concurrent_local_writes_all_count_and_failing_ones_fail_alone(
    resource: Resource, database: Database
) -> None:
    members = [member(f"t{n}", balance(1, 1) if n % 10 else balance(2, -1000)) for n in range(200)]

    results = await asyncio.gather(*(resource.write_local(one) for one in members), return_exceptions=True)

    rejected = [result for result in results if isinstance(result, MemberRejected)]
    assert len(rejected) == 20
    assert await database.sql("select bal from acct order by id") == [(280,), (100,), (100,)]
    assert sum(len(record.members) for record in await resource.unpublished()) == 180


async def test_records_come_in_order_until_they_are_marked(resource: Resource) -> None:
    for n in range(5):
        await resource.write_local(member(f"t{n}", balance(1, 1)))
    first = await resource.unpublished(limit=3)

    await resource.mark_published(first[-1].id)
    rest = await resource.unpublished()

    assert [one.tx for record in first + rest for one in record.members] == ["t0", "t1", "t2", "t3", "t4"]
    assert (await resource.health()).unpublished == 2


# -- reads


async def test_a_read_returns_rows_with_the_position_of_its_snapshot(resource: Resource) -> None:
    await resource.apply([entry(1, member("t1", balance(1, 5)))])

    result = await resource.read("select id, bal from acct where id = $1", (1,), with_position=True)

    assert result.rows == [{"id": 1, "bal": 105}]
    assert result.position == Position(1)


@pytest.mark.parametrize("sql", ["update acct set bal = 0", "delete from acct", "commit", ""])
async def test_a_read_cannot_write(resource: Resource, database: Database, sql: str) -> None:
    with pytest.raises(InvalidChange):
        await resource.read(sql)

    assert await database.sql("select sum(bal) from acct") == [(300,)]


async def test_a_wrong_query_is_told_and_the_next_one_works(resource: Resource) -> None:
    with pytest.raises(ResourceError, match="nosuch"):
        await resource.read("select nosuch from acct")

    assert (await resource.read("select count(*) as n from acct")).rows == [{"n": 3}]


async def test_a_snapshot_stays_as_it_was_while_the_log_goes_on(resource: Resource) -> None:
    await resource.apply([entry(1, member("t1", balance(1, 5)))])

    async with resource.snapshot() as snapshot:
        await resource.apply([entry(2, member("t2", balance(1, 5), Insert("acct", {"id": 9, "bal": 9})))])
        chunks = [chunk async for chunk in snapshot.rows("acct", chunk=2)]

    assert snapshot.position == Position(1)
    assert [len(chunk) for chunk in chunks] == [2, 1]
    assert [row["bal"] for chunk in chunks for row in chunk] == [105, 100, 100]


async def test_others_read_a_shared_snapshot_as_it_was_until_it_is_closed(
    resource: Resource, database: Database
) -> None:
    query = "select bal from acct where id = 1"
    async with resource.snapshot() as snapshot:
        shared = await snapshot.share()
        await resource.apply([entry(1, member("t1", balance(1, 5)))])

        assert await database.shared_sql(shared, query) == [(100,)]
        assert await database.sql(query) == [(105,)]

    with pytest.raises((asyncpg.PostgresError, sqlite3.Error)):
        await database.shared_sql(shared, query)


async def test_what_needs_tables_of_our_own_is_rejected_where_there_can_be_none(resource: Resource) -> None:
    if resource.has_own_schema:
        await resource.run_own_script("create table tops.made_for_a_test (id int primary key)")
        forget = "delete from tops.made_for_a_test where $1::text is not null"
        vote = await resource.apply_quarantined(member("t1", balance(1, 5)), forget)
        assert (vote.excluded, vote.rows) == (None, (1,))
        return
    with pytest.raises(ConfigError, match="SQLite"):
        await resource.run_own_script("create table made_for_a_test (id int primary key)")
    with pytest.raises(ConfigError, match="SQLite"):
        await resource.apply_quarantined(member("t1", balance(1, 5)), "delete from made_for_a_test")


async def test_a_snapshot_goes_into_another_set_as_it_came_out(resource: Resource, database: Database) -> None:
    await database.sql("create table copy (id int primary key, bal bigint not null, email text, note text)")

    async with resource.snapshot() as snapshot:
        rows = [row async for chunk in snapshot.rows("acct") for row in chunk]
    await resource.apply([entry(n, member(f"t{n}", Insert("copy", row))) for n, row in enumerate(rows, 1)])

    assert await database.sql("select * from copy order by id") == await database.sql("select * from acct order by id")


# -- agents


async def test_a_new_agent_takes_over_and_the_old_one_can_do_nothing_any_more(
    resource: Resource, database: Database
) -> None:
    await resource.prepare(epoch(1, member("t1", balance(1, 1))))

    successor = database.open()
    await successor.start()
    with pytest.raises(TopsError):
        await resource.commit(attempt(1))
    with pytest.raises(AgentReplaced):
        await resource.apply([entry(2, member("t2", balance(1, 1)))])

    assert [doubt.attempt for doubt in await successor.recover()] == [attempt(1)]
    await successor.rollback(attempt(1))
    assert await database.sql("select bal from acct where id = 1") == [(100,)]
    await successor.close()


async def test_a_cancelled_caller_does_not_stop_the_work(resource: Resource, database: Database) -> None:
    await resource.prepare(epoch(1, member("t1", balance(1, 1))))

    commit = asyncio.create_task(resource.commit(attempt(1)))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit

    await resource.commit(attempt(1))
    assert await resource.applied() == Position(1)
    assert await database.sql("select bal from acct where id = 1") == [(101,)]
