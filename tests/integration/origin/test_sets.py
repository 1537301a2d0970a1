"""What a client may rely on when its statements are executed once: no lost update, one outcome per key, true counts."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Member
from replication.replica.origin.repeats import First, Repeats
from replication.rpc.rejections import SerializationFailure, WriteRejected
from tests.integration.origin.policies import POLICIES
from tests.integration.origin.test_executed_once import SCHEMA, all_equal
from tests.integration.replication.inprocess import small_cluster

TOUCH = "update counters set n = n + 1, touched = clock_timestamp() where id = 1 returning n"
COUNT = "select n from counters where id = 1"


@pytest.mark.parametrize("policy", ["write-all", "quorum", "serializable", "primary-site"])
async def test_clients_of_several_origins_lose_no_update(server: EmbeddedPostgres, folder: Path, policy: str) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as two,
    ):

        async def work(shop) -> list[int]:  # type: ignore[no-untyped-def]
            seen = []
            for _ in range(5):
                with suppress(SerializationFailure):
                    seen.append((await shop.execute(TOUCH)).returned[0][0]["n"])
            return seen

        seen = await asyncio.gather(*(work(shop) for shop in (one, one, one, two, two, two)))

        returned = sorted(n for some in seen for n in some)
        assert returned == list(range(1, len(returned) + 1)), "every committed update built on the one before"
        assert len(returned) >= 15
        assert await all_equal(one, COUNT) == [(len(returned),)]


async def test_a_repeated_key_executes_nothing_again(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, POLICIES["write-all"], schema=SCHEMA) as cluster,
        cluster.connect() as shop,
    ):
        first = await shop.execute(TOUCH, idempotency_key="once")
        again = await shop.execute(TOUCH, idempotency_key="once")

        assert again.duplicate
        assert again.tx == first.tx
        assert await all_equal(shop, COUNT) == [(1,)]
        with pytest.raises(WriteRejected, match="key"):
            await shop.execute("update counters set n = random() where id = 1", idempotency_key="once")


async def test_an_outcome_that_was_asked_for_is_the_last_word(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, POLICIES["write-all"], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await shop.execute(TOUCH)
        committed = f"{shop._writer._site.name}.{shop._writer._life}.0000000001@r1"
        late = committed.replace("0001@", "0009@")

        assert await shop.outcome(committed) == "committed"
        assert await shop.outcome(late) == "aborted"


@pytest.mark.parametrize("policy", ["write-all", "serializable", "peer-to-peer"])
async def test_statements_of_a_transaction_tell_rows_and_returned_rows(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        async with shop.transaction() as tx:
            inserted = await tx.execute("insert into orders (customer, amount) values (7, 5) returning id, at")
            await tx.insert("counters", {"id": 50, "n": 1})
            updated = await tx.execute("update counters set n = n + 1, touched = now() where id in (1, 50)")

        assert inserted.rows == 1
        (row,) = inserted.returned
        assert updated.rows == 2
        assert await all_equal(shop, "select id, at from orders") == [(row["id"], row["at"])]
        assert await all_equal(shop, "select n from counters where id = 50") == [(2,)]


async def test_a_row_that_leaves_columns_to_defaults_is_the_same_everywhere(
    server: EmbeddedPostgres, folder: Path
) -> None:
    async with small_cluster(server, folder, POLICIES["quorum"], schema=SCHEMA) as cluster, cluster.connect() as shop:
        async with shop.transaction() as tx:
            await tx.insert("orders", {"customer": 1, "amount": "3.50"})

        assert len(await all_equal(shop, "select id, at, customer, amount from orders")) == 1


async def test_an_execution_sees_what_its_client_has_written_elsewhere(server: EmbeddedPostgres, folder: Path) -> None:
    """Quorum: the origin may be the replica that had not voted yet."""
    async with (
        small_cluster(server, folder, POLICIES["quorum"], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r3") as shop,
    ):
        for number in range(20):
            await shop.execute("insert into counters (id, n) values ($1, 0)", 100 + number)
            done = await shop.execute("update counters set touched = now() where id = $1", 100 + number)
            assert done.rows == (1,), "0 rows would be a lost write"


async def test_notices_reach_the_client(server: EmbeddedPostgres, folder: Path) -> None:
    noisy = (
        SCHEMA
        + """
    create function noisy() returns int language plpgsql volatile as $$ begin raise notice 'hello'; return 1; end $$;"""
    )
    async with small_cluster(server, folder, POLICIES["write-all"], schema=noisy) as cluster, cluster.connect() as shop:
        done = await shop.execute("update counters set n = noisy() where id = 1")

        assert done.notices == ("NOTICE: hello",)


UNIQUE = "create table accounts (id bigint generated always as identity primary key, mail text unique, at timestamptz)"
SIGN_UP = "insert into accounts (mail, at) values ('anna@example.org', clock_timestamp()) returning id"


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_repeated_request_is_a_duplicate_where_executing_it_again_would_fail(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=UNIQUE) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        first = await shop.execute(SIGN_UP, idempotency_key="sign-up")
        again = await shop.execute(SIGN_UP, idempotency_key="sign-up")

        assert (first.duplicate, again.duplicate) == (False, True)
        assert again.returned == ()
        assert len(await all_equal(shop, "select id, mail, at from accounts")) == 1


async def test_a_request_that_is_committed_while_it_is_executed_again_is_a_duplicate(
    server: EmbeddedPostgres, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = "insert into accounts (mail, at) select 'anna@example.org', clock_timestamp() returning id"
    of = Repeats.of
    asked: list[int] = []

    async def once_too_early(repeats: Repeats, members: Sequence[Member]) -> dict[str, First]:
        asked.append(len(members))
        return await of(repeats, members) if len(asked) > 1 else {}

    async with (
        small_cluster(server, folder, POLICIES["write-all"], schema=UNIQUE) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        first = await shop.execute(insert, idempotency_key="sign-up")
        monkeypatch.setattr(Repeats, "of", once_too_early)

        again = await shop.execute(insert, idempotency_key="sign-up")

        assert (again.duplicate, again.tx) == (True, first.tx)
        assert asked == [1, 1], "before it was executed, and after PostgreSQL had rejected it"


@pytest.mark.parametrize("policy", ["write-all", "serializable", "ordered"])
async def test_a_value_that_was_drawn_alone_is_drawn_nowhere_else(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=f"{SCHEMA};create sequence tickets") as cluster,
        cluster.connect(prefer="r1") as one,
        cluster.connect(prefer="r2") as two,
    ):
        drawn = []
        for shop in (one, two, one, two):
            done = await shop.execute("select nextval('tickets') as ticket")
            drawn.append(done.returned[0][0]["ticket"])
            await shop.wait_in_sync()

        assert drawn == sorted(set(drawn))
