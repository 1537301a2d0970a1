"""Every adapter: a transaction that is known by its own id is carried out once, whoever brings it and however often."""

import random
import time

import msgspec

from tests.contract.harness import Database, attempt, entry, epoch
from tops.changes import Member, Update, known_by_id, own_key
from tops.ids import counted_id
from tops.ports import MemberVote, Resource, Why


def numbered(number: int, writer: str = "till", row: int = 1) -> Member:
    changes = (Update("acct", {"id": row}, add={"bal": 1}),)
    tx = counted_id(writer, "life", number, "", "r1")
    return known_by_id(Member(tx, changes), tx)


def settling(number: int) -> Member:
    """What somebody writes who asks what became of that transaction: either it is there, or it can't come any more."""
    tx = counted_id("till", "life", number, "", "r1")
    return Member(tx, (), own_key(tx))


def told(votes: list[MemberVote]) -> list[Why | None]:
    return [vote.excluded.why if vote.excluded is not None else None for vote in votes]


async def test_what_was_written_here_is_known_when_it_comes_again_and_when_the_log_brings_it(
    resource: Resource, database: Database
) -> None:
    many = [numbered(number) for number in range(1, 201)]
    await resource.write_all_local(many[:100])

    again = await resource.write_all_local([many[0], many[62], many[63], many[99], many[100]])
    from_the_log = await resource.apply([entry(1, *many[:101]), entry(2, *many[90:])])

    assert told(list(again)) == [*[Why.DUPLICATE] * 4, None]
    assert (from_the_log.position, from_the_log.failed) == (2, None)
    assert await database.sql("select bal from acct where id = 1") == [(300,)]


async def test_it_is_known_after_a_restart(database: Database) -> None:
    first = database.open()
    await first.start()
    await first.write_all_local([numbered(7)])
    await first.close()

    second = database.open()
    await second.start()
    votes = await second.write_all_local([numbered(6), numbered(7), numbered(8)])
    await second.close()

    assert told(list(votes)) == [None, Why.DUPLICATE, None]


async def test_twice_in_one_batch_it_counts_once(resource: Resource, database: Database) -> None:
    votes = await resource.write_all_local([numbered(1), numbered(2), numbered(1)])
    await resource.apply([entry(1, numbered(3), numbered(3)), entry(2, numbered(3))])

    assert told(list(votes)) == [None, None, Why.DUPLICATE]
    assert await database.sql("select bal from acct where id = 1") == [(103,)]


async def test_the_same_number_of_other_writers_is_something_else(resource: Resource, database: Database) -> None:
    votes = await resource.write_all_local([numbered(1, writer) for writer in ("till", "shop", "till.", "t")])
    other = database.open("other")
    await other.start()
    elsewhere = await other.write_all_local([numbered(1)])
    await other.close()

    assert told([*votes, *elsewhere]) == [None] * 5


async def test_a_member_that_is_refused_is_not_known_afterwards(resource: Resource, database: Database) -> None:
    refused = numbered(2, row=2)
    broken = Member(refused.tx, (Update("acct", {"id": 2}, add={"bal": -1000}),))
    votes = await resource.write_all_local([numbered(1), known_by_id(broken, broken.tx), numbered(3)])

    again = await resource.write_all_local([refused])

    assert told([*votes, *again]) == [None, Why.CONSTRAINT, None, None]
    assert await database.sql("select bal from acct where id in (1, 2) order by id") == [(102,), (101,)]


async def test_a_rolled_back_epoch_leaves_no_id_behind(resource: Resource) -> None:
    await resource.prepare(epoch(1, numbered(1), numbered(2)))
    await resource.rollback(attempt(1))

    answer = await resource.prepare(epoch(1, numbered(1), of=attempt(1, 2)))
    await resource.commit(answer.attempt)

    assert told(list(answer.votes)) == [None]


async def test_whoever_settles_an_outcome_hears_that_it_is_there_or_keeps_it_away(
    resource: Resource, database: Database
) -> None:
    await resource.write_all_local([numbered(1)])

    settled = await resource.write_all_local([settling(1), settling(2), settling(2)])
    too_late = await resource.write_all_local([numbered(2), numbered(3)])
    result = await resource.apply([entry(1, numbered(1), settling(2), numbered(3)), entry(2, numbered(4))])

    assert told(list(settled)) == [Why.KEY_REUSED, None, Why.DUPLICATE]
    assert told(list(too_late)) == [Why.KEY_REUSED, None]
    assert (result.position, result.failed) == (2, None)
    assert await database.sql("select bal from acct where id = 1") == [(103,)]


async def test_an_outcome_that_was_settled_stays_so_until_the_ids_time_is_over(
    resource: Resource, database: Database
) -> None:
    at_ms, day_ms = 1_000_000, 86_400_000
    await resource.apply([entry(1, settling(1), at_ms=at_ms), entry(2, numbered(2), at_ms=at_ms)])
    soon = await resource.apply([entry(3, numbered(2), settling(1), at_ms=at_ms + day_ms - 1)])

    too_late = await resource.apply([entry(4, numbered(1), at_ms=at_ms + day_ms - 1)])
    again = await resource.apply([entry(4, at_ms=at_ms), entry(5, settling(1), numbered(2), at_ms=at_ms + day_ms)])

    assert soon.failed is None and again.failed is None
    assert too_late.failed is not None and too_late.failed.reason.why is Why.KEY_REUSED
    assert await database.sql("select bal from acct where id = 1") == [(102,)], "known for a day, and no longer"


async def test_what_is_over_is_over_whether_it_was_forgotten_or_not(resource: Resource, database: Database) -> None:
    other = database.open("other")
    await other.start()
    at_ms, day_ms = 1_000_000, 86_400_000
    for one in (resource, other):
        await one.apply([entry(1, numbered(1), numbered(2), at_ms=at_ms)])
        if one is other:
            await one.apply([entry(2, at_ms=at_ms + day_ms)])
            await one.compact()
        await one.apply([entry(3, numbered(1), numbered(3), at_ms=at_ms + day_ms)])
        await one.apply([entry(4, numbered(1), numbered(2), at_ms=at_ms + day_ms)])
    await other.close()

    assert await database.sql("select bal from acct where id = 1") == [(100 + 2 * 5,)]


async def test_an_id_whose_key_is_told_is_known_with_or_without_it(resource: Resource, database: Database) -> None:
    told_of = [msgspec.structs.replace(numbered(n), idempotency_key=own_key(numbered(n).tx)) for n in (1, 2)]
    await resource.write_all_local([told_of[0], numbered(2)])

    votes = await resource.write_all_local([numbered(1), told_of[0], told_of[1], numbered(2), settling(1)])

    assert told(list(votes)) == [Why.DUPLICATE] * 4 + [Why.KEY_REUSED]
    assert await database.sql("select bal from acct where id = 1") == [(102,)]


async def test_random_batches_are_what_a_set_of_ids_says(resource: Resource, database: Database) -> None:
    pick, known, written, position = random.Random(7), set[str](), 0, 0
    now_ms = int(time.time() * 1000)
    for _ in range(60):
        batch = [numbered(pick.randint(1, 400), pick.choice(["a", "b"])) for _ in range(pick.choice([1, 3, 20]))]
        new = []
        for one in batch:
            new.append(one.tx not in known)
            known.add(one.tx)
        written += sum(new)
        if pick.random() < 0.5:
            votes = await resource.write_all_local(batch)
            assert told(list(votes)) == [None if fresh else Why.DUPLICATE for fresh in new]
        else:
            position += 1
            assert (await resource.apply([entry(position, *batch, at_ms=now_ms)])).failed is None
    assert await database.sql("select bal from acct where id = 1") == [(100 + written,)]
