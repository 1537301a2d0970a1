"""Checks of running replica sets while they are being written: every planted difference is found, and no other."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from replication.divergence.repair.repair import Strategy
from replication.divergence.results.model import Verdict
from tests.integration.divergence.conftest import kinds
from tests.integration.divergence.sets import CheckedSet, checked_set, writing
from tests.support.command_line import tops as run

POLICIES = {
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "peer-to-peer": 'policy = "peer-to-peer"',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "serializable": 'policy = "serializable"',
}
ROWS = 5_000
WRITES_PER_S = 500
ROOT = Path(__file__).resolve().parents[3]
PLANTED = {
    "r1": ("UPDATE t SET v = -5 WHERE id = 10", "INSERT INTO t (id, v) VALUES (-7, 1)"),
    "r2": ("DELETE FROM t WHERE id = 20", "UPDATE t SET label = NULL, at = at + interval '1 us' WHERE id = 21"),
    "r3": ("UPDATE t SET label = label || ' ' WHERE id = 30", "INSERT INTO t (id, v) VALUES (9000000000, 1)"),
}
EXPECTED = {
    (("10",), "r1", "changed", ("v",)),
    (("-7",), "r1", "extra", ()),
    (("20",), "r2", "missing", ()),
    (("21",), "r2", "changed", ("label", "at")),
    (("30",), "r3", "changed", ("label",)),
    (("9000000000",), "r3", "extra", ()),
}
# Where one replica is the primary, the others are what differs from it.
EXPECTED_OF = {
    "primary-site": {
        *((("10",), other, "changed", ("v",)) for other in ("r2", "r3")),
        *((("-7",), other, "missing", ()) for other in ("r2", "r3")),
        *(difference for difference in EXPECTED if difference[1] != "r1"),
    }
}


async def planted(checked: CheckedSet) -> None:
    for replica, statements in PLANTED.items():
        await checked.on(replica, *statements)


@pytest.mark.parametrize(
    "policy",
    [
        "quorum",
        "peer-to-peer",
        pytest.param("primary-site", marks=pytest.mark.long),
        pytest.param("serializable", marks=pytest.mark.long),
    ],
)
async def test_planted_differences_are_found_and_repaired_and_no_others_while_writers_go_on(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession, policy: str
) -> None:
    async with checked_set(cluster_server, folder, spark, POLICIES[policy], rows=ROWS) as checked:
        untouched = await checked.small.sql(
            "r1", "select xmin::text, id from t where id between 100 and 1000 order by id"
        )
        async with writing(checked, (1001, ROWS)) as writers:
            clean = await checked.compare()
            await planted(checked)
            result = await checked.compare()
            before = [one.written for one in writers]
            done = await checked.repair(result, Strategy.MAJORITY, force=True)
            after = [one.written for one in writers]
            again = await checked.compare()
        log = [key async for key in checked.logged_keys()]
        left = await checked.small.sql("r1", "select xmin::text, id from t where id between 100 and 1000 order by id")

    assert clean.verdict is Verdict.EQUAL, clean.headline
    assert all(replica.position is not None for replica in clean.replicas)
    assert len({replica.position for replica in result.replicas}) == 1
    assert kinds(checked.real_differences(result)) == EXPECTED_OF.get(policy, EXPECTED)
    assert result.verdict is Verdict.DIFFERENT
    assert (done.written, done.moved) == (len(EXPECTED), 0)
    assert again.verdict is Verdict.EQUAL, again.headline
    assert left == untouched
    assert all(later > earlier for earlier, later in zip(before, after, strict=True))
    # One transaction for each replica that had something to repair, and each is in the log.
    assert {key.split("|")[1] for key in log if key.startswith("tops-repair")} == {"shop/r1", "shop/r2", "shop/r3"}
    assert len(done.transactions) == 3


@pytest.mark.long
@pytest.mark.parametrize("policy", ["quorum", "peer-to-peer"])
async def test_two_hundred_differences_among_a_million_rows_of_a_set_that_is_being_written(
    cluster_server: EmbeddedPostgres,
    folder: Path,
    spark: SparkSession,
    policy: str,
    record_property: Callable[[str, object], None],
) -> None:
    rows = 1_000_000
    generator = random.Random(11)
    keys = iter(generator.sample(range(1, 100_000), 200))
    plant: dict[str, list[str]] = {"r1": [], "r2": [], "r3": []}
    expected = set()
    for number, key in enumerate(keys):
        replica = f"r{number % 3 + 1}"
        statement, kind, columns = [
            (f"UPDATE t SET v = -5 WHERE id = {key}", "changed", ("v",)),
            (f"UPDATE t SET label = NULL WHERE id = {key}", "changed", ("label",)),
            (f"UPDATE t SET at = at + interval '1 us', v = -1 WHERE id = {key}", "changed", ("v", "at")),
            (f"DELETE FROM t WHERE id = {key}", "missing", ()),
            (f"INSERT INTO t (id, v) VALUES ({-key}, 1)", "extra", ()),
        ][number % 5]
        plant[replica].append(statement)
        expected.add(((str(-key if kind == "extra" else key),), replica, kind, columns))

    clock = asyncio.get_running_loop().time
    async with checked_set(cluster_server, folder, spark, POLICIES[policy], rows=rows) as checked:
        async with writing(checked, (100_001, rows), WRITES_PER_S) as writers:
            for replica, statements in plant.items():
                await checked.on(replica, *statements)
            began, before = clock(), sum(one.written for one in writers)
            result = await checked.compare()
            done = await checked.repair(result, Strategy.MAJORITY, force=True)
            again = await checked.compare()
            rate = (sum(one.written for one in writers) - before) / (clock() - began)

    record_property("writes_per_s", round(rate))
    record_property("slowest_write_s", round(max(one.slowest_s for one in writers), 2))
    assert rate > WRITES_PER_S / 2
    assert [reason for one in writers for reason in one.rejected] == []
    assert kinds(checked.real_differences(result)) == expected
    assert (done.written, done.moved) == (200, 0)
    assert again.verdict is Verdict.EQUAL, again.headline


async def tops(checked: CheckedSet, folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of `tops divergence` with the set's own file."""
    code, out, errors = await run("divergence", *arguments, "-c", str(checked.small.cluster.path), cwd=folder)
    return code, out + errors


async def test_the_command_line_checks_a_running_set_and_plans_its_repair(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, POLICIES["quorum"], rows=1000) as checked:
        await planted(checked)

        found, told = await tops(checked, folder, "check", "shop")
        planned, plan = await tops(checked, folder, "repair", "shop")
        rejected, why = await tops(checked, folder, "repair", "shop", "--by", "majority", "--execute")
        untouched = await checked.small.sql("r1", "select v from t where id = 10")

    assert found == 1, told
    assert "DIFFERENT: 6 differing row(s)" in told
    assert planned == 1, plan
    assert "4 row(s) to write" in plan and "2 row(s) undecided" in plan
    assert rejected == 2, why
    assert "delete or overwrite 2 row(s)" in why and "--force" in why
    assert [row["v"] for row in untouched] == [-5]


@pytest.mark.long
async def test_the_command_line_repairs_a_running_set(
    cluster_server: EmbeddedPostgres, folder: Path, spark: SparkSession
) -> None:
    async with checked_set(cluster_server, folder, spark, POLICIES["quorum"], rows=1000) as checked:
        await planted(checked)

        found, told = await tops(checked, folder, "check", "shop")
        repaired, outcome = await tops(checked, folder, "repair", "shop", "--by", "majority", "--force", "--execute")

    assert found == 1, told
    assert repaired == 0, outcome
    assert "6 row(s) repaired, 0 had changed meanwhile" in outcome
    assert "EQUAL" in outcome
