"""Statements that can't be shipped are executed once, and all replicas end with the same rows, under every policy."""

from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from replication import ReplicaSet
from replication.refusals import WriteRefused
from tests.integration.origin.policies import POLICIES
from tests.integration.replication.clusters import eventually, rows_everywhere
from tests.integration.replication.inprocess import small_cluster

SCHEMA = """
create table orders (
    id uuid primary key default gen_random_uuid(), at timestamptz not null default now(), customer int not null,
    amount numeric(10, 2) not null check (amount > 0), note text unique);
create table counters (id int primary key, n bigint not null default 0, touched timestamptz);
insert into counters select g, 0, null from generate_series(1, 10) as g;
"""


async def all_equal(shop: ReplicaSet, sql: str) -> list[tuple[object, ...]]:
    """The rows, once they are the same at every replica."""
    found: dict[str, list[tuple[object, ...]]] = {}

    async def same() -> bool:
        found.update(await rows_everywhere(shop, sql))
        return len({repr(rows) for rows in found.values()}) == 1

    await eventually(same, what=f"equal rows: {found}")
    return next(iter(found.values()))


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_statement_with_a_clock_ends_the_same_everywhere(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        done = await shop.execute(
            "insert into orders (id, customer, amount) values (gen_random_uuid(), $1, $2) returning id, amount",
            1,
            "9.99",
        )
        updated = await shop.execute("update counters set n = n + 1, touched = clock_timestamp() where id <= 3")

        assert done.rows == (1,)
        ((row,),) = done.returned
        assert str(row["amount"]) == "9.99"
        assert updated.rows == (3,)
        assert [r[0] for r in await all_equal(shop, "select id from orders")] == [row["id"]]
        touched = await all_equal(shop, "select id, n, touched from counters order by id")
        assert [r[1] for r in touched] == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


async def test_a_constraint_is_told_as_postgresql_tells_it(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, POLICIES["write-all"], schema=SCHEMA) as cluster,
        cluster.connect() as shop,
    ):
        with pytest.raises(WriteRefused) as refused:
            await shop.execute("insert into orders (id, customer, amount) values (gen_random_uuid(), 1, -1)")

        assert (refused.value.why, refused.value.sqlstate) == ("constraint", "23514")
        assert refused.value.database is not None
        assert refused.value.database.constraint == "orders_amount_check"
        assert "violates check constraint" in refused.value.database.message
