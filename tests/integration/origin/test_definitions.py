"""Tables that change while they are written to: what a statement did is captured, whatever was known of its table."""

from pathlib import Path

import asyncpg
import pytest

from adapters import EmbeddedPostgres, PostgresAdapter
from adapters.changes import Change, Insert, Member, Statement, Update
from adapters.postgres.origin import Executed, Rejected
from adapters.postgres.proof import Prover, Verdict
from tests.integration.origin.databases import OriginDatabase
from tests.integration.origin.policies import POLICIES
from tests.integration.origin.test_executed_once import all_equal
from tests.integration.replication.inprocess import SmallCluster, small_cluster
from tops.model.ids import TxId

TABLE = "create table a (id int primary key, v int, r float8)"
UPDATE = "update a set r = random() where id = 1"
NEW_COLUMN = "alter table a add column w int"


def values_of(outcome: object) -> dict[str, object]:
    """All values that the write set of an execution gives."""
    assert isinstance(outcome, Executed), outcome
    return {
        name: value for change in outcome.write_set.changes for name, value in getattr(change, "values", {}).items()
    }


async def everywhere(cluster: SmallCluster, script: str) -> None:
    for replica in cluster.databases:
        await cluster.script(replica, script)


async def test_a_new_column_is_captured_at_once(database: OriginDatabase) -> None:
    await database.begin(f"{TABLE}; insert into a values (1, 1, 1)")
    assert isinstance(await database.execute(UPDATE), Executed)

    await database.sql(NEW_COLUMN)

    assert (values_of(await database.execute("update a set w = 7, r = random() where id = 1")))["w"] == 7
    assert (values_of(await database.execute("insert into a (id, w) select 2, 8")))["w"] == 8
    assert (values_of(await database.execute(Insert("a", {"id": 3, "w": 9}))))["w"] == 9


@pytest.mark.parametrize(
    ("change", "statement", "column", "value"),
    [
        ("rename v to vv", "update a set vv = 9, r = random() where id = 1", "vv", 9),
        ("drop v", "update a set r = 3 where id = 1", "r", "3"),
        ("alter v type text using 'x' || v", "update a set v = v || 'y', r = random() where id = 1", "v", "x1y"),
    ],
)
async def test_a_changed_column_is_captured_as_it_is_now(
    database: OriginDatabase, change: str, statement: str, column: str, value: object
) -> None:
    await database.begin(f"{TABLE}; insert into a values (1, 1, 1)")
    assert isinstance(await database.execute(UPDATE), Executed)

    await database.sql(f"alter table a {change}")

    assert (values_of(await database.execute(statement)))[column] == value


async def test_values_computed_ahead_have_the_columns_and_defaults_of_now(database: OriginDatabase) -> None:
    await database.begin(f"{TABLE}; alter table a alter v set default 1")
    requests = [(Statement("insert into a (id, r) values (1, random())"),)]
    (first,) = await database.origin.resolve(requests)
    assert (values_of(first))["v"] == 1

    await database.sql("alter table a alter v set default 2, add column w int default 3")

    assert await database.origin.resolve(requests) == [None], "it is executed instead"
    (again,) = await database.origin.resolve(requests)
    found = values_of(again)
    assert (found["v"], found["w"]) == (2, 3)


CLAIMS = """
create table looked_up (id int primary key, w int);
create function doubled(v int) returns int language sql immutable as 'select 2 * v';
create function drawn(v int) returns float8 language sql immutable as 'select random()';
create function named(v int) returns text language sql immutable as 'select current_user::text';
create function found(v int) returns int language sql immutable as 'select w from looked_up where id = v';
create table honest (id int primary key, c char(4), v int, w int,
  d int generated always as (doubled(v) + octet_length(c)) stored);
create table drawing (id int primary key, v int, d float8 generated always as (drawn(v)) stored);
create table naming (id int primary key, v int, d text generated always as (named(v)) stored);
create table finding (id int primary key, v int, d int generated always as (found(v)) stored);
insert into looked_up values (1, 1);
insert into honest values (1, 'a', 1);
insert into drawing values (1, 1);
"""


async def test_a_generated_column_that_is_not_what_its_function_claims_is_rejected(database: OriginDatabase) -> None:
    await database.begin(CLAIMS)

    for request in (
        ["insert into drawing (id, v) values (2, 2)"],
        ["insert into drawing (id, v) select 3, 3"],
        ["update drawing set v = 2 where id in (select 1)"],
        ["insert into naming (id, v) values (1, 1)"],
        ["update looked_up set w = 2", "insert into finding (id, v) values (1, 1)"],
    ):
        statements = tuple(map(Statement, request))
        assert await database.origin.resolve([statements]) == [None], "only an execution shows it"
        (outcome,) = await database.execute_all(request)
        assert isinstance(outcome, Rejected), request
        assert (outcome.sqlstate, "computed again" in outcome.message) == ("0A000", True), request


async def test_a_generated_column_that_keeps_its_claim_is_captured(database: OriginDatabase) -> None:
    await database.begin(CLAIMS)

    outcomes = await database.execute_all(
        ["insert into honest (id, c, v) select 2, 'ab', 2"],
        ["update honest set v = v + 1"],
        ["insert into finding (id, v) select 1, 1"],
        ["insert into drawing (id, v) select 9, 9"],
    )
    await database.sql("create or replace function doubled(v int) returns int language sql immutable as 'select 5'")
    unchanged = await database.execute("update honest set w = 1 where id in (select 1)")

    assert [isinstance(outcome, Executed) for outcome in (*outcomes, unchanged)] == [True, True, True, False, True]


async def test_a_captured_row_is_never_completed_by_a_default_that_differs(database: OriginDatabase) -> None:
    await database.begin(TABLE)
    member = Member(TxId("t.1"), (Insert("a", {"id": 1, "v": 1, "r": 1.0}, captured=True),), origin="r2")

    await database.sql("alter table a add column w float8 default random(), add column c int default 5")
    (random,) = await database.adapter.write_all_local([member])
    await database.sql("alter table a drop column w")
    (constant,) = await database.adapter.write_all_local([member])

    assert random.excluded is not None
    assert "default of column w" in random.excluded.message
    assert constant.excluded is None


async def test_a_captured_row_with_an_unknown_column_is_rejected(database: OriginDatabase) -> None:
    await database.begin(TABLE)
    member = Member(TxId("t.1"), (Insert("a", {"id": 1, "v": 1, "r": 1.0, "w": 7}, captured=True),), origin="r2")

    (unknown,) = await database.adapter.write_all_local([member])
    await database.sql(NEW_COLUMN)
    (known,) = await database.adapter.write_all_local([member])

    assert unknown.excluded is not None
    assert "has no column 'w'" in unknown.excluded.message
    assert known.excluded is None


@pytest.mark.parametrize("policy", ["write-all", "serializable", "primary-site", "peer-to-peer"])
async def test_values_of_a_new_column_are_stored_on_all_replicas(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=TABLE) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await shop.execute("insert into a (id, v, r) values (1, 1, random())")
        await shop.execute("update a set r = random() where id = 1")
        await shop.wait_in_sync(20)
        await everywhere(cluster, NEW_COLUMN)

        inserted = await shop.execute("insert into a (id, v, r, w) values (2, 2, random(), 7) returning w")
        updated = await shop.execute("update a set w = 5, r = random() where id = 1 returning w")

        assert (inserted.returned[0][0]["w"], updated.returned[0][0]["w"]) == (7, 5)
        assert await all_equal(shop, "select id, w from a order by id") == [(1, 5), (2, 7)]


TRIGGER = """
create function noted() returns trigger language plpgsql as
    $$ begin insert into notes (x) values (random()); return new; end $$;
create trigger noting after insert or update on {table} for each row execute function noted();
"""
NOTES = "create table notes (id serial primary key, x float8)"


@pytest.mark.parametrize("policy", ["write-all", "serializable", "ordered", "peer-to-peer"])
async def test_a_new_trigger_runs_once_for_statements_that_used_to_be_shipped(
    server: EmbeddedPostgres, folder: Path, policy: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=f"{TABLE}; {NOTES}") as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await shop.execute("insert into a values (1, 1, 1)")
        await shop.execute("update a set v = v + 1 where id = 1")
        await shop.wait_in_sync(20)
        await everywhere(cluster, TRIGGER.format(table="a"))

        await shop.execute("update a set v = v + 1 where id = 1")
        await shop.execute("insert into a values (2, 1, 1)")
        await shop.write([Update("a", {"id": 2}, {"v": 2})])

        assert await all_equal(shop, "select id, v from a order by id") == [(1, 3), (2, 2)]
        assert len(await all_equal(shop, "select x from notes order by x")) == 3


async def test_a_new_trigger_on_a_table_that_an_action_reaches_is_noticed(
    server: EmbeddedPostgres, folder: Path
) -> None:
    child = "create table child (id int primary key, a int references a on update cascade)"
    async with (
        small_cluster(server, folder, POLICIES["write-all"], schema=f"{TABLE}; {child}; {NOTES}") as cluster,
        cluster.connect() as shop,
    ):
        await shop.execute("insert into a values (1, 1, 1)")
        await shop.execute("insert into child values (1, 1)")
        await shop.execute("update a set id = 2 where id = 1")
        await everywhere(cluster, TRIGGER.format(table="child"))

        await shop.execute("update a set id = 3 where id = 2")

        assert await all_equal(shop, "select a from child") == [(3,)]
        assert len(await all_equal(shop, "select x from notes")) == 1


async def test_a_new_default_is_computed_once(server: EmbeddedPostgres, folder: Path) -> None:
    async with (
        small_cluster(server, folder, POLICIES["write-all"], schema=TABLE) as cluster,
        cluster.connect() as shop,
    ):
        await shop.execute("insert into a (id) values (1)")
        await shop.write([Insert("a", {"id": 2})])
        await everywhere(cluster, "alter table a alter r set default random()")

        await shop.execute("insert into a (id) values (3)")
        await shop.write([Insert("a", {"id": 4})])

        rows = await all_equal(shop, "select id, r from a order by id")
        assert [r is None for _, r in rows] == [True, True, False, False]


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        (TRIGGER.format(table="a"), "trigger"),
        ("alter table a alter r set default random()", "default"),
        ("alter table a add column w float8 default random()", "default"),
        ("alter table a add check (chance() < 2)", "constraint"),
        ("create index on a (chance(), v)", "index"),
        ("create rule more as on insert to a do also insert into notes (x) values (1)", "rule"),
        ("create table heir () inherits (a)", "inheritance"),
    ],
)
@pytest.mark.parametrize("change", [Statement("insert into a (id) values (2)"), Insert("a", {"id": 2})], ids=type)
async def test_what_comes_to_a_table_is_part_of_the_next_proof(
    database: OriginDatabase, definition: str, reason: str, change: Change
) -> None:
    chance = "create function chance() returns float8 immutable language sql as 'select random()'"
    await database.begin(f"{TABLE}; {NOTES}; {chance}")
    (shipped,) = await database.adapter.write_all_local([Member(TxId("t.1"), (change,))])
    assert shipped.excluded is None
    await database.sql(f"delete from a; {definition}")

    (vote,) = await database.adapter.write_all_local([Member(TxId("t.2"), (change,))])

    assert vote.excluded is not None
    assert f"not proved deterministic [{reason}]" in vote.excluded.message
    assert (await database.adapter.read_own("select id from a")).rows == []


class LateChange(Prover):
    """Proves as usual; behind its second proof, the table changes."""

    proofs = 0
    dsn = ""

    async def statement(self, sql: str) -> Verdict:
        verdict = await super().statement(sql)
        LateChange.proofs += 1
        if LateChange.proofs == 2:
            connection = await asyncpg.connect(self.dsn)
            await connection.execute(TRIGGER.format(table="a"))
            await connection.close()
        return verdict


async def test_a_change_between_the_proof_and_the_lock_is_noticed_by_members_one_by_one(
    database: OriginDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await database.set_up(f"{TABLE}; {NOTES}; insert into a values (1, 1, 1)")
    monkeypatch.setattr(LateChange, "dsn", database.dsn)
    monkeypatch.setattr(LateChange, "proofs", 0)
    adapter = PostgresAdapter(database.logins, cluster="test", replica_set="shop", prover=LateChange)
    returning = Statement("update a set v = v + 1 where id = 1 returning v")  # it runs by itself: not the fast path
    async with adapter:
        (vote,) = await adapter.write_all_local([Member(TxId("t.1"), (returning,))])

        assert LateChange.proofs == 3
        assert vote.excluded is not None
        assert "not proved deterministic [trigger]" in vote.excluded.message
        assert (await adapter.read_own("select v from a")).rows == [{"v": 1}]


@pytest.mark.parametrize("change", ["drop v", "rename v to vv", "add column w int", "alter v type bigint"])
@pytest.mark.parametrize("policy", ["peer-to-peer", "ordered"])
async def test_peers_go_on_when_columns_change(
    server: EmbeddedPostgres, folder: Path, policy: str, change: str
) -> None:
    async with (
        small_cluster(server, folder, POLICIES[policy], schema=TABLE) as cluster,
        cluster.connect(prefer="r1") as shop,
    ):
        await shop.write([Insert("a", {"id": 1, "v": 1, "r": 1.0})])
        await shop.wait_in_sync(20)
        await everywhere(cluster, f"alter table a {change}")

        await shop.write([Update("a", {"id": 1}, {"r": 2.0})])
        await shop.execute("update a set r = r + random() * 0 + 1 where id = 1")
        if "w" in change:
            await shop.write([Update("a", {"id": 1}, add={"w": 1})])

        assert await all_equal(shop, "select r from a") == [(3.0,)]
