"""Every adapter: epochs are promised, kept or dropped, and found again."""

import pytest

from adapters.changes import Change, Delete, Insert, Statement, Update, Upsert
from adapters.resource import Position, Resource, Why
from tests.contract.harness import Database, attempt, entry, epoch, member
from tops.model.errors import PreparedWorkLost, ResourceRejected, StaleAttempt


def balance(row: int, add: int) -> Update:
    return Update("acct", {"id": row}, add={"bal": add})


async def balances(database: Database) -> list[int]:
    return [row[0] for row in await database.sql("select bal from acct order by id")]


async def test_a_committed_epoch_is_in_the_data_and_in_the_position(resource: Resource, database: Database) -> None:
    answer = await resource.prepare(epoch(1, member("t1", balance(1, 5)), member("t2", balance(2, -7))))
    await resource.commit(answer.attempt)

    assert [vote.rows for vote in answer.votes] == [(1,), (1,)]
    assert await balances(database) == [105, 93, 100]
    assert await resource.applied() == Position(1)
    assert await resource.recover() == []


async def test_a_rolled_back_epoch_leaves_no_trace(resource: Resource, database: Database) -> None:
    changes = (
        balance(1, 5),
        Insert("acct", {"id": 9, "bal": 1}),
        Delete("acct", {"id": 3}),
        Upsert("acct", {"id": 2}, {"bal": 0}),
    )
    before = await database.sql("select * from acct order by id")

    answer = await resource.prepare(epoch(1, member("t1", *changes)))
    await resource.rollback(answer.attempt)

    assert await database.sql("select * from acct order by id") == before
    assert await resource.applied() == Position(0)
    assert await resource.recover() == []


async def test_the_answer_names_the_attempt_and_the_digest(resource: Resource) -> None:
    asked = epoch(1, member("t1", balance(1, 1)))

    answer = await resource.prepare(asked)

    assert (answer.attempt, answer.digest, answer.votes[0].tx) == (asked.attempt, asked.digest, "t1")


async def test_members_of_one_row_all_count(resource: Resource, database: Database) -> None:
    answer = await resource.prepare(epoch(1, *(member(f"t{n}", balance(1, 1)) for n in range(10))))
    await resource.commit(answer.attempt)

    assert await balances(database) == [110, 100, 100]
    assert all(vote.rows == (1,) for vote in answer.votes)


async def test_several_changes_of_one_row_in_one_member_all_count(resource: Resource, database: Database) -> None:
    work = member(
        "t1",
        balance(1, 1),
        Update("acct", {"id": 1}, {"note": "a"}),
        balance(1, 1),
        Update("acct", {"id": 1}, {"note": "b"}),
    )
    await resource.prepare(epoch(1, work))
    await resource.commit(attempt(1))

    assert await database.sql("select bal, note from acct where id = 1") == [(102, "b")]


async def test_a_row_may_be_made_changed_and_removed_in_one_epoch(resource: Resource, database: Database) -> None:
    answer = await resource.prepare(
        epoch(
            1,
            member("t1", Insert("acct", {"id": 7, "bal": 1})),
            member("t2", balance(7, 1)),
            member("t3", Delete("acct", {"id": 7})),
            member("t4", Insert("acct", {"id": 7, "bal": 50})),
        )
    )
    await resource.commit(answer.attempt)

    assert [vote.rows for vote in answer.votes] == [(1,), (1,), (1,), (1,)]
    assert await database.sql("select bal from acct where id = 7") == [(50,)]


@pytest.mark.parametrize("change", [balance(99, 1), Delete("acct", {"id": 99})])
async def test_a_change_of_a_missing_row_affects_none_and_is_no_error(
    resource: Resource, change: Update | Delete
) -> None:
    answer = await resource.prepare(epoch(1, member("t1", balance(1, 1)), member("t2", change)))

    assert [(vote.rows, vote.excluded) for vote in answer.votes] == [((1,), None), ((0,), None)]


async def test_a_statement_reports_the_rows_it_affected(resource: Resource) -> None:
    many = Statement("update acct set bal = bal + $1 where id <= $2", (1, 2))
    none = Statement("update acct set bal = bal + $1 where id > $2", (1, 2000))

    answer = await resource.prepare(epoch(1, member("t1", many, balance(1, 1)), member("t2", none)))

    assert [vote.rows for vote in answer.votes] == [(2, 1), (0,)]


async def test_a_statement_that_returns_rows_hands_them_over(resource: Resource) -> None:
    returning = Statement("update acct set bal = bal + $1 where id <= $2 returning id, bal", (1, 2))

    answer = await resource.prepare(epoch(1, member("t1", balance(3, 1), returning)))

    assert answer.votes[0].rows == (1, 2)
    assert sorted(row["bal"] for row in answer.votes[0].returned[1]) == [101, 101]


VIOLATIONS: dict[str, tuple[Change, str]] = {
    "check": (balance(1, -1000), "23514"),
    "unique": (Update("acct", {"id": 1}, {"email": "two"}), "23505"),
    "primary key": (Insert("acct", {"id": 1, "bal": 1}), "23505"),
    "not null": (Insert("acct", {"id": 8, "bal": None}), "23502"),
    "foreign key": (Insert("transfer", {"id": 1, "acct": 99, "amount": 1}), "23503"),
    "deferred foreign key": (Insert("pair", {"id": 1, "partner": 99}), "23503"),
    "in a statement": (Statement("update acct set bal = $1 where id = $2", (-1, 1)), "23514"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_the_member_that_violates_is_named_and_the_others_commit(
    resource: Resource, database: Database, name: str
) -> None:
    change, sqlstate = VIOLATIONS[name]

    answer = await resource.prepare(
        epoch(1, member("t1", balance(2, 1)), member("t2", balance(3, 5), change), member("t3", balance(2, 1)))
    )
    await resource.commit(answer.attempt)

    excluded = [vote.excluded for vote in answer.votes]
    assert excluded[0] is None
    assert excluded[2] is None
    assert excluded[1] is not None
    assert (excluded[1].why, excluded[1].sqlstate) == (Why.CONSTRAINT, sqlstate)
    assert await balances(database) == [100, 102, 100]


async def test_the_reason_of_an_exclusion_is_the_same_each_time(resource: Resource) -> None:
    change = balance(1, -1000)

    first = await resource.prepare(epoch(1, member("t1", change)))
    second = await resource.prepare(epoch(1, member("t1", change), of=attempt(1, attempt=1)))

    assert first.votes[0].excluded == second.votes[0].excluded


async def test_deferred_references_may_be_open_between_changes_of_each_member(
    resource: Resource, database: Database
) -> None:
    def couple(a: int, b: int) -> tuple[Insert, Insert]:
        return Insert("pair", {"id": a, "partner": b}), Insert("pair", {"id": b, "partner": a})

    answer = await resource.prepare(
        epoch(
            1,
            member("t1", *couple(1, 2)),
            member("t2", Insert("pair", {"id": 50, "partner": 51})),
            member("t3", *couple(3, 4)),
        )
    )
    await resource.commit(answer.attempt)

    assert [vote.excluded is None for vote in answer.votes] == [True, False, True]
    assert await database.sql("select id from pair order by id") == [(1,), (2,), (3,), (4,)]


async def test_a_member_does_not_borrow_from_a_later_one(resource: Resource) -> None:
    child = Insert("transfer", {"id": 1, "acct": 77, "amount": 1})
    parent = Insert("acct", {"id": 77, "bal": 0})

    answer = await resource.prepare(epoch(1, member("t1", child), member("t2", parent)))

    assert [vote.excluded is None for vote in answer.votes] == [False, True]


async def test_a_member_does_not_borrow_from_a_later_one_even_if_the_reference_may_wait(
    resource: Resource, database: Database
) -> None:
    child, parent = Insert("pair", {"id": 50, "partner": 51}), Insert("pair", {"id": 51})

    answer = await resource.prepare(epoch(1, member("t1", child), member("t2", parent)))
    await resource.commit(answer.attempt)

    assert [vote.excluded is None for vote in answer.votes] == [False, True]
    assert await database.sql("select id from pair") == [(51,)]


async def test_an_epoch_of_nothing_but_refused_members_can_still_be_decided(resource: Resource) -> None:
    answer = await resource.prepare(epoch(1, member("t1", balance(1, -1000))))
    await resource.commit(answer.attempt)

    assert await resource.applied() == Position(1)


async def test_members_and_epochs_that_write_nothing_are_carried_like_others(resource: Resource) -> None:
    answer = await resource.prepare(epoch(1, member("t1"), member("t2", balance(99, 1))))
    await resource.commit(answer.attempt)
    await resource.commit((await resource.prepare(epoch(2))).attempt)

    assert [vote.rows for vote in answer.votes] == [(), (0,)]
    assert await resource.applied() == Position(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Update("acct", {"id": 1}, {"nosuch": 1}), "nosuch"),
        (Insert("acct", {"id": 5, "bal": 1, "nosuch": 1}), "nosuch"),
        (Insert("nosuch", {"id": 5}), "nosuch"),
        (Insert("nokey", {"a": 5}), "no primary key"),
        (Delete("nokey", {"a": 5}), "no primary key"),
        (Update("acct", {"email": "one"}, {"bal": 5}), "keyed by"),
        (Update("acct", {"id": 1}, {"id": 2}), "part of the key"),
        (Update("acct", {"id": 1}), "update of"),
        (Insert("acct", {"bal": 5}), "key"),
        (Statement("update acct set note = now()"), "now()"),
        (Statement("commit"), "commit"),
        (Statement("update acct set bal = 1; commit"), "one statement"),
        (Update("acct", {"id": 1}, {"bal": 5}, expect_version=1), "version"),
    ],
)
async def test_a_change_that_cannot_be_is_refused_with_what_is_wrong(
    resource: Resource, database: Database, change: Update, words: str
) -> None:
    answer = await resource.prepare(epoch(1, member("t1", balance(2, 1)), member("t2", change)))
    await resource.commit(answer.attempt)

    rejected = answer.votes[1].excluded
    assert rejected is not None
    assert (rejected.why, words in rejected.message) == (Why.INVALID, True), rejected
    assert await balances(database) == [100, 101, 100]


async def test_nonsense_in_a_statement_excludes_its_member_only(resource: Resource, database: Database) -> None:
    answer = await resource.prepare(
        epoch(1, member("t1", Statement("update acct sett bal = 1")), member("t2", balance(1, 1)))
    )
    await resource.commit(answer.attempt)

    assert [vote.excluded is None for vote in answer.votes] == [False, True]
    assert await balances(database) == [101, 100, 100]


async def test_any_identifier_can_be_written(resource: Resource, database: Database) -> None:
    table = '"We""ird ta.ble"'
    key = {"Id": 1, "na me": "x"}
    work = member(
        "t1",
        Insert(table, {**key, "va'lue": "it's"}),
        Upsert(table, {"Id": 2, "na me": 'q"'}, {"va'lue": "\\"}),
        Update(table, key, {"va'lue": "new;--"}),
        Delete(table, {"Id": 2, "na me": 'q"'}),
    )

    await resource.prepare(epoch(1, work))
    await resource.commit(attempt(1))

    assert await database.sql(f"select * from {table}") == [(1, "x", "new;--")]


async def test_commit_and_rollback_may_be_repeated(resource: Resource, database: Database) -> None:
    await resource.prepare(epoch(1, member("t1", balance(1, 1))))
    for _ in range(3):
        await resource.commit(attempt(1))
    await resource.prepare(epoch(2, member("t2", balance(1, 1))))
    for _ in range(3):
        await resource.rollback(attempt(2))

    assert await balances(database) == [101, 100, 100]


async def test_rolling_back_what_was_never_promised_is_done_already(resource: Resource) -> None:
    await resource.rollback(attempt(7))

    assert await resource.applied() == Position(0)


async def test_committing_what_was_never_promised_is_an_alarm(resource: Resource) -> None:
    with pytest.raises(PreparedWorkLost, match="number 7"):
        await resource.commit(attempt(7))


async def test_committing_what_the_log_brought_meanwhile_is_done_already(resource: Resource) -> None:
    await resource.apply([entry(1, member("t1", balance(1, 1)))])

    await resource.commit(attempt(1))

    assert await resource.applied() == Position(1)


async def test_a_new_attempt_takes_the_place_of_the_old_one(resource: Resource, database: Database) -> None:
    await resource.prepare(epoch(1, member("t1", balance(1, 1)), member("t2", balance(2, 1))))
    await resource.prepare(epoch(1, member("t2", balance(2, 1)), of=attempt(1, attempt=1)))

    assert [doubt.attempt for doubt in await resource.recover()] == [attempt(1, attempt=1)]
    await resource.commit(attempt(1, attempt=1))
    assert await balances(database) == [100, 101, 100]


async def test_a_new_life_of_the_coordinator_takes_the_place_of_the_old_one(resource: Resource) -> None:
    await resource.prepare(epoch(1, member("t1", balance(1, 1)), of=attempt(1, attempt=4, incarnation=1)))
    await resource.prepare(epoch(1, member("t1", balance(1, 1)), of=attempt(1, attempt=0, incarnation=2)))

    assert [doubt.attempt.incarnation for doubt in await resource.recover()] == [2]


async def test_a_late_older_attempt_changes_nothing(resource: Resource) -> None:
    await resource.prepare(epoch(1, member("t1", balance(1, 1)), of=attempt(1, attempt=2)))

    with pytest.raises(StaleAttempt):
        await resource.prepare(epoch(1, member("t1", balance(1, 1)), of=attempt(1, attempt=1)))
    with pytest.raises(PreparedWorkLost):
        await resource.commit(attempt(1, attempt=1))
    await resource.rollback(attempt(1, attempt=1))

    assert [doubt.attempt.attempt for doubt in await resource.recover()] == [2]


async def test_a_repeated_prepare_gets_the_same_answer_and_does_nothing_twice(
    resource: Resource, database: Database
) -> None:
    asked = epoch(1, member("t1", balance(1, 1)))

    assert await resource.prepare(asked) == await resource.prepare(asked)
    await resource.commit(asked.attempt)

    assert await balances(database) == [101, 100, 100]


async def test_a_prepare_that_arrives_after_the_commit_is_refused(resource: Resource, database: Database) -> None:
    asked = epoch(1, member("t1", balance(1, 1)))
    await resource.prepare(asked)
    await resource.commit(asked.attempt)

    with pytest.raises(StaleAttempt, match="applied already"):
        await resource.prepare(asked)

    assert await balances(database) == [101, 100, 100]


async def test_a_promise_survives_its_agent(resource: Resource, database: Database) -> None:
    asked = epoch(1, member("t1", balance(1, 1)))
    await resource.prepare(asked)
    await resource.close()

    successor = database.open()
    await successor.start()
    doubts = await successor.recover()
    with pytest.raises(StaleAttempt):  # its votes went with the old agent; the promise stands
        await successor.prepare(asked)
    await successor.commit(asked.attempt)

    assert [doubt.attempt for doubt in doubts] == [asked.attempt]
    assert doubts[0].age_s >= 0
    assert await balances(database) == [101, 100, 100]
    assert await successor.applied() == Position(1)
    await successor.close()


async def test_a_successor_can_drop_the_promise_too(resource: Resource, database: Database) -> None:
    await resource.prepare(epoch(1, member("t1", balance(1, 1), Delete("acct", {"id": 3}))))
    await resource.close()

    successor = database.open()
    await successor.start()
    await successor.rollback(attempt(1))

    assert await balances(database) == [100, 100, 100]
    assert await successor.recover() == []
    await successor.close()


async def test_names_with_any_characters_come_back_from_recovery(database: Database) -> None:
    odd = attempt(1, coordinator="b:1 'quoted' \N{SNOWMAN}%")
    resource = database.open(replica_set="sh:op 'x'")
    await resource.start()

    await resource.prepare(epoch(1, member("t1", balance(1, 1)), of=odd))

    assert [doubt.attempt for doubt in await resource.recover()] == [odd]
    await resource.rollback(odd)
    await resource.close()


async def test_sets_in_one_database_know_nothing_of_each_other(resource: Resource, database: Database) -> None:
    other = database.open(replica_set="other")
    await other.start()
    await resource.prepare(epoch(1, member("t1", balance(1, 1))))
    await resource.commit(attempt(1))

    assert await other.applied() == Position(0)
    assert await other.recover() == []
    await other.close()


async def test_health_counts_promises_and_the_way_behind(resource: Resource) -> None:
    await resource.apply([entry(1, member("t1", balance(1, 1)))])
    await resource.prepare(epoch(2, member("t2", balance(2, 1))))

    health = await resource.health(head=10)

    assert (health.position, health.prepared, health.lag) == (Position(1), 1, 9)
    assert health.oldest_prepared_s >= 0


async def test_a_second_epoch_does_not_see_half_of_the_first(resource: Resource, database: Database) -> None:
    """Either it waits for the decision and is refused, or it is prepared beside it; the outcome is that of both."""
    await resource.prepare(epoch(1, member("t1", balance(1, 1))))
    try:
        await resource.prepare(epoch(2, member("t2", balance(2, 1))))
    except ResourceRejected:
        await resource.commit(attempt(1))
        await resource.prepare(epoch(2, member("t2", balance(2, 1))))
    else:
        await resource.commit(attempt(1))
    await resource.commit(attempt(2))

    assert await balances(database) == [101, 101, 100]
    assert await resource.applied() == Position(2)
