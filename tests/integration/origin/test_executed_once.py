"""Statements that can't be shipped are executed once, and all replicas end with the same rows, under every policy."""

from pathlib import Path

import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Insert, Upsert
from replication import ReplicaSet
from replication.rpc.rejections import WriteRejected
from tests.integration.origin.policies import POLICIES
from tests.integration.replication.clusters import rows_everywhere
from tests.integration.replication.inprocess import small_cluster
from tests.support.polling import eventually

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
        with pytest.raises(WriteRejected) as rejected:
            await shop.execute("insert into orders (id, customer, amount) values (gen_random_uuid(), 1, -1)")

        assert (rejected.value.why, rejected.value.sqlstate) == ("constraint", "23514")
        assert rejected.value.database is not None
        assert rejected.value.database.constraint == "orders_amount_check"
        assert "violates check constraint" in rejected.value.database.message


async def test_a_parameter_may_name_a_time_by_the_clock(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, POLICIES["write-all"], schema=SCHEMA) as cluster,
        cluster.connect() as shop,
    ):
        for told in ("now", "today 10:00", "2026-01-01 10:00 Europe/Berlin"):
            done = await shop.execute("update counters set touched = $1 where id = 1 returning touched", told)
            (row,) = done.returned[0]

            assert await all_equal(shop, "select touched from counters where id = 1") == [(row["touched"],)]


FEATURES = """
create table serials (id serial primary key, at timestamptz not null default clock_timestamp(), what text);
create table parents (id int primary key, children int not null default 0);
create table children (id int primary key, parent int references parents on delete cascade, at timestamptz);
create table audit (id bigint generated always as identity primary key, what text, at timestamptz default now());
create function log_child() returns trigger language plpgsql as $$ begin
    insert into audit (what) values (tg_op || coalesce(new.id, old.id));
    if tg_op = 'INSERT' then update parents set children = children + 1 where id = new.parent; end if;
    return null; end $$;
create trigger logged after insert or update or delete on children for each row execute function log_child();
insert into parents values (1), (2);
"""


@pytest.mark.parametrize("policy", POLICIES)
async def test_triggers_cascades_and_sequences_end_the_same_everywhere(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=FEATURES) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        drawn = await shop.execute("insert into serials (what) values ('a'), ('b') returning id")
        await shop.execute("insert into children values (1, 1, now()), (2, 1, null), (3, 2, null)")
        await shop.execute("update children set at = clock_timestamp() where parent = 2")
        gone = await shop.execute("delete from parents where id = 1")

        assert drawn.returned == (({"id": 1}, {"id": 2}),)
        assert gone.rows == (1,)
        assert len(await all_equal(shop, "select * from serials order by id")) == 2
        assert await all_equal(shop, "select id, children from parents") == [(2, 1)]
        assert len(await all_equal(shop, "select * from children")) == 1
        audit = await all_equal(shop, "select id, what, at from audit order by id")
        assert [row[1] for row in audit] == ["INSERT1", "INSERT2", "INSERT3", "UPDATE3", "DELETE1", "DELETE2"]
        values = {name: await cluster.sql(name, "select last_value from serials_id_seq") for name in cluster.databases}
        raised = {rows[0][0] for rows in values.values()}
        assert raised == ({1, 2} if policy == "peer-to-peer" else {2}), "peers draw from blocks of their own"


RULES = """
create table ruled (id int primary key, v int);
create table noted (id bigserial primary key, what text);
create rule note as on update to ruled do also insert into noted (what) values ('updated ' || old.id);
create rule keep as on delete to ruled do instead update ruled set v = -1 where id = old.id;
insert into ruled values (1, 1), (2, 2);
"""


@pytest.mark.parametrize("policy", ["write-all", "primary-site", "peer-to-peer", "serializable"])
async def test_what_rules_did_at_the_origin_is_applied_without_them(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=RULES) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await shop.execute("update ruled set v = v + 10 where id = 1")
        await shop.execute("delete from ruled where id = 2")

        assert await all_equal(shop, "select id, v from ruled order by id") == [(1, 11), (2, -1)]
        assert [row[0] for row in await all_equal(shop, "select what from noted order by id")] == [
            "updated 1",
            "updated 2",
        ]


@pytest.mark.parametrize("policy", ["write-all", "primary-site", "peer-to-peer", "serializable"])
async def test_a_row_change_that_a_rule_forbids_is_rejected_with_what_to_do(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    rule = "create rule more as on insert to ruled do also insert into noted (what) values ('inserted ' || new.id)"
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=f"{RULES}; {rule}") as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        told = r"table 'ruled' has a rule .* send the change as a statement, or drop the rule"
        for change in (Insert("ruled", {"id": 3, "v": 3}), Upsert("ruled", {"id": 3}, {"v": 3})):
            with pytest.raises(WriteRejected, match=told) as rejected:
                await shop.write([change])
            assert rejected.value.sqlstate == "0A000"

        await shop.execute("insert into ruled values (3, 3)")

        assert await all_equal(shop, "select id from ruled order by id") == [(1,), (2,), (3,)]
        assert await all_equal(shop, "select what from noted") == [("inserted 3",)]


async def test_a_table_with_an_odd_name_keeps_no_replica_from_executing(server: EmbeddedPostgres, folder: Path) -> None:
    odd = SCHEMA + """create table "Odd ""na.me" ("Id" int primary key, "a b" timestamptz);"""
    async with small_cluster(server, folder, POLICIES["write-all"], schema=odd) as cluster, cluster.connect() as shop:
        await shop.execute("""insert into "Odd ""na.me" values (1, clock_timestamp())""")

        assert len(await all_equal(shop, """select "a b" from "Odd ""na.me" """)) == 1
