"""Inserts whose values are computed ahead: which they are, that rows are those of an execution, and what goes wrong."""

import asyncio
from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres
from adapters.changes import Change, Delete, Insert, Statement, Update
from adapters.postgres.origin import Executed
from replication.rpc.rejections import WriteRejected
from tests.integration.origin.databases import OriginDatabase
from tests.integration.origin.policies import POLICIES
from tests.integration.origin.test_executed_once import all_equal
from tests.integration.replication.inprocess import SmallCluster, small_cluster

SCHEMA = """
create type mood as enum ('glad', 'sad');
create domain short as text check (length(value) < 5);
create domain cut as varchar(3);
create domain seen as timestamptz default '2020-02-02 00:00+00';
create function dice() returns int volatile language sql as 'select 4';
create function is_outlier(n int) returns boolean immutable language sql as 'select n % 2 = 1';
create domain odd as int check (is_outlier(value));
create sequence numbers;
create table orders (id uuid primary key default gen_random_uuid(), at timestamptz not null default now(),
    customer int not null, amount numeric(10, 2) not null default 1.005 check (amount > 0), note varchar(5) unique);
create table serials (id serial primary key, n bigint default nextval('numbers'), what text);
create table identities (id int generated always as identity primary key, v int);
create table many (id int primary key, a int[], b text, c bytea, d jsonb, e double precision, f boolean, g mood,
    h short default 'x', i seen, j interval, k char(4), l date, m bit(3), o int4range, p time);
create table doubled (id int primary key default 3, v int, twice int generated always as (v * 2) stored);
create table called (id int primary key, a int default dice());
create table cuts (id int primary key, a cut, at timestamptz default now());
create table odds (id int primary key, a odd, at timestamptz default now());
create table triggered (id int primary key, at timestamptz default now());
create function nothing() returns trigger language plpgsql as 'begin return new; end';
create trigger own before insert on triggered for each row execute function nothing();
create table ruled (id int primary key, at timestamptz default now());
create rule own as on insert to ruled do also select 1;
create table parted (id int primary key, at timestamptz default now()) partition by range (id);
create table part1 partition of parted for values from (0) to (100);
create table keyless (id int default 1, at timestamptz default now());
create view orders_view as select * from orders;
create table lengthy (id int primary key, a varchar(5), b char(4), c bit(3), d varchar(3)[]);
"""

SAME = [
    "insert into many (id, a, b) values (1, array[1.6, 2], 5), (2, '{3,NULL}', 'a'' b -- c')",
    "insert into many (id, c, d, e) values (1, '\\x00ff', '{\"a\": 1.0}', 0.1 + 0.2)",
    "insert into many (id, f, g, j) values (1, 'yes', 'sad', '1 day'), (2, null, default, '3 hours'::interval * 2)",
    "insert into many (id, k, l, m) values (1, 'ab', date '2020-01-31' + interval '1 month', b'101')",
    "insert into many (id, o, p, h) values (1, int4range(1, 5, '[]'), '10:00', upper('ab')) returning id, o, p, h, i",
    "insert into many (id, e) values (1.5, 'NaN'), (abs(-7), '-infinity') returning id as number, h, i",
    "insert into many values (1)",
    "insert into many (id, b) values (1, to_char(timestamptz '2020-01-01 10:00+00', 'HH24:MI TZ'))",
    "insert into orders (id, at, customer, amount) values "
    "('00000000-0000-0000-0000-000000000001', '2020-01-01', 3, 2.555) returning amount, at, customer",
    "insert into orders values ('00000000-0000-0000-0000-000000000001', '2020-01-01', 3, default, 'abc')",
    "insert into doubled (v) values (4)",
    "insert into doubled values (1, 2, default), (5, 6, default) returning id",
    "insert into lengthy (id, a, b, c, d) values (1, 'abcde  ', 'abcd   ', b'110', array['abc', 'de '])",
]

Asked = Change | str | tuple[Change | str, ...]


def on(*requests: Asked) -> list[tuple[Change, ...]]:
    lists = [request if isinstance(request, tuple) else (request,) for request in requests]
    return [tuple(Statement(one) if isinstance(one, str) else one for one in request) for request in lists]


async def resolved(database: OriginDatabase, *requests: Asked) -> list[Executed]:
    outcomes = await database.origin.resolve(on(*requests))
    return [outcome for outcome in outcomes if outcome is not None]


@pytest.mark.parametrize("sql", SAME)
async def test_a_computed_row_is_the_one_that_an_execution_leaves(database: OriginDatabase, sql: str) -> None:
    await database.begin(SCHEMA)

    (computed,) = await resolved(database, sql)
    executed = await database.execute(sql)

    assert isinstance(executed, Executed)
    assert (computed.rows, computed.returned) == (executed.rows, executed.returned)
    # By what they become: lengths of texts are left to the insert.
    await database.apply("a", computed)
    here = await contents(database, executed)
    await database.sql(f"delete from {executed.write_set.changes[0].table}")
    await database.apply("b", executed)
    assert here == await contents(database, executed) != []


async def contents(database: OriginDatabase, executed: Executed) -> list[str]:
    connection = await asyncpg.connect(database.dsn)
    try:
        table = executed.write_set.changes[0].table
        return [row[0] for row in await connection.fetch(f"select t::text from {table} as t order by 1")]
    finally:
        await connection.close()


@pytest.mark.parametrize(
    "change",
    [
        "insert into orders (customer) values (1) on conflict do nothing",
        "insert into orders (customer) select 1",
        "insert into orders (customer) values ((select 1))",
        "insert into orders (customer) values (1) returning customer + 1",
        "insert into orders (customer, note) values (1, 'abc') returning note",
        "insert into doubled (v) values (1) returning *",
        "insert into called (id) values (1)",
        "insert into called (id, a) values (1, dice())",
        "insert into orders (customer) values (setval('numbers', 9)::int)",
        "insert into orders (customer) values (nextval($1::text::regclass)::int)",
        "insert into orders (customer) values (generate_series(1, 2))",
        "insert into cuts (id, a) values (1, 'abcd')",
        "insert into odds (id, a) values (1, 1)",
        "insert into triggered (id) values (1)",
        "insert into ruled (id) values (1)",
        "insert into parted (id) values (1)",
        "insert into part1 (id) values (1)",
        "insert into keyless (id) values (1)",
        "insert into orders_view (customer) values (1)",
        "insert into missing (customer) values (1)",
        "insert into orders (missing) values (1)",
        "insert into tops.captured (relation) values ('orders')",
        "update orders set at = now()",
        "insert into identities (id, v) values (1, 1)",
        "insert into orders (customer, at) values (1, 'now')",
        "insert into orders (customer, at) values (1, $$now$$)",
        "insert into orders (customer) values (1 / 0)",
        "insert into many (id, h) values (1, 'too long')",
        "insert into orders (customer) values ($1)",
        Statement("insert into orders (customer) values ($1)", ("no number",)),
        Statement("insert into orders (customer, at) values (1, $1)", ("now",)),
        Insert("missing", {"id": 1}),
        Insert("triggered", {"id": 1}),
        Delete("orders", {"id": "00000000-0000-0000-0000-000000000001"}),
        Update("orders", {"id": "00000000-0000-0000-0000-000000000001"}, {"customer": 2}),
    ],
    ids=str,
)
async def test_whatever_does_more_than_insert_computed_values_is_executed(
    database: OriginDatabase, change: Change | str
) -> None:
    await database.begin(SCHEMA)

    assert await database.origin.resolve(on(change)) == [None]
    # The session is as good as before.
    assert len(await resolved(database, "insert into orders (customer) values (1)")) == 1


async def test_values_are_computed_once_and_nothing_stays(database: OriginDatabase) -> None:
    await database.begin(SCHEMA)

    sql = "insert into orders (customer) values (1), (2) returning id, at"
    (computed,) = await resolved(database, sql)

    rows = [change.values for change in computed.write_set.changes if isinstance(change, Insert)]
    assert computed.rows == (2,)
    assert [str(row["id"]) for row in computed.returned[0]] == [row["id"] for row in rows]
    assert len({row["id"] for row in rows}) == 2
    assert len({row["at"] for row in rows}) == 1, "now() is one time in a statement"
    assert await contents(database, computed) == []


async def test_requests_that_come_together_are_computed_together(database: OriginDatabase) -> None:
    await database.begin(SCHEMA)
    insert = "insert into serials (what) values ($1), ($1 || '!') returning id, what"
    requests = [Statement(insert, (name,)) for name in ("a", "b", "c")]

    others = "update serials set n = 1", "insert into ruled values (1)"
    outcomes = await database.origin.resolve(on(*requests, *others))

    assert outcomes[3:] == [None, None]
    done = [outcome for outcome in outcomes[:3] if outcome is not None]
    assert [[row["what"] for row in one.returned[0]] for one in done] == [["a", "a!"], ["b", "b!"], ["c", "c!"]]
    assert sorted(row["id"] for one in done for row in one.returned[0]) == [1, 2, 3, 4, 5, 6]
    assert all(one.returned[0][0]["id"] < one.returned[0][1]["id"] for one in done), "the first row draws first"
    assert {one.write_set.sequences for one in done} == {(("public.numbers", 6), ("public.serials_id_seq", 6))}


async def test_a_transaction_of_several_inserts_has_one_time(database: OriginDatabase) -> None:
    await database.begin(SCHEMA)

    request = (
        "insert into orders (customer) values (1)",
        Insert("orders", {"customer": 2, "note": "x"}),
        "insert into identities (v) values (5) returning id",
    )
    (computed,) = await resolved(database, request)

    assert computed.rows == (1, 1, 1)
    assert computed.returned == ((), (), ({"id": 1},))
    first, second, third = (change.values for change in computed.write_set.changes if isinstance(change, Insert))
    assert first["at"] == second["at"]
    assert (second["customer"], second["note"], third["id"], third["v"]) == (2, "x", 1, 5)
    assert computed.write_set.sequences == (("public.identities_id_seq", 1),)


async def test_one_that_must_be_executed_takes_its_whole_transaction_along(database: OriginDatabase) -> None:
    await database.begin(SCHEMA)

    mixed = ("insert into orders (customer) values (1)", "insert into ruled (id) values (1)")
    outcomes = await database.origin.resolve(on(mixed, "insert into orders (customer) values (1)"))

    assert outcomes[0] is None
    assert outcomes[1] is not None


async def test_a_login_without_the_right_gets_nothing_computed(database: OriginDatabase) -> None:
    await database.begin(SCHEMA)
    write = database.logins.write_role
    await database.sql(f'revoke insert on orders from "{write}"')

    assert await resolved(database, "insert into orders (customer) values (1)") == []


async def test_a_trigger_that_is_new_is_seen(database: OriginDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    await database.begin(SCHEMA)
    insert = "insert into orders (customer) values (1)"
    assert len(await resolved(database, insert)) == 1
    monkeypatch.setattr("adapters.postgres.origin.resolve.LEARN_AGAIN_S", 0.0)

    await database.sql("create trigger own before insert on orders for each row execute function nothing()")

    assert await resolved(database, insert) == []


async def test_a_connection_that_broke_is_made_again(database: OriginDatabase, plain: asyncpg.Connection) -> None:
    await database.begin(SCHEMA)
    insert = "insert into orders (customer) values (1)"
    await resolved(database, insert)
    end = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'tops-resolve'"
    assert await plain.fetchval(f"{end} and datname = current_database()")

    first = await database.origin.resolve(on(insert))  # the driver may not have noticed yet
    second = await database.origin.resolve(on(insert))

    assert first == [None] or first[0] is not None
    assert second[0] is not None


# ----------------------------------------------------------------------------------------------------------- in a set


async def keys_noted(cluster: SmallCluster) -> dict[str, int]:
    """How many keys every replica's capture triggers have noted; 0: nothing was executed there."""
    sql = "select case when is_called then last_value else 0 end from tops.captured_id_seq"
    return {name: int((await cluster.sql(name, sql))[0][0]) for name in cluster.databases}


@pytest.mark.parametrize("policy", POLICIES)
async def test_inserts_are_shipped_with_computed_values(server: EmbeddedPostgres, folder: Path, policy: str) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        done = await shop.execute("insert into orders (customer) values (1), (2) returning id, amount")
        drawn = await asyncio.gather(
            *(shop.execute("insert into serials (what) values ($1) returning id", f"w{n}") for n in range(10))
        )
        # Peers tell rows apart by the keys that their writers give.
        key = {"id": "00000000-0000-0000-0000-000000000001"} if policy == "peer-to-peer" else {}
        await shop.write([Insert("orders", {**key, "customer": 3})])

        assert done.rows == (2,)
        orders = await all_equal(shop, "select id, customer, amount, at from orders order by customer")
        assert [row[0] for row in orders[:2]] == [row["id"] for row in done.returned[0]]
        assert [row[1] for row in orders] == [1, 2, 3]
        assert len(await all_equal(shop, "select id, n, what from serials order by id")) == 10
        ids = {row["id"] for one in drawn for row in one.returned[0]}
        assert len(ids) == 10
        if policy == "peer-to-peer":  # whose replicas draw from blocks of their own, of which an execution knows
            assert await keys_noted(cluster) == {"r1": 10, "r2": 0, "r3": 0}
            return
        for name in cluster.databases:
            assert (await cluster.sql(name, "select last_value from serials_id_seq"))[0][0] >= max(ids)
        assert set((await keys_noted(cluster)).values()) == {0}, "nothing was executed"


@pytest.mark.parametrize("policy", ["write-all", "primary-site", "serializable", "peer-to-peer"])
@pytest.mark.parametrize(
    ("sql", "sqlstate", "constraint"),
    [
        ("insert into orders (customer, note) values (1, 'a')", "23505", "orders_note_key"),
        ("insert into orders (customer) values (null)", "23502", ""),
        ("insert into orders (customer, amount) values (1, -1)", "23514", "orders_amount_check"),
        ("insert into orders (customer, note) values (1, 'longer')", "22001", ""),
    ],
)
async def test_errors_are_those_of_postgresql(
    server: EmbeddedPostgres, folder: Path, policy: str, sql: str, sqlstate: str, constraint: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=SCHEMA) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await shop.execute("insert into orders (customer, note) values (9, 'a')")
        said = await plain_error(cluster, sql)

        with pytest.raises(WriteRejected) as rejected:
            await shop.execute(sql)

        assert rejected.value.sqlstate == sqlstate
        told = rejected.value.database
        assert told is not None
        assert (told.message, told.constraint) == (said.message, constraint)
        assert told.table == (said.table_name or "")
        assert len(await all_equal(shop, "select id, customer from orders")) == 1


async def plain_error(cluster: SmallCluster, sql: str) -> asyncpg.PostgresError:
    """What PostgreSQL says by itself."""
    connection = await asyncpg.connect(cluster.server.dsn_for(cluster.databases["r1"]))
    try:
        with pytest.raises(asyncpg.PostgresError) as raised:
            async with connection.transaction():
                await connection.execute(sql)
        return raised.value
    finally:
        await connection.close()
