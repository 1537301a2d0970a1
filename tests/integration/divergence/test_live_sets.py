"""Checks of running replica sets while they are being written: every planted difference is found, and no other."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from adapters import EmbeddedPostgres
from replication.divergence.model import Verdict
from replication.divergence.repair import Strategy
from tests.integration.divergence.conftest import kinds
from tests.integration.divergence.sets import CheckedSet, checked_set, writing

POLICIES = {
    "quorum": 'policy = "quorum"\nwrite_quorum = 2',
    "peer-to-peer": 'policy = "peer-to-peer"',
    "primary-site": 'policy = "primary-site"\nprimary = "r1"',
    "serializable": 'policy = "serializable"',
}
ROWS = 20_000
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


async def planted(checked: CheckedSet) -> None:
    for replica, statements in PLANTED.items():
        await checked.on(replica, *statements)


@pytest.mark.parametrize("policy", POLICIES)
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
            done = await checked.repair(result, Strategy.MAJORITY)
            after = [one.written for one in writers]
            again = await checked.compare()
        log = [key async for key in checked.logged_keys()]
        left = await checked.small.sql("r1", "select xmin::text, id from t where id between 100 and 1000 order by id")

    assert clean.verdict is Verdict.EQUAL, clean.headline
    assert all(replica.position is not None for replica in clean.replicas)
    assert len({replica.position for replica in result.replicas}) == 1
    assert kinds(checked.real_differences(result)) == EXPECTED
    assert result.verdict is Verdict.DIFFERENT
    assert (done.written, done.moved) == (len(EXPECTED), 0)
    assert again.verdict is Verdict.EQUAL, again.headline
    assert left == untouched
    assert all(later > earlier for earlier, later in zip(before, after, strict=True))
    # One transaction for each replica that had something to repair, and each is in the log.
    assert {key.split("|")[1] for key in log if key.startswith("tops-repair")} == {"shop-r1", "shop-r2", "shop-r3"}
    assert len(done.transactions) == 3
