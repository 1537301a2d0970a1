"""Repairs of running sets: the log is right, nothing that was acknowledged is lost unasked, and no trigger fires."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from adapters.changes import Delete, Insert, Update
from adapters.postgres.access.guard_triggers import TRIGGER
from replication.divergence.check.options import CheckOptions
from replication.divergence.repair.repair import Strategy
from replication.divergence.results.model import Basis, Kind, Verdict
from tests.integration.divergence.sets import CheckedSet, checked_set
from tests.support.command_line import tops as run

QUORUM = 'policy = "quorum"\nwrite_quorum = 2'
PEERS = 'policy = "peer-to-peer"'
ROOT = Path(__file__).resolve().parents[3]
AT = "2024-05-01T10:00:00+00:00"
WITH_TRIGGERS = """
create table audit (id uuid primary key default gen_random_uuid(), t_id bigint not null,
    at timestamptz not null default clock_timestamp());
create table t (id bigint primary key, v int not null, label text, at timestamptz,
    place int unique deferrable initially deferred);
create table child (id bigint primary key, t_id bigint not null references t on delete cascade, at timestamptz);
create function stamp() returns trigger language plpgsql as $$ begin new.at := clock_timestamp(); return new; end $$;
create function note() returns trigger language plpgsql as $$
    begin insert into audit (t_id) values (new.id); return null; end $$;
create trigger stamp before insert or update on t for each row execute function stamp();
create trigger stamp before insert or update on child for each row execute function stamp();
create trigger note after insert or update on t for each row execute function note();
set session_replication_role = replica;
"""
SHOUT = """
create function shout() returns trigger language plpgsql as $$ begin new.label := upper(new.label); return new; end $$;
create trigger shout before insert on t for each row execute function shout();
"""
# By hand, without the triggers that would change other rows as well.
QUIETLY = "set session_replication_role = replica;"


def row(key: int, v: int) -> Insert:
    return Insert("t", {"id": key, "v": v, "label": f"row {key}", "at": AT})


async def tops(checked: CheckedSet, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of `tops divergence repair` for the newest check of the set."""
    given = ("repair", "shop", *arguments, "-c", str(checked.small.cluster.path), "--out", str(checked.out))
    code, out, errors = await run("divergence", *given, environ={"COLUMNS": "300"})
    return code, out + errors


async def keys_on(checked: CheckedSet, replica: str, table: str = "t") -> list[Any]:
    return [found["id"] for found in await checked.small.sql(replica, f"select id from {table} order by id")]


async def everywhere(checked: CheckedSet, table: str = "t") -> list[list[Any]]:
    return [await keys_on(checked, replica, table) for replica in checked.small.databases]


def actions(counted: Sequence[Any]) -> set[str]:
    return {action for counts in counted for action in counts}


async def test_two_emptied_replicas_do_not_outvote_what_the_log_and_the_third_one_hold(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, QUORUM, rows=3) as checked:
        async with checked.small.connect() as shop:
            inserted = await shop.write([row(101, 1), row(102, 2)])
            await shop.execute("update t set v = $1 where id = $2", 77, 102)
            await shop.wait_in_sync()
            for replica in ("r2", "r3"):
                await checked.on(replica, "delete from t")
            result = await checked.compare()

            plan = checked.plan(result)
            planned = await tops(checked)
            rejected = await tops(checked, "--by", "majority", "--execute")
            kept = await everywhere(checked)
            done = await checked.repair(result, Strategy.LOG)
            by_log = await everywhere(checked)
            # Rows that are older than the log: an operator says which replica is right.
            await checked.repair(result, Strategy.LOG, primary="r1")
            again = await checked.compare()
            wanted = "select v from t where id in (101, 102) order by id"
            values = [await checked.small.sql(replica, wanted) for replica in checked.small.databases]

    assert actions(list(plan.actions.values())) == {"insert"}
    assert plan.sources == {Basis.LOG: 4}
    assert plan.undecided_rows == 3
    assert "it may be older than the log" in plan.undecided[0].reason
    assert planned[0] == 1 and "the log" in planned[1], planned[1]
    assert rejected[0] == 2, rejected[1]
    assert "--force" in rejected[1] and "nothing was written" in rejected[1]
    assert f"deletes what transaction {inserted.tx} wrote at log index {inserted.position}" in rejected[1]
    assert kept == [[1, 2, 3, 101, 102], [], []]
    assert done.written == 2
    assert by_log == [[1, 2, 3, 101, 102], [101, 102], [101, 102]]
    assert again.verdict is Verdict.EQUAL, again.headline
    assert [[found["v"] for found in rows] for rows in values] == [[1, 77]] * 3


async def test_what_was_acknowledged_is_overwritten_or_deleted_only_by_force(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, QUORUM, rows=3) as checked:
        async with checked.small.connect() as shop:
            await shop.write([row(101, 1), row(102, 2), row(103, 3)])
            await shop.write([Delete("t", {"id": 103})])
            await shop.wait_in_sync()
            for replica in ("r2", "r3"):
                await checked.on(
                    replica,
                    "delete from t where id = 101",
                    "update t set v = -1 where id = 102",
                    "insert into t (id, v) values (103, 3)",
                )
            result = await checked.compare()
            plan = checked.plan(result, Strategy.MAJORITY)
            untouched = await checked.repair(result, Strategy.MAJORITY)
            before = await everywhere(checked)
            await checked.repair(result, Strategy.MAJORITY, force=True)
            again = await checked.compare()
            values = await checked.small.sql("r1", "select id, v from t where id > 100 order by id")
            # What was overruled does not come back: neither the deleted row, nor the value.
            await checked.on("r3", "insert into t values (999, 0)", "update t set v = 9 where id = 102")
            later = {(d.key[0], d.replica): d.expected for d in checked.real_differences(await checked.compare())}

    assert [(one.key, one.replicas, one.risk.split()[0]) for one in plan.acknowledged] == [
        (("101",), ("r1",), "deletes"),
        (("102",), ("r1",), "overwrites"),
        (("103",), ("r1",), "overwrites"),
    ]
    assert plan.rows == 0
    assert untouched.written == 0
    assert before == [[1, 2, 3, 101, 102], [1, 2, 3, 102, 103], [1, 2, 3, 102, 103]]
    assert again.verdict is Verdict.EQUAL, again.headline
    assert [tuple(found) for found in values] == [(102, -1), (103, 3)]
    assert later.keys() == {("999", "r3"), ("102", "r3")}
    assert (later["102", "r3"] or {})["v"] == "-1"


async def test_an_acknowledged_row_with_three_keys_comes_back_from_the_log(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, QUORUM, rows=3) as checked:
        async with checked.small.connect() as shop:
            written = await shop.write([row(101, 1)])
            await shop.wait_in_sync()
            for number, replica in enumerate(checked.small.databases, start=201):
                await checked.on(replica, f"update t set id = {number} where id = 101")
            result = await checked.compare()
            found = checked.real_differences(result)
            await checked.repair(result, Strategy.LOG)
            kept = await everywhere(checked)
            result = await checked.compare()
            await checked.repair(result, Strategy.MAJORITY, force=True)
            again = await checked.compare()
            left = await everywhere(checked)

    lost = [d for d in found if d.key == ("101",)]
    assert {(d.replica, d.kind, d.basis) for d in lost} == {(r, Kind.MISSING, Basis.LOG) for r in ("r1", "r2", "r3")}
    renamed = [d for d in found if d.key == ("201",) and d.kind is Kind.EXTRA]
    assert [d.replica for d in renamed] == ["r1"]
    cause = renamed[0].cause
    assert cause is not None and (cause.tx, cause.number) == (written.tx, written.position)
    assert cause.summary == "a logged write came out differently here: the transaction wrote the row with key 101"
    assert kept == [[1, 2, 3, 101, 201], [1, 2, 3, 101, 202], [1, 2, 3, 101, 203]]
    assert again.verdict is Verdict.EQUAL, again.headline
    assert left == [[1, 2, 3, 101]] * 3


@pytest.mark.parametrize("policy", [QUORUM, PEERS], ids=["quorum", "peer-to-peer"])
async def test_after_a_repair_of_tables_with_triggers_the_check_is_clean(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession, policy: str
) -> None:
    tables = ("child", "t", "audit")
    everything = CheckOptions(tables=tables)
    checked_tables = checked_set(cluster_server, folder, spark, policy, rows=20, schema=WITH_TRIGGERS, tables=tables)
    async with checked_tables as checked:
        async with checked.small.connect("r1") as shop:
            await shop.execute("insert into t (id, v, place) values ($1, $2, $3)", 101, 1, 11)
            await shop.execute("insert into t (id, v, place) values ($1, $2, $3)", 102, 2, 12)
            await shop.execute("insert into child (id, t_id) values ($1, $2)", 1, 101)
            await shop.wait_in_sync()
            audited = await everywhere(checked, "audit")
            await checked.small.script("r2", f"{QUIETLY} delete from child; delete from t where id = 101")
            await checked.small.script("r2", f"{QUIETLY} update t set v = -1 where id in (5, 102)")
            await checked.small.script("r3", f"{QUIETLY} update t set place = 13 where id = 102; delete from audit")
            result = await checked.compare(everything)

            await checked.repair(result, Strategy.LOG)
            again = await checked.compare(everything)
            after = await everywhere(checked, "audit")
            children = await everywhere(checked, "child")

    assert result.differences >= 6
    assert again.verdict is Verdict.EQUAL, again.headline
    assert len(audited[0]) == 2 and after == audited
    assert children == [[1]] * 3


async def test_a_repair_that_would_break_a_constraint_writes_no_orphan_and_no_duplicate(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    tables = ("child", "t", "audit")
    async with checked_set(
        cluster_server, folder, spark, QUORUM, rows=3, schema=WITH_TRIGGERS, tables=tables
    ) as checked:
        async with checked.small.connect() as shop:
            await shop.execute("insert into t (id, v, place) values ($1, $2, $3)", 101, 1, 11)
            await shop.execute("insert into child (id, t_id) values ($1, $2)", 1, 101)
            await shop.wait_in_sync()
            # On r2 another row has taken the place, and the child has lost its parent with it.
            await checked.small.script(
                "r2", f"{QUIETLY} delete from child; delete from t where id = 101; update t set place = 11 where id = 1"
            )
            result = await checked.compare(CheckOptions(tables=("child",)))
            orphan = await checked.repair(result, Strategy.LOG)
            children = await keys_on(checked, "r2", "child")
            result = await checked.compare(CheckOptions(tables=("t",)))
            only_new = [d for d in checked.differences(result) if d.key == ("101",)]
            twin = await checked.repair(only_new, Strategy.LOG)
            rows = await keys_on(checked, "r2")

    assert (orphan.written, orphan.moved, children) == (0, 1, [])
    assert (twin.written, twin.moved, rows) == (0, 1, [1, 2, 3])


async def test_a_logged_write_that_came_out_differently_is_told_from_a_change_outside_replication(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    keys = f'{QUORUM}\ndirect_writes = "warn"'
    async with checked_set(cluster_server, folder, spark, keys, rows=3) as checked:
        async with checked.small.connect() as shop:
            await shop.write([Insert("t", {"id": 100, "v": 1, "label": "x"})])
            await shop.wait_in_sync()
            differently = await shop.write([Insert("t", {"id": 101, "v": 1, "label": "x"})])
            outside = await shop.write([Update("t", {"id": 2}, {"v": 5})])
            await shop.wait_in_sync()
            # As if r2 had applied it with a trigger that it alone has: no direct write is noted.
            off, on = (f"alter table t {how} trigger {TRIGGER};" for how in ("disable", "enable always"))
            await checked.small.script("r2", f"{off} update t set label = upper(label) where id = 101; {on} {SHOUT}")
            await checked.on("r3", "update t set v = -1 where id = 2")
            result = await checked.compare()

    found = {(d.key[0], d.replica): d.cause for d in checked.real_differences(result)}
    assert found.keys() == {("101", "r2"), ("2", "r3")}
    first, second = found["101", "r2"], found["2", "r3"]
    assert first is not None and (first.tx, first.number) == (differently.tx, differently.position)
    assert first.summary == (
        "a logged write came out differently here: the table has triggers here, which may have changed label"
    )
    assert second is not None and (second.tx, second.number) == (outside.tx, outside.position)
    assert second.summary.startswith("changed outside replication: 1 direct write(s) of the table were noted here")


async def test_where_the_log_says_nothing_the_newest_version_of_a_peer_to_peer_set_is_right(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, PEERS, rows=3) as checked:
        async with checked.small.connect("r1") as shop:
            await shop.write([Update("t", {"id": 1}, {"v": 5})])
            await shop.write([Delete("t", {"id": 2})])
            await shop.wait_in_sync()
            # As if r2 and r3 had been restored from a copy that is older than what the log retains.
            for replica in ("r2", "r3"):
                await checked.on(
                    replica,
                    "update t set v = 0 where id = 1",
                    "insert into t values (2, 0, 'label 2', '2024-01-01 00:00:02Z')",
                    "delete from tops.row_clocks",
                )
            result = await checked.compare(log=None)
            plan = checked.plan(result)
            by_versions = {(d.key[0], d.replica, d.kind, d.basis) for d in checked.real_differences(result)}

    assert by_versions == {
        *(("1", replica, Kind.CHANGED, Basis.NEWEST) for replica in ("r2", "r3")),
        *(("2", replica, Kind.EXTRA, Basis.NEWEST) for replica in ("r2", "r3")),
    }
    assert {replica: dict(counts) for replica, counts in plan.actions.items()} == {
        "r2": {"update": 1, "delete": 1},
        "r3": {"update": 1, "delete": 1},
    }
