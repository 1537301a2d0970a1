"""Every adapter: a transaction that is known by its own id is carried out once, whoever brings it and however often."""

import random
import time

import msgspec
import pytest

from adapters.changes import Member, Update, content_digest, known_by_id, own_key
from adapters.resource import Resource, Why
from tests.contract.harness import Database, attempt, entry, epoch, member, numbered, settling, told


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
    rejected = numbered(2, row=2)
    broken = Member(rejected.tx, (Update("acct", {"id": 2}, add={"bal": -1000}),))
    votes = await resource.write_all_local([numbered(1), known_by_id(broken, broken.tx), numbered(3)])

    again = await resource.write_all_local([rejected])

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
    parts_of = [msgspec.structs.replace(numbered(n), idempotency_key=own_key(numbered(n).tx)) for n in (1, 2)]
    await resource.write_all_local([parts_of[0], numbered(2)])

    votes = await resource.write_all_local([numbered(1), parts_of[0], parts_of[1], numbered(2), settling(1)])

    assert told(list(votes)) == [Why.DUPLICATE] * 4 + [Why.KEY_REUSED]
    assert await database.sql("select bal from acct where id = 1") == [(102,)]


class Model:
    """What a resource should say of members, and hold afterwards: a dictionary of keys and a sum."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.balance = 100

    def vote(self, one: Member) -> Why | None:
        if one.key in self.known:
            return Why.DUPLICATE if self.known[one.key] == content_digest(one) else Why.KEY_REUSED
        if OVERDRAWN in one.changes:
            return Why.CONSTRAINT
        self.known[one.key] = content_digest(one)
        self.balance += len(one.changes)
        return None

    def apply(self, members: list[Member]) -> Why | None:
        """All of an entry or nothing; why, if nothing."""
        before = dict(self.known), self.balance
        failed = next((why for one in members if (why := self.vote(one)) not in (None, Why.DUPLICATE)), None)
        if failed is not None:
            self.known, self.balance = before
        return failed


OVERDRAWN = Update("acct", {"id": 1}, add={"bal": -(10**9)})


def any_member(pick: random.Random) -> Member:
    number = pick.randint(1, 150)
    match pick.choice(["own", "own", "own", "settling", "key", "told", "refused"]):
        case "own":
            return numbered(number, pick.choice(["till", "shop"]))
        case "settling":
            return settling(number)
        case "key":
            return member(f"t{pick.random()}", Update("acct", {"id": 1}, add={"bal": 1}), key=f"k{number % 30}")
        case "told":
            return msgspec.structs.replace(numbered(number, "told"), idempotency_key=numbered(number, "told").key)
    rejected = numbered(number, "refused")
    return known_by_id(Member(rejected.tx, (OVERDRAWN,)), rejected.tx)


@pytest.mark.parametrize("seed", range(4))
async def test_random_batches_are_judged_as_a_dictionary_of_keys_would(
    resource: Resource, database: Database, seed: int
) -> None:
    pick, model, position, now_ms = random.Random(seed), Model(), 0, int(time.time() * 1000)
    for _ in range(60):
        batch = [any_member(pick) for _ in range(pick.choice([1, 1, 3, 15]))]
        if pick.random() < 0.5:
            assert told(list(await resource.write_all_local(batch))) == [model.vote(one) for one in batch]
        else:
            applied = await resource.apply([entry(position + 1, *batch, at_ms=now_ms)])
            failed = model.apply(batch)
            assert (applied.failed.reason.why if applied.failed is not None else None) is failed
            position += failed is None
        if pick.random() < 0.2:
            await resource.compact()
    assert await database.sql("select bal from acct where id = 1") == [(model.balance,)]
